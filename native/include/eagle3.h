// eagle3.h - EAGLE speculative decoding on top of llama.cpp. This header is the library's manual.
//
// It is plain C with opaque handles, so that any language can load it. Python reads what is between the cdef
// marks. A round of speculative decoding is four calls, for one slot or for several at once:
//
//     eagle3_round_draft     drafts tokens that may follow each slot's last sampled token
//     eagle3_round_decode    runs one target batch: of each slot the sampled token and its draft tokens
//     eagle3_round_verify    samples each slot's rows in order, up to the first that differs from the draft
//     eagle3_round_commit    keeps the accepted rows; drops the others, in the target and in the head
//
// A slot is a sequence of the target context: its number is the llama_seq_id. Positions count the tokens of a
// slot from 0. Arrays are the caller's and are used during the call only. Handles are not thread-safe: use a
// session from one thread at a time.
//
// Calls return 0 or a count, or on failure a code below 0, with a message for eagle3_last_error(). No C++
// exception leaves the library. E_ARGUMENT changes nothing. After any other failure target and head hold
// eagle3_n_past positions of a slot: what they held before the call, with two exceptions. A target whose
// memory cannot go back loses the sequence, and eagle3_n_past is 0 then: see below. Where the target did its
// part and the head failed (E_MEMORY, say), the rows stay, and the head starts over behind them: it drafts
// nothing in the next round, and sees less of the past from then on.
//
// A KV cache drops any rows. The state of a recurrent layer goes back by the snapshots that the context keeps
// (llama_context_params::n_rs_seq), and a window that was pruned as far as it reaches. Farther back, the
// session restores a checkpoint that it took before, or empties the sequence; the tokens between it and the
// text's end wait, and are decoded again in front of the slot's next batch. Only a text that the session does
// not know (eagle3_state_reset) cannot be decoded again. Whoever reads the context's memory himself calls
// eagle3_settle first.
//
// A session has one round at a time: none, drafted, decoded or verified. What may be called when:
//
//                                             none      drafted   decoded   verified
//     eagle3_round_draft, plain_rounds        yes       yes (1)   no        no
//     eagle3_round_decode                     no        yes       no        no
//     eagle3_round_verify                     no        no        yes       yes (2)
//     eagle3_round_commit                     yes (3)   yes (3)   yes       yes
//     eagle3_round_drafted                    no        yes       yes       yes
//     eagle3_verified_row, round_failure      yes (4)   no        no        yes
//     eagle3_prefill, measure_target          yes       yes (1)   no        no
//     eagle3_can_tree                         yes       yes       no        no
//     eagle3_rewind, state_reset              yes       yes (1)   yes (5)   yes (5)
//     eagle3_settle                           yes       yes (7)   no        no
//     eagle3_state_set, head_forward, _trace  yes       yes (1)   no (6)    no (6)
//     eagle3_state_get                        yes       yes       no (6)    no (6)
//     all others, eagle3_session_close too    yes       yes       yes       yes
//
//     no  E_ARGUMENT, and nothing changes
//     (1) drops the draft, of all its slots, whichever slot the call is for: draft again before decode
//     (2) starts over at each slot's first row; samplers are where they are
//     (3) does nothing
//     (4) after a commit, until the next draft, prefill or measure_target
//     (5) of a slot of the round: ends it first, for all its slots, and none of its rows stay; of another
//         slot: the round goes on
//     (6) of a slot of the round; of another slot: yes, and the round goes on
//     (7) drops the draft like (1), if tokens of the slot wait
//
// A call that is legal and fails leaves the round as it was, with three exceptions. eagle3_round_draft leaves
// none, unless it returns E_ARGUMENT. eagle3_round_commit ends the round, unless it returns E_ARGUMENT. A
// slot that is empty after a failure (see above) ends a drafted round.
//
// The loop of one slot, whose prompt eagle3_prefill has decoded; `last` is the token sampled after it. It
// returns how many tokens it wrote to out, which has room for most + EAGLE3_MAX_DRAFT, or the code of a
// failure:
//
//     int32_t generate(eagle3_session * s, struct llama_sampler * sampler, int32_t last, int32_t * out,
//         int32_t most) {
//         struct eagle3_ask ask = {.slot = 0, .token = last, .kind = EAGLE3_CHAIN, .n_max = 3};
//         int32_t n = 0;
//         while (n < most) {
//             int32_t drafted, count = 0, keep;
//             int32_t code = eagle3_round_draft(s, &ask, 1, &drafted);
//             if (code >= 0) code = eagle3_round_decode(s);
//             if (code >= 0) code = eagle3_round_verify(s, &sampler, out + n, &count);
//             if (code >= 0) code = eagle3_round_failure(s, 0);
//             keep = count > 0 ? count : 0;  // the row of ask.token, and of each accepted draft token
//             const int32_t ended = eagle3_round_commit(s, &keep);
//             if (code < 0 || ended < 0) return code < 0 ? code : ended;
//             n += count;
//             ask.token = out[n - 1];
//         }
//         return n;
//     }
#pragma once
#include <stdint.h>
#define EAGLE3_ABI_VERSION 18
#ifdef __cplusplus
extern "C" {
#endif
// cdef-begin
struct llama_model;
struct llama_context;
struct llama_sampler;
struct llama_vocab;

enum {
    EAGLE3_MAX_ROWS    = 64,  // in a round: the most that are computed as if each were alone
    EAGLE3_MAX_DRAFT   = 63,  // draft tokens of a slot: beside them, its token needs a row
    EAGLE3_MAX_WIDTH   = 16,  // children of a node
    EAGLE3_MAX_LAYERS  = 64,  // layers of the target that a head reads
    EAGLE3_MAX_SOURCES = 6    // sources of drafts of a session
};

typedef struct eagle3_head eagle3_head;        // a head's weights, on the device of the target's output
typedef struct eagle3_drafter eagle3_drafter;  // a model that drafts for another, and its context
typedef struct eagle3_session eagle3_session;  // a target context, a head, and the state of the slots
typedef struct eagle3_text_memory eagle3_text_memory;  // texts of earlier requests

enum eagle3_status {
    EAGLE3_OK            = 0,
    EAGLE3_E_ARGUMENT    = -1,  // a parameter is out of range, or a call is out of order
    EAGLE3_E_FILE        = -2,  // the file cannot be opened or read
    EAGLE3_E_FORMAT      = -3,  // not a head this library understands; the message names key or tensor
    EAGLE3_E_MISMATCH    = -4,  // the head belongs to another target
    EAGLE3_E_MEMORY      = -5,  // out of memory, on the host or on the device
    EAGLE3_E_DECODE      = -6,  // llama_decode failed, as when the KV cache is full
    EAGLE3_E_UNSUPPORTED = -7,  // this target cannot be drafted for, or its memory cannot hold a tree
    EAGLE3_E_INTERNAL    = -8
};

int32_t eagle3_abi_version(void);  // EAGLE3_ABI_VERSION of the header that the library was built with

// Returns the message of this thread's last failure, never NULL. It is valid until this thread's next
// failure.
const char * eagle3_last_error(void);

// Ends the worker threads of the calling thread; its next computation starts new ones (0.1 ms). Call it from
// a thread that will not compute for a while. GNU's OpenMP counts the threads of the whole process: if they
// outnumber the processors, they sleep at barriers instead of spinning, and every decode takes several times
// as long.
void eagle3_release_threads(void);

// Returns what to call in place of a C function of libllama or libmtmd from a language that cannot catch. The
// function is at that address, and may throw. The guarded one logs the exception and returns what its error
// is: a code below 0, 0, null or false; a sampler that fails allows no token. A function that cannot throw
// comes back as it is, and one that is guarded already. Call it once for each function, before another thread
// calls that.
void * eagle3_guarded(const char * name, void * function);

// -- capture ----------------------------------------------------------------------------------------------
// From now on each llama_decode on ctx keeps the inputs of these target layers:
// features. Ids 0..n_layer, ascending, n_layer for what follows the last layer; with it, every token of a
// batch must ask for logits. n = 0 turns capture off; then it costs no time.
int32_t eagle3_capture_set(struct llama_context * ctx, const int32_t * layers, int32_t n);

// Copies what the last llama_decode on ctx kept: out[n_tokens][n][n_embd], float32, in batch order.
// E_ARGUMENT for a layer that was not captured, or for more tokens than that batch had.
int32_t eagle3_capture_get(
    struct llama_context * ctx, const int32_t * layers, int32_t n, int32_t n_tokens, float * out);

// -- head -------------------------------------------------------------------------------------------------
// Reads a head (GGUF, architecture eagle3, or eagle for EAGLE-1) for model, which must outlive it,
// as the two may share weights. path: on Windows in UTF-8. *out is the caller's to close. E_FILE, E_FORMAT,
// E_MISMATCH, E_MEMORY; E_UNSUPPORTED for a model loaded with LLAMA_SPLIT_MODE_TENSOR.
int32_t eagle3_head_open(const char * path, struct llama_model * model, eagle3_head ** out);
void eagle3_head_close(eagle3_head * head);  // NULL is allowed; close its sessions first

// Captures other target layers than the file names: as many, ascending. It must come before the head's first
// session.
int32_t eagle3_head_set_layers(eagle3_head * head, const int32_t * layers, int32_t n);

struct eagle3_head_info {
    int32_t n_embd, n_embd_target;  // hidden sizes
    int32_t n_vocab_draft;
    int32_t n_blocks;  // decoder layers
    int32_t n_layers_captured, layers[EAGLE3_MAX_LAYERS];
    int64_t n_bytes;       // the weights'
    int64_t n_bytes_step;  // weights that one draft step reads
};
int32_t eagle3_head_get_info(const eagle3_head * head, struct eagle3_head_info * out);
int32_t eagle3_head_d2t(const eagle3_head * head, int32_t * out);  // out[n_vocab_draft]: their target ids

// -- draft model ------------------------------------------------------------------------------------------
// Loads a small model (GGUF) that drafts for the target of ctx, which must outlive it. Its own context has
// n_slots sequences, each with the target's room, and keys and values in F16. n_gpu_layers: as in llama.cpp.
// path: on Windows in UTF-8. *out is the caller's to close. E_FORMAT; E_MISMATCH for another vocabulary:
// texts of tokens are compared, but not those of control tokens; E_MEMORY; E_UNSUPPORTED for a model that
// does not write a text from left to right.
int32_t eagle3_drafter_open(const char * path, struct llama_context * ctx, int32_t n_slots,
    int32_t n_gpu_layers, eagle3_drafter ** out);
void eagle3_drafter_close(eagle3_drafter * d);  // NULL is allowed; close its session first
// Returns what of its vocabulary differs and does not matter, for a message. It lives as long as d.
const char * eagle3_drafter_about(const eagle3_drafter * d);

// -- session ----------------------------------------------------------------------------------------------
// Binds ctx and head, both of which must outlive the session, and turns capture on. 1 <= n_slots <= the
// context's n_seq_max. With head = NULL, drafts are the text's and the caller's. *out is the caller's to
// close. E_UNSUPPORTED if the target cannot be drafted for.
int32_t eagle3_session_open(
    struct llama_context * ctx, eagle3_head * head, int32_t n_slots, eagle3_session ** out);
// Drafts with this model, in place of a head: before the first prompt, one drafter for one session, whose
// context is the one that it was opened for, with as many slots. E_ARGUMENT; E_UNSUPPORTED as above.
int32_t eagle3_session_use(eagle3_session * s, eagle3_drafter * d);
void eagle3_session_close(eagle3_session * s);  // drops a round under way, turns capture off; NULL is allowed

// Turns capture off (0) or on for all slots, from the next decode on: a round under way ends as it was
// decoded. While it is off, decoding costs what it costs without a head, and a slot that decodes drafts
// nothing until new text has been captured.
int32_t eagle3_session_set_capture(eagle3_session * s, int32_t on);

int32_t eagle3_can_tree(eagle3_session * s);  // whether the target's memory can hold a tree: 1 or 0
const char * eagle3_tree_refusal(const eagle3_session * s);  // why it cannot, for a message; NULL if it can
int32_t eagle3_n_past(const eagle3_session * s, int32_t slot);  // tokens decoded and kept in the slot

// This is what the session's context and head take now, in bytes, on the host and on devices together. Graphs
// that are kept for drafts compute in the buffers that plain decoding has, and only their descriptions are
// added to target_compute: at most a 12th of target_weights and target_cache, or 16 graphs. The buffers grow
// with the first batch that wants the logits of more than 64 rows. The call fills *out, which is the
// caller's. It returns E_ARGUMENT for NULL.
struct eagle3_memory {
    int64_t target_weights,
        target_cache;                  // the model; what is kept of the text of all slots, with checkpoints
    int64_t target_compute;            // compute buffers, and the graphs that are kept
    int64_t head_weights, head_cache;  // 0 without a head; with features of the target that it will read
    int64_t head_compute;              // one buffer for all its passes, and up to 4 MB of kept graphs
};
int32_t eagle3_memory_get(const eagle3_session * s, struct eagle3_memory * out);

// Forgets the positions from n_past on, in target and head. Its round ends first. E_UNSUPPORTED if the
// target's memory cannot go back there: nothing has changed.
int32_t eagle3_rewind(eagle3_session * s, int32_t slot, int32_t n_past);

// Decodes the slot's tokens that wait, so that the context's memory holds eagle3_n_past positions: before its
// owner decodes something else, or saves it. It does nothing if none wait. E_ARGUMENT, E_DECODE, E_MEMORY.
int32_t eagle3_settle(eagle3_session * s, int32_t slot);

// Decodes n prompt tokens (1..n_batch) and shows them to the head. Logits are computed for the last token, or
// for all. E_ARGUMENT, E_DECODE, E_UNSUPPORTED (this target's layers cannot be captured), E_MEMORY.
int32_t eagle3_prefill(
    eagle3_session * s, int32_t slot, const int32_t * tokens, int32_t n, int32_t all_logits);

// -- a round ----------------------------------------------------------------------------------------------
enum eagle3_kind {
    EAGLE3_PLAIN = 0,  // no draft
    EAGLE3_CHAIN = 1,  // n_max greedy tokens, up to the first less probable than p_min; none if below n_min
    EAGLE3_TREE  = 2,  // EAGLE-2: expands the `width` most probable nodes on each of `depth` levels, then
                       // drafts the n_max most probable of all. A node is as probable as its path: the
                       // product of the probabilities of its tokens, the first to its own. Those below p_min
                       // are neither expanded nor drafted, also if none is left
    EAGLE3_PLANNED = 3,  // what is expected to give the most tokens per second (needs eagle3_plan_set), of
                         // what the head offers, with `text` the slot's own text, and with `sampler` a
                         // grammar: at most n_max tokens, and in all planned slots together no more than the
                         // largest of their n_max; trees of at most `width` siblings (1: chains), on at most
                         // `depth` levels (0: n_max): what is left of the text, say
    EAGLE3_CHOICES = 4,  // a tree of fixed shape: n nodes, node i the ranks[i]-th most probable child (from
                         // 0) of node parents[i]
    EAGLE3_GIVEN   = 5,  // the caller's own n tokens; parents NULL for a chain
    EAGLE3_PROMPT  = 6   // no draft; `token` ends a prompt, whose other tokens the slot holds: as
                         // eagle3_prefill(token), but in the batch of the others
};

// An ask is what a slot wants of a round. Only the fields that its kind names above are read. In every array
// of parents, -1 stands for `token`, and parents[i] < i.
struct eagle3_ask {
    int32_t slot, token, kind;                // token is sampled and not decoded yet
    int32_t n_max, n_min, depth, width;       // n_max up to EAGLE3_MAX_DRAFT, depth, width >= 1
    float p_min;                              // a probability over the draft vocabulary
    int32_t n;                                // nodes in the arrays; level by level, or E_ARGUMENT
    const int32_t *parents, *ranks, *tokens;  // ranks 0..EAGLE3_MAX_WIDTH - 1
    int32_t text;  // 1: also tokens that followed the slot's last ones where its text has these already
    struct llama_sampler *
        sampler;  // what its grammar forces is drafted, too; NULL: nothing. It has accepted
                  // `token`, is read in eagle3_round_draft alone, and does not change
};

// Begins a round of n different slots; drafted[i] is the number of draft tokens of asks[i]. Each draft is cut
// to its own slot's room: what the context holds beyond eagle3_n_past and the token itself, and the slot's
// share of the batch. The batch has min(n_batch, n_ubatch, EAGLE3_MAX_ROWS) rows, n of them for the tokens;
// the rest is shared equally, but for EAGLE3_PLANNED, which shares what the other kinds leave. So a slot near
// its context's end drafts less, and costs the others nothing; E_ARGUMENT if a slot is full or n exceeds the
// batch. GIVEN and CHOICES keep their first nodes. The head drafts once for each commit: until then a second
// call has nothing new to go by. Returns the sum of drafted.
int32_t eagle3_round_draft(eagle3_session * s, const struct eagle3_ask * asks, int32_t n, int32_t * drafted);

// These are bits, as several sources may offer a token: 1 << i for source i. These three are the library's
// own.
enum eagle3_source { EAGLE3_FROM_HEAD = 1, EAGLE3_FROM_TEXT = 2, EAGLE3_FROM_GRAMMAR = 4 };

// Returns the name of source i, from 0 on: "head", "text" (both also where the session drafts without one),
// "grammar" (where it has text), then those of sources that were added, and NULL behind the last. At most
// EAGLE3_MAX_SOURCES have names. The session owns the string, which is valid until the session is closed.
const char * eagle3_source_name(const eagle3_session * s, int32_t i);

// Tells the draft of asks[i], level by level; there must be room for EAGLE3_MAX_DRAFT in each array. parents,
// probs and sources may be NULL. probs are the head's, each given its parent, and 0 where it offered nothing;
// sources are bits, see eagle3_source, and 0 for EAGLE3_GIVEN. Returns the number of draft tokens.
int32_t eagle3_round_drafted(const eagle3_session * s, int32_t i, int32_t * tokens, int32_t * parents,
    float * probs, int32_t * sources);

// Returns how many of the slot's last tokens, with `token` behind them, stand in its text (or its text
// memory) already with a token after them: at most 32, and 0 for none. It costs a microsecond, and no decode.
int32_t eagle3_text_match(const eagle3_session * s, int32_t slot, int32_t token);

// Returns how many tokens the sampler forces next: by a grammar in it, or an end of thoughts whose budget is
// spent. 0 for NULL, and where the session does not draft them. It costs microseconds, and no decode.
int32_t eagle3_forced(const eagle3_session * s, struct llama_sampler * sampler);

// Runs one target batch of all rows. Rows of a tree see only the draft tokens that they follow. After
// E_DECODE (the KV cache is full, say), E_MEMORY, and E_UNSUPPORTED (a tree that the target's memory cannot
// hold) the slots are as before, and the round is still drafted: decode again, or draft less.
int32_t eagle3_round_decode(eagle3_session * s);

// Samples each slot's rows with its sampler, which accepts each token: from child to child, until a token
// differs from the draft or ends generation. So samplers draw as often as in plain decoding.
// out[n][EAGLE3_MAX_ROWS] holds counts[n] tokens of each slot; the last one is not decoded yet. A count below
// 0 is the code of a slot whose sampler failed at its first row. Where it failed at a later row, the tokens
// before it are good, as in plain decoding, and eagle3_round_failure has the code. Either way
// eagle3_last_error has a message, and the other slots are good. E_DECODE if the output matrix could not be
// computed: the slots keep what they have, commit to end the round.
int32_t eagle3_round_verify(
    eagle3_session * s, struct llama_sampler * const * samplers, int32_t * out, int32_t * counts);

// Returns the code with which the sampler of asks[i] failed in the last eagle3_round_verify, behind counts[i]
// good tokens, or EAGLE3_OK. E_ARGUMENT unless a verified round is the context's last decode.
int32_t eagle3_round_failure(const eagle3_session * s, int32_t i);

// Ends the round: keep[i] rows of each slot stay, 0 for none. Of a chain they may be any, of a tree only rows
// that verification went through; before it, the first alone. Does nothing unless a round is decoded. After
// E_ARGUMENT (keep) the round is still under way. If a slot fails, the others keep their rows, and the first
// failure is returned; eagle3_n_past tells which slot: one whose memory could not go back is empty
// (E_UNSUPPORTED). E_INTERNAL if the context's owner has decoded in between: the head starts over.
int32_t eagle3_round_commit(eagle3_session * s, const int32_t * keep);

// This is a run of rounds without a draft, each of which brings one token.
struct eagle3_run {
    int32_t n;           // the most rounds, up to EAGLE3_MAX_ROWS; one below 1
    int32_t max_tokens;  // that the text still gets: no draft goes beyond, but GIVEN; 0: not known
    float seconds;       // none begins, but the first, that is likely to end later
    // What follows is filled in.
    int32_t n_tokens, tokens[EAGLE3_MAX_ROWS];  // the last one is not decoded yet
    int32_t drafted;                            // draft tokens of the round that is drafted now; 0: none
    float draft_s, target_s, verify_s;          // seconds of the rounds' parts
};

// Does the four steps for a lone slot, round after round, for as long as nothing is drafted: up to n rounds,
// or to a token that ends generation. It spares the caller his own work between rounds. The round whose draft
// ends the run is drafted: eagle3_round_decode goes on with it, after the last of the tokens. If a round
// fails, the tokens of those before it are good, and eagle3_n_past tells what the slot holds: all but the
// last of them, or the failed round's too where it is its commit that failed. The codes are those of the four
// steps, and that of a sampler's failure.
int32_t eagle3_plain_rounds(eagle3_session * s, const struct eagle3_ask * ask, struct llama_sampler * sampler,
    struct eagle3_run * run);

// Returns the row of the last batch that the slot's i-th token of eagle3_round_verify was sampled from.
// llama_get_logits_ith has its logits, and reads them from a device that they stayed on; those of rows that
// verification did not reach may be missing.
int32_t eagle3_verified_row(const eagle3_session * s, int32_t slot, int32_t i);

// Returns the processor time that the slot's sampler took in the last eagle3_round_verify, in seconds: its
// chain, without the output matrix. It is 0 before the slot's first.
float eagle3_sampling_seconds(const eagle3_session * s, int32_t slot);

// Samples as llama_sampler_sample does, for a row of the last decode (-1: its last with logits). Returns
// E_ARGUMENT for a row without logits, E_INTERNAL for a sampler's exception.
int32_t eagle3_sample(eagle3_session * s, struct llama_sampler * sampler, int32_t row);

// Makes a sampler that knows when a model thinks: between the tag `start`, with which an answer begins, and
// one of the n_ends tags of `ends`. Other thoughts may follow, with nothing but blanks between. inside: 1 if
// the prompt ends within thoughts. After `budget` tokens of thoughts, and the rest of a character, no token
// but those of `closing` may come, an end tag; a budget below 0 has no limit. grammar: a lazy grammar, which
// sees nothing of thoughts, or NULL; the sampler takes it if the call succeeds. Add *out to a chain, which
// frees it, in the grammar's place, or before a grammar that is not lazy. E_ARGUMENT, E_MEMORY.
int32_t eagle3_thoughts(const struct llama_vocab * vocab, const char * start, const char * const * ends,
    int32_t n_ends, int32_t inside, int32_t budget, const int32_t * closing, int32_t n_closing,
    struct llama_sampler * grammar, struct llama_sampler ** out);

// -- text memory ------------------------------------------------------------------------------------------
// Texts of earlier requests, from which slots that use it draft as from their own: a match of four tokens or
// more counts. It has n_bytes at most (65,536 or more), about 38 bytes a token, and takes them as it fills;
// when it is full, the older half of its texts is forgotten. Sessions of one vocabulary may share it, in one
// thread. *out is the caller's to close; slots that use it keep it until they use another, or are closed.
// E_ARGUMENT, E_MEMORY.
int32_t eagle3_text_memory_open(int64_t n_bytes, eagle3_text_memory ** out);
void eagle3_text_memory_close(eagle3_text_memory * m);  // NULL is allowed

// Adds a text, or its end if half of the memory does not hold it. E_ARGUMENT for a token below 0; E_MEMORY:
// the newer half of its texts is forgotten.
int32_t eagle3_text_memory_add(eagle3_text_memory * m, const int32_t * tokens, int32_t n);

// Copies the texts, oldest first, each with a -1 behind it. Returns their number of tokens, these included;
// out may be NULL. E_ARGUMENT if cap is too small.
int64_t eagle3_text_memory_get(const eagle3_text_memory * m, int32_t * out, int64_t cap);

// From its next draft on a slot drafts from this memory, too; with NULL it drafts from its own text alone, as
// at first. Nothing happens for a target that cannot take back drafts.
int32_t eagle3_text_memory_use(eagle3_session * s, int32_t slot, const eagle3_text_memory * m);

// -- planner ----------------------------------------------------------------------------------------------
// What decoding and drafting cost on this machine, in seconds; entry n is for n rows, entry 0 is unused. The
// planner corrects the target's part as it decodes.
struct eagle3_costs {
    float
        layers[EAGLE3_MAX_ROWS + 1];  // a target decode without the output matrix, after `context` positions
    float output[EAGLE3_MAX_ROWS + 1];  // the output matrix (lm_head)
    float head[EAGLE3_MAX_ROWS + 1];    // a pass of the head
    float cell[EAGLE3_MAX_ROWS + 1];  // what each position beyond `context` adds to a target decode; may be 0
    float first;                      // what the first pass of a draft costs above head[1]
    float context;                    // positions
    float back;  // what the copies of a checkpoint take, if one takes a slot's draft back; else 0
};

// From the next draft on EAGLE3_PLANNED drafts, and eagle3_round_verify computes the output matrix only for
// the rows it reaches. NULL undoes it. E_ARGUMENT for a cost that is negative or above 10,000 s, for layers
// or head below 1 ns, and for a context above 1e9.
int32_t eagle3_plan_set(eagle3_session * s, const struct eagle3_costs * costs);

// This is what the planner expects of rounds with as many slots as the last one. The call returns E_ARGUMENT
// before eagle3_plan_set.
struct eagle3_plan_info {
    float rate, plain_rate;  // tokens per second of all slots, with drafts and without
    float trust;             // slot 0's last acceptances against the head's calibration; 1: as expected
    int32_t asleep;          // rounds for which nothing is drafted, because drafting did not pay
    // These are what it foresaw of its rounds since eagle3_plan_set: their time, and the time in which plain
    // decoding would bring the tokens that it expected of them, in seconds.
    double foreseen, foreseen_plain;
};
int32_t eagle3_plan_get(eagle3_session * s, struct eagle3_plan_info * out);

// These measure what eagle3_plan_set wants, for 1..EAGLE3_MAX_ROWS rows: a decode after what the slot holds,
// which stays (without the output matrix where that can be deferred; n = 1: with it); the output matrix for
// rows of that decode, which are not kept (0 where it was not deferred); a pass of the head; a further step
// of a draft, of n rows: where the head's first pass looks ahead on a device, that is less than a pass, which
// is waited for; a checkpoint of what the slot holds, or of one token if it is empty, taken and restored (0
// where the target's memory drops any rows of a draft). They return E_UNSUPPORTED if the target cannot go
// back before the measured rows: the slot is empty then.
int32_t eagle3_measure_target(eagle3_session * s, int32_t slot, int32_t n, float * seconds);
int32_t eagle3_measure_output(eagle3_session * s, int32_t n, float * seconds);
int32_t eagle3_measure_head(eagle3_session * s, int32_t slot, int32_t n, float * seconds);
int32_t eagle3_measure_step(eagle3_session * s, int32_t slot, int32_t n, float * seconds);
int32_t eagle3_measure_back(eagle3_session * s, int32_t slot, float * seconds);

// -- threads ----------------------------------------------------------------------------------------------
// A round uses the context's numbers of threads (llama_set_n_threads), or fewer where that is measured to be
// faster: a decode ends with its slowest thread, so that beside another program fewer may be faster. Bits do
// not change. choose: 0 turns it off, else on; the default is on if the CPU computes everything. now: the
// number that the next round uses for one row. measure: decodes one row with each number, after what the slot
// holds, which stays, for at most some 0.2 s or one decode each; the next round begins with the fastest.
// E_UNSUPPORTED if the target cannot go back before the measured row: the slot is empty then.
int32_t eagle3_threads_choose(eagle3_session * s, int32_t on);
int32_t eagle3_threads_now(eagle3_session * s);
int32_t eagle3_measure_threads(eagle3_session * s, int32_t slot);

// -- state ------------------------------------------------------------------------------------------------
// What drafts are made from, the head's state of a slot and its text, as bytes to store beside llama_state_*.
// get returns the bytes written, E_ARGUMENT if cap is too small. set copies; damaged bytes, and those of
// another model or head, are E_FORMAT and change nothing. E_UNSUPPORTED if nothing can be drafted for the
// target. reset tells the slot that its sequence holds n_past tokens that neither the head nor
// the text ever saw.
int64_t eagle3_state_size(const eagle3_session * s, int32_t slot);
int64_t eagle3_state_get(const eagle3_session * s, int32_t slot, uint8_t * out, int64_t cap);
int32_t eagle3_state_set(eagle3_session * s, int32_t slot, const uint8_t * data, int64_t size);
int32_t eagle3_state_reset(eagle3_session * s, int32_t slot, int32_t n_past);

// -- looking inside, for tests and `compare` --------------------------------------------------------------
// Runs the head alone over n rows from position 0: tokens[p] is the token at position p + 1,
// features[n][n_layers][n_embd_target]. Each output may be NULL: g[n][n_embd] after fc, state[n][n_embd] that
// the next draft step takes in place of g, logits[n][n_vocab_draft]. Overwrites the slot's head state.
int32_t eagle3_head_forward(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, float * g, float * state, float * logits);

// Does the same run and copies a stage of it to out[n][width]; returns the number of values. `stage` is g,
// prenorm, or of decoder layer L: attn_in-L (input of q, k, v), attn_out-L or ffn_out-L (what is added to the
// state).
int64_t eagle3_head_trace(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, const char * stage, float * out, int64_t cap);
// cdef-end
#ifdef __cplusplus
}
#endif
