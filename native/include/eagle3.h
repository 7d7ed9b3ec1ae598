// eagle3.h - EAGLE speculative decoding on top of llama.cpp: capture, head, drafting, verification.
//
// This header is the manual. It is plain C: opaque handles and scalars, so that any language can load it;
// Python reads the part between the cdef marks as it stands.
//
// A round of speculative decoding is four calls, and none of them loops over the vocabulary twice:
//
//     eagle3_draft   (s, slot, x, ..., draft)    the head proposes what may follow x
//     eagle3_decode  (s, slot, x, draft, n)      one target batch [x, draft...], logits for every row
//     eagle3_verify  (s, slot, sampler, ...)     samples row by row, stops at the first disagreement
//     eagle3_commit  (s, slot, n_keep)           keeps the rows that hold, drops the rest everywhere
//
// Positions count tokens of a sequence from 0. A slot is a sequence of the target context: slot id equals
// llama_seq_id. Handles are not thread-safe; use one session from one thread at a time.
//
// Calls that can fail return one of the codes below (0 or a count on success, negative on failure) and leave
// a message for eagle3_last_error(). No C++ exception leaves the library and nothing aborts the process.
//
// After a failure a slot's target and head hold eagle3_n_past positions. That is what they held before the
// call, but for two cases: a recurrent target that has decoded rows and cannot take them back leaves the slot
// empty (0 positions); and where the target did its part and the head failed (E_MEMORY, say), the rows stay
// and the head starts over behind them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define EAGLE3_ABI_VERSION 5

#ifdef __cplusplus
extern "C" {
#endif

// cdef-begin

typedef struct eagle3_head eagle3_head;        // a head's weights, on the device of the target's output
typedef struct eagle3_session eagle3_session;  // a target context, a head and the state of the slots

enum eagle3_status {
    EAGLE3_OK         = 0,
    EAGLE3_E_ARGUMENT = -1,  // a parameter out of range, or a call out of order
    EAGLE3_E_FILE     = -2,  // cannot be opened or read
    EAGLE3_E_FORMAT   = -3,  // not a head this library understands; the message names key or tensor
    EAGLE3_E_MISMATCH = -4,  // the head belongs to another target
    EAGLE3_E_MEMORY   = -5,  // out of memory, on the host or the device
    EAGLE3_E_DECODE   = -6,  // llama_decode failed; the slots are as before the call (see below)
    EAGLE3_E_UNSUPPORTED =
        -7,  // the target cannot be drafted for (it cannot drop part of a sequence, or is split by tensors)
    EAGLE3_E_INTERNAL = -8
};

struct eagle3_head_info {
    int32_t n_embd;         // draft hidden size
    int32_t n_embd_target;  // target hidden size
    int32_t n_vocab_draft;
    int32_t n_blocks;  // decoder layers
    int32_t n_layers_captured;
    int32_t layers[64];    // ids: k is the input of target layer k, n_layer is after the last
    int64_t n_bytes;       // of weights
    int64_t n_bytes_step;  // read by one draft step (everything but fc and the embeddings)
};

// Equals EAGLE3_ABI_VERSION of the header the library was built with.
int32_t eagle3_abi_version(void);

// The message of this thread's last failed call, never NULL. Valid until the thread's next call.
const char * eagle3_last_error(void);

// Ends the threads that the calling thread's computations have gathered; the next one gathers new ones (0.1
// ms). For whoever will not compute for a while: GNU's OpenMP counts those of every thread that ever
// computed, and once they outnumber the processors it sleeps at each barrier instead of spinning, which makes
// every decode of the process several times as slow.
void eagle3_release_threads(void);

// -- capture ----------------------------------------------------------------------------------------------

// Keeps the inputs of the given target layers (0..n_layer, ascending, no duplicates; n_layer means after the
// last layer) from each following llama_decode on ctx, a `struct llama_context *`. layers is read during the
// call only. n = 0 (layers may be NULL) turns capture off: then it costs no time; the context keeps the
// compute buffers that it has grown. Turning it on and off between batches costs a graph to build, nothing
// more. With n_layer in the list every token of a batch must ask for logits. E_ARGUMENT for ids out of range.
int32_t eagle3_capture_set(void * ctx, const int32_t * layers, int32_t n);

// Copies what the last llama_decode on ctx kept: out[n_tokens][n_layers][n_embd], float32, in the order of
// the batch. layers and n as given to eagle3_capture_set. Call it before the next llama_decode.
// E_ARGUMENT for layers that were not captured and for more tokens than the last llama_decode had.
int32_t eagle3_capture_get(void * ctx, const int32_t * layers, int32_t n, int32_t n_tokens, float * out);

// -- head -------------------------------------------------------------------------------------------------

// Reads a head (GGUF, architecture eagle3, or eagle for EAGLE-1) for model, a `struct llama_model *` that
// must outlive it: weights that the head shares with its target are the model's own, the tensors that its
// graphs use. On success *out is owned by the caller. E_FILE, E_FORMAT, E_MISMATCH, E_MEMORY; E_UNSUPPORTED
// for a model loaded with LLAMA_SPLIT_MODE_TENSOR.
int32_t eagle3_head_open(const char * path, void * model, eagle3_head ** out);
void eagle3_head_close(eagle3_head * head);  // NULL is allowed; close its sessions first

// Other target layers than the file names, as many, ascending, 0..n_layer; before the first session of the
// head.
int32_t eagle3_head_set_layers(eagle3_head * head, const int32_t * layers, int32_t n);

int32_t eagle3_head_get_info(const eagle3_head * head, struct eagle3_head_info * out);

// -- session ----------------------------------------------------------------------------------------------

// Binds ctx (a `struct llama_context *`) and head, both of which must outlive the session, and turns capture
// on in ctx. n_slots <= the context's n_seq_max. With head = NULL the same calls decode plainly: drafts are
// empty. E_UNSUPPORTED if the target cannot be drafted for. On success *out is owned by the caller.
int32_t eagle3_session_open(void * ctx, eagle3_head * head, int32_t n_slots, eagle3_session ** out);
// Leaves ctx as a caller of llama_decode expects it: a round under way is dropped, capture is off. Call it
// before the context and the head are freed. NULL is allowed.
void eagle3_session_close(eagle3_session * s);

// Pauses (0) or resumes (1) capture for all slots, as often as one likes: paused, decoding costs what it
// costs without a head, and a slot that decodes drafts no tokens until it has seen new text. Slots that
// decode nothing meanwhile lose nothing.
int32_t eagle3_session_set_capture(eagle3_session * s, int32_t on);

// Tokens decoded and kept in the slot, i.e. the position of the next one; negative on error.
int32_t eagle3_n_past(const eagle3_session * s, int32_t slot);

// Forgets everything from position n_past on, in target and head. n_past may not exceed eagle3_n_past.
int32_t eagle3_rewind(eagle3_session * s, int32_t slot, int32_t n_past);

// Decodes n tokens of a prompt (1 <= n <= n_batch) after what the slot holds, with logits for the last one
// (row n - 1 of the batch) or, if all_logits is not 0, for every one, and lets the head see them, 64 at a
// time. E_ARGUMENT, E_DECODE, E_UNSUPPORTED (the layers cannot be captured), E_MEMORY.
int32_t eagle3_prefill(
    eagle3_session * s, int32_t slot, const int32_t * tokens, int32_t n, int32_t all_logits);

// The head drafts what may follow `token`, which itself was sampled and is not decoded yet: a greedy chain
// of at most n_max tokens that ends before the first one whose probability is below p_min; a chain shorter
// than n_min is dropped. Writes tokens (target ids) and their probabilities over the draft vocabulary (probs
// may be NULL) and returns their number, which may be 0. Once for each commit: until rows are committed, a
// second call has nothing new to go by and returns 0.
int32_t eagle3_draft(eagle3_session * s, int32_t slot, int32_t token, int32_t n_max, int32_t n_min,
    float p_min, int32_t * tokens, float * probs);

// One target batch: token and n drafted tokens, logits for all n + 1 rows, n >= 0. Nothing is kept until
// eagle3_commit. On E_DECODE the slot is as before.
int32_t eagle3_decode(eagle3_session * s, int32_t slot, int32_t token, const int32_t * draft, int32_t n);

// A tree instead of a chain (EAGLE-2): of each of `depth` levels the `width` most probable nodes are gone on
// from, and of all nodes the n_max most probable are drafted, none whose way is less probable than p_min.
// Nodes come level by level; node i follows node parents[i] < i, -1 for `token` itself; probs (may be NULL)
// are those of the whole way. n_max < 64, width <= 16.
int32_t eagle3_draft_tree(eagle3_session * s, int32_t slot, int32_t token, int32_t n_max, int32_t depth,
    int32_t width, float p_min, int32_t * tokens, int32_t * parents, float * probs);

// A tree of fixed shape: node i is the ranks[i]-th likeliest child (0 the likeliest, at most 15) of node
// parents[i] < i, -1 for `token` itself. Writes the nodes' tokens in the order given and returns their
// number: n, or the first ones if the context has room for no more, or 0.
int32_t eagle3_draft_choices(eagle3_session * s, int32_t slot, int32_t token, int32_t n,
    const int32_t * parents, const int32_t * ranks, int32_t * tokens, float * probs);

// Whether the target's memory can hold a tree: 1 or 0. E_ARGUMENT while a round is under way.
int32_t eagle3_can_tree(eagle3_session * s);

// One target batch of token and a tree of n drafts, level by level; rows see only the drafts that they
// follow. eagle3_verify then walks from child to child, eagle3_commit keeps the first n_keep rows of its way.
// E_UNSUPPORTED if the target's memory cannot hold a tree: it needs flash attention.
int32_t eagle3_decode_tree(eagle3_session * s, int32_t slot, int32_t token, const int32_t * draft,
    const int32_t * parents, int32_t n);

// What decoding and drafting cost here, in seconds; entry n of an array is for n rows, entry 0 unused. The
// planner's only knowledge of the machine; it corrects the target's part as it decodes.
struct eagle3_costs {
    float layers[65];  // a target decode without the output matrix, after `context` positions
    float output[65];  // the output matrix
    float head[65];    // a pass over the head
    float cell[65];    // what each position after `context` adds to a target decode; may be 0
    float first;       // what the first pass of a draft costs above head[1]
    float other;       // the rest of a round that drafts
    float context;
};

// Gives the session its costs: from then on eagle3_draft_planned chooses drafts, and eagle3_verify computes
// the output matrix only for rows it gets to, in the pieces that cost least. NULL takes them away again.
// E_ARGUMENT unless all are finite, those of rows 1..64 positive and none negative.
int32_t eagle3_plan_set(eagle3_session * s, const struct eagle3_costs * costs);

// What the planner believes of rounds with as many slots as the last one: tokens per second, of all slots,
// that it goes by and that plain decoding would give, what the last tokens of slot 0 say of the head beyond
// its tallies (1: what they say), rounds it rests for. E_ARGUMENT before eagle3_plan_set.
struct eagle3_plan_info {
    float rate;
    float plain_rate;
    float trust;
    int32_t asleep;
};
int32_t eagle3_plan_get(eagle3_session * s, struct eagle3_plan_info * out);

// Measures for eagle3_plan_set; *seconds is what the call's work took. A decode of n rows after what the slot
// holds, which stays as it is, without the output matrix where that can wait (n = 1: with it); the output
// matrix of n rows of that very decode; a pass of the head over n rows. 1 <= n <= 64.
int32_t eagle3_measure_target(eagle3_session * s, int32_t slot, int32_t n, float * seconds);
int32_t eagle3_measure_output(eagle3_session * s, int32_t n, float * seconds);
int32_t eagle3_measure_head(eagle3_session * s, int32_t slot, int32_t n, float * seconds);

// A draft of at most n_max tokens that is expected to bring most tokens per second, as tree of at most
// `width` siblings (1: a chain); 0 tokens if none pays. It learns from eagle3_verify and eagle3_commit how
// far the head can be trusted, and rests between looks when drafting never pays. tokens, parents and probs as
// for eagle3_draft_tree.
int32_t eagle3_draft_planned(eagle3_session * s, int32_t slot, int32_t token, int32_t n_max, int32_t width,
    int32_t * tokens, int32_t * parents, float * probs);

// Samples the rows of the last eagle3_decode in order with sampler, a `struct llama_sampler *`, which also
// accepts each sampled token. Stops after the first one that differs from the drafted token or ends
// generation, so the sampler draws as often as in plain decoding. Writes at most n + 1 tokens to out and
// returns how many; the last of them is not decoded yet (the bonus).
int32_t eagle3_verify(eagle3_session * s, int32_t slot, void * sampler, int32_t * out);

// Samples row `row` of the last decode (-1: its last row with logits) with sampler, a `struct llama_sampler
// *` that also accepts the token; returns the token. As llama_sampler_sample, but a sampler's exception (a
// grammar that is stuck) becomes E_INTERNAL, and a row that is not there or has no logits E_ARGUMENT.
int32_t eagle3_sample(eagle3_session * s, void * sampler, int32_t row);

// The row of the last eagle3_decode that the i-th token of eagle3_verify was sampled from: i itself for a
// chain. llama_get_logits_ith has its logits until the next decode; those of rows that verification did not
// get to may be missing.
int32_t eagle3_verified_row(const eagle3_session * s, int32_t slot, int32_t i);

// Ends a round: keeps the first n_keep rows of the last eagle3_decode (token, then accepted drafts), drops
// the others from the target's memory, and keeps their features for the next draft. 0 <= n_keep <= n + 1.
// Without a round under way it does nothing. After E_ARGUMENT (n_keep) the round is still under way; after
// any other error it is over (see above): E_UNSUPPORTED if rows cannot be dropped, and the slot is empty.
int32_t eagle3_commit(eagle3_session * s, int32_t slot, int32_t n_keep);

// -- several slots in one round ---------------------------------------------------------------------------
//
// The same four steps over up to 64 slots at once: one pass of the head a level, one batch of the target,
// rows shared out among the slots by what they are expected to bring. A slot's rows are computed as if it
// were alone.

enum eagle3_kind {
    EAGLE3_PLAIN   = 0,  // no draft
    EAGLE3_CHAIN   = 1,  // as eagle3_draft: n_max, p_min
    EAGLE3_TREE    = 2,  // as eagle3_draft_tree: n_max, depth, width, p_min
    EAGLE3_PLANNED = 3   // as eagle3_draft_planned: n_max, over all slots; width
};

// What a slot wants of a round: token was sampled and is not decoded yet.
struct eagle3_ask {
    int32_t slot;
    int32_t token;
    int32_t kind;
    int32_t n_max;
    int32_t depth;  // at least 1
    int32_t width;  // 1..16
    float p_min;
};

// Drafts for n different slots and begins their round; drafted[i] is how many tokens asks[i] got. Where there
// is no room for all, drafts are shorter. Returns their sum.
int32_t eagle3_round_draft(eagle3_session * s, const struct eagle3_ask * asks, int32_t n, int32_t * drafted);

// What asks[i] got: the tokens, each after parents[...], -1 for the ask's own token. Room for 63 of each.
// Returns their number.
int32_t eagle3_round_drafted(const eagle3_session * s, int32_t i, int32_t * tokens, int32_t * parents);

// One target batch of all of it. On E_DECODE the slots are as before, and nothing is under way.
int32_t eagle3_round_decode(eagle3_session * s);

// Samples with each slot's sampler (`struct llama_sampler *`), in the order of the asks: out[n][64],
// counts[n] tokens of each, the last one not decoded yet. A count below 0 is the error of a slot whose
// sampler failed; the others' tokens are good.
int32_t eagle3_round_verify(eagle3_session * s, void * const * samplers, int32_t * out, int32_t * counts);

// Ends the round: keep[n] rows of each slot, 0 for none. Without a round under way it does nothing. A slot
// that fails takes no other with it: all but it keep their rows, and the first failure is the call's code.
// eagle3_n_past tells which: a slot whose rows could not be dropped is empty (E_UNSUPPORTED). After
// E_ARGUMENT (keep) the round is still under way.
int32_t eagle3_round_commit(eagle3_session * s, const int32_t * keep);

// -- state ------------------------------------------------------------------------------------------------

// A slot's head state as bytes, to be kept beside llama_state_*: size, copy out (returns the bytes written or
// E_ARGUMENT if cap is too small), copy in. The bytes are the caller's, and copied. Foreign or damaged bytes
// are refused with E_FORMAT and change nothing; damage that leaves every field in its bounds costs wrong
// drafts and nothing else. None of them while the slot's round is under way (E_ARGUMENT), nor without a head.
// eagle3_state_reset tells the slot that its sequence now holds n_past tokens the head never saw; E_ARGUMENT
// if the target holds none of them.
int64_t eagle3_state_size(const eagle3_session * s, int32_t slot);
int64_t eagle3_state_get(const eagle3_session * s, int32_t slot, uint8_t * out, int64_t cap);
int32_t eagle3_state_set(eagle3_session * s, int32_t slot, const uint8_t * data, int64_t size);
int32_t eagle3_state_reset(eagle3_session * s, int32_t slot, int32_t n_past);

// -- looking inside (tests, `compare`) --------------------------------------------------------------------

// Runs the head alone over n rows from position 0 of a slot: tokens[p] is the one at position p + 1,
// features[n][n_layers][n_embd_target]. Each output may be NULL: g[n][n_embd] after fc, state[n][n_embd] that
// a draft's next step takes in place of g (before the final norm, unless the head has norm_output),
// logits[n][n_vocab_draft]. Overwrites the slot's head state; the target is not run.
int32_t eagle3_head_forward(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, float * g, float * state, float * logits);

// The same run, and one of its stages: out[n][width of the stage], of which the number of values is returned.
// `stage` is g, prenorm, or for decoder layer L (from 0) attn_in-L, what q, k and v are made of, attn_out-L
// or ffn_out-L, what attention or FFN adds to the state. E_ARGUMENT for another name, or if cap values are
// too few.
int64_t eagle3_head_trace(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, const char * stage, float * out, int64_t cap);

// Target id of every draft id: out[n_vocab_draft].
int32_t eagle3_head_d2t(const eagle3_head * head, int32_t * out);

// cdef-end

#ifdef __cplusplus
}
#endif
