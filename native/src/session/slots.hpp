// The slots have their texts in the target's memory, and the sources of drafts that follow these texts.
#pragma once

#include "draft/grammar_source.hpp"
#include "head/head_source.hpp"
#include "model/drafter_model.hpp"
#include "draft/source.hpp"
#include "target/target_memory.hpp"
#include "text/text_source.hpp"

#include <memory>
#include <vector>

namespace eagle3 {

// This is the most that a slot drafts. With the token itself, it is a batch of which every row is computed as
// if it were alone.
constexpr int MAX_DRAFT = EAGLE3_MAX_DRAFT;
static_assert(MAX_DRAFT == MAX_ROWS - 1);

// This is the last draft of a slot, level by level.
struct slot_draft {
    std::vector<int32_t> tokens, parents;  // parents: the draft token before it, -1 for none
    std::vector<float>
        reach;  // expected: that verification gets to it; empty if the caller brought the draft
    std::vector<evidence_list> evidence;  // empty like reach

    struct first_token {
        int32_t token;
        evidence_list evidence;
    };
    std::vector<first_token> undrafted;  // what the sources offered, if nothing of it was drafted

    void clear() {
        tokens.clear();
        parents.clear();
        reach.clear();
        evidence.clear();
        undrafted.clear();
    }
};

// This is a slot's part of the round, or of the last one.
struct slot_round {
    bool under_way = false, tree = false;
    bool of_prompt = false;        // the token ends a prompt
    std::vector<int32_t> tokens;   // token, then drafts
    std::vector<int32_t> parents;  // row that each row follows, -1 for the first
    std::vector<int32_t> path;     // rows that verification went through; before it, the first only
    std::vector<int32_t> at;       // each row's place in the batch, which other slots share
    int32_t sampled  = -1;         // the first token that verification sampled, -1 before it
    float sampling_s = 0.0f;       // processor time of its sampler in the last verification
    int failure      = EAGLE3_OK;  // the code with which its sampler ended that verification
};

struct slot_state {
    int n_past = 0;  // tokens of the text, all of which the target has decoded
    // The last of them, which the target's memory has lost: they are decoded again, in front of the next
    // batch.
    std::vector<int32_t> waiting;
    slot_draft draft;
    slot_round round;
    trust_list trust;  // in each source; follows the last few tokens

    slot_state() { trust.fill(1.0f); }
};

class slots {
  public:
    slots(llama_context * ctx, const eagle3::head * h, int n_slots);  // h may be null
    ~slots();

    slots(const slots &)             = delete;
    slots & operator=(const slots &) = delete;

    llama_context * const ctx;
    target_memory target;
    const llama_memory_t memory;  // the target's
    const int n_batch, n_ctx, n_vocab;
    const int most_rows;  // in a round: they must fit a micro-batch, and MAX_ROWS
    int n_largest = 1;    // logits of a row that the last samplers went on from: see n_largest_for

    slot_state & at(int slot);  // E_ARGUMENT if there is none
    const slot_state & at(int slot) const;
    int size() const { return (int) slots_.size(); }
    void check_tokens(const int32_t * tokens, int n) const;
    const std::vector<int32_t> & ends() const { return ends_; }  // tokens that end a generation

    // -- sources --
    void add_source(std::unique_ptr<source> source);
    // Returns the name of the source with this id, or null behind the last. Head and text have names also
    // where the session has no such source.
    const char * source_name(int id) const;
    const std::vector<std::unique_ptr<source>> & sources() const { return sources_; }
    void use(drafter_model & own);  // see eagle3_session_use
    // Puts it before the others. E_ARGUMENT if the session has one.
    void set_passes(std::unique_ptr<pass_source> source);
    pass_source * passes() const { return passes_; }  // the first of them, or null
    bool takes_passes(const source & from) const { return &from == passes_; }
    head_source & need_head() const;              // E_ARGUMENT unless that is a head
    text_source * text() const { return text_; }  // null if the target cannot drop part of a sequence
    grammar_source * grammar() const { return grammar_; }  // null as text()
    bool ready(int slot) const;                            // whether a source has anything to offer
    void tell(const kept_tokens & k);  // every source, also if one fails; throws the first failure
    void want_passes(bool on) { on_ = on; }
    void apply_wanted();  // to the next decode

    // -- texts --
    void rewind(int slot, int n_past);  // E_UNSUPPORTED, and nothing has changed, if it cannot go back
    void reset(int slot, int n_past);
    void put_row(int row, int32_t token, int pos, int slot, bool logits);  // into the next batch
    // Throws E_ARGUMENT unless these tokens may follow what the slot holds in one batch.
    void check_text(int slot, const int32_t * tokens, int n) const;
    // Lays out a batch of tokens after what the slot holds. Returns what its sources will be told of them.
    kept_tokens lay_out_text(int slot, const int32_t * tokens, int n, bool all_logits);
    // Decodes the first n rows of the batch. If that fails, these slots hold what they held before, or
    // nothing if their memory cannot go back.
    void run_rows(int n, const int * of, int n_of);
    bool many_wait(int slot) const { return (int) at(slot).waiting.size() > checkpoint_limits::most_waiting; }
    // Decodes what waits, so that the target's memory holds all of the slot's text. It is no part of a round.
    void settle(int slot);
    // Says that the target's memory holds the text of the slot, and n_past is its length now.
    void holds(int slot, int n_past);
    // Drops what the target's memory holds of a slot from n_past on, which may be in the rows of its round. A
    // memory that cannot go back drops the whole sequence; the slot is then empty, and the result is false.
    bool drop_from(int slot, int n_past, bool failed = false);
    // Throws E_UNSUPPORTED if the slot is empty now.
    void must_drop_from(int slot, int n_past, bool failed = false);
    // Drops the rows beyond each slot's n_past, and the tree. failed: their decode has failed.
    bool drop_rows(const int * of, int n_of, bool failed = false);
    void kept_prompt(const kept_tokens & k);  // these stay in the slot

    // -- state: the bytes of the sources, one after the other --
    void need_state() const;  // E_UNSUPPORTED if there is no source
    int64_t state_size(int slot) const;
    void state_get(int slot, uint8_t * out) const;
    std::vector<int64_t> check_state(const uint8_t * data, int64_t size) const;  // where each source's begin
    void state_set(int slot, const uint8_t * data, const std::vector<int64_t> & begins);

  private:
    int known_from(int slot) const;
    void wait_from(int slot, int n_past);

    std::vector<std::unique_ptr<source>> sources_;
    pass_source * passes_     = nullptr;
    head_source * head_       = nullptr;
    text_source * text_       = nullptr;
    grammar_source * grammar_ = nullptr;
    std::vector<slot_state> slots_;
    std::vector<int32_t> ends_;
    llama_batch batch_;
    bool on_ = true;
};

}  // namespace eagle3
