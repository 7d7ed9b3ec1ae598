// The state of the slots, and the four steps of a round over them.
#pragma once

#include "graph.hpp"
#include "head.hpp"
#include "planner.hpp"

#include <functional>
#include <vector>

namespace eagle3 {

constexpr int MAX_DRAFT =
    MAX_ROWS - 1;  // with the token itself: the rows that are computed alike (batch invariance)

void capture_set(llama_context * ctx, const int32_t * layers, int n);
void capture_get(llama_context * ctx, const int32_t * layers, int n, int n_tokens, float * out);

// What the target has decoded, what the head has seen of it, and what it has not yet.
//
//     0 ... head_from ...... head_n ...... pending ...... n_past
//           [ pairs in the head's cache )[ features waiting     )
//
// The pair of position p needs the token of p + 1; so the last pending row always waits for the next token.
// If there is a gap before the pending rows (features never seen), the head starts over there: it sees less
// of the past, which costs acceptance and nothing else.
struct slot_state {
    int n_past    = 0;
    int head_from = 0;
    int head_n    = 0;

    int pending_pos = 0;
    std::vector<int32_t> pending_tokens;  // the token after each row; the last row's may be missing
    std::vector<float> pending_features;  // [n_pending][n_features]

    bool in_round = false, round_tree = false;
    std::vector<int32_t> round_tokens;   // token, then drafts
    std::vector<int32_t> round_parents;  // row that each row follows, -1 for the first
    std::vector<int32_t> round_path;     // rows that verification went through; before it, the first only
    std::vector<int32_t> round_at;  // where each row is in the batch, which other slots' rows may be in too

    // the last draft, level by level
    std::vector<int32_t> draft_tokens, draft_parents;  // parents: the draft token before it, -1 for none
    std::vector<float> draft_probs;  // the head's, its parent given; empty if the caller brought the draft
    std::vector<float> draft_reach;  // expected: that verification gets to it; empty like draft_probs
    float trust = 1.0f;              // in the planner's tallies, after the last few tokens

    void clear_draft() {
        draft_tokens.clear();
        draft_parents.clear();
        draft_probs.clear();
        draft_reach.clear();
    }

    void clear_pending(int pos) {
        pending_pos = pos;
        pending_tokens.clear();
        pending_features.clear();
    }
};

using ask = eagle3_ask;

class session {
  public:
    session(llama_context * ctx, head * h, int n_slots);  // h may be null: plain decoding
    ~session();

    void set_capture(bool on);
    int n_past(int slot) const { return at(slot).n_past; }
    void rewind(int slot, int n_past);
    void reset(int slot, int n_past);
    void prefill(int slot, const int32_t * tokens, int n, bool all_logits);
    int sample(llama_sampler * sampler, int row);
    int verified_row(int slot, int i) const;
    bool can_tree();

    // The four steps of a round, each slot at most once. draft returns the number of draft tokens. In verify
    // a count below 0 is the code of a slot whose sampler failed, what it said is in failure; the others'
    // tokens are good. counts and keep: of each slot of the round, in its order.
    int draft(const std::vector<ask> & asks);
    void decode();
    void verify(llama_sampler * const * samplers, int32_t * out, int32_t * counts, std::string & failure);
    void commit(const int32_t * keep);
    const std::vector<int> & round_slots() const { return round_.slots; }
    const slot_state & slot(int i) const { return at(i); }

    planner & plan() { return planner_; }
    const runner * head_runner() const { return runner_.get(); }  // null without a head

    float measure_target(int slot, int n);
    float measure_output(int n);
    float measure_head(int slot, int n);

    int64_t state_size(int slot) const;
    void state_get(int slot, uint8_t * out) const;
    void state_set(int slot, const uint8_t * data, int64_t size);

    void head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g,
        float * state, float * logits);
    const std::vector<float> & head_trace(
        int slot, const int32_t * tokens, const float * features, int n, const char * stage);

  private:
    slot_state & at(int slot);
    const slot_state & at(int slot) const;
    int n_pending(const slot_state & s) const;
    pass head_pass(int slot, const int32_t * tokens, const float * features, int n);
    void run_batch(int slot, const int32_t * tokens, int n, bool all_logits);
    void run_rows(int n, const std::vector<int> & slots);
    void drop_rows(const std::vector<int> & slots);
    bool drop_from(int slot, int n_past);
    void abandon_round();
    void take_features(slot_state & s, int pos, int n);
    void take_features(slot_state & s, int pos, const std::vector<int32_t> & rows);
    void begin_pending(slot_state & s, int pos);
    void feed(int slot);
    void head_part(slot_state & s, const std::function<void()> & f);
    std::vector<pass_row> feed_rows(slot_state & s, int slot, int n, std::vector<float> & x);
    void fed(slot_state & s, int n);

    void begin_round(slot_state & s, int32_t token);
    void lay_out_rows();
    void need_logits(int row);
    int sample_row(slot_state & s, llama_sampler * sampler, int32_t & token);
    void reach_now();
    std::vector<int32_t> kept_path(const slot_state & s, int n) const;
    std::vector<uint32_t> kept_rows(const int32_t * keep) const;
    void keep_rows(int slot, int n_keep);
    void keep_features(slot_state & s, int pos, int n_keep);
    void learn(slot_state & s);
    void tell_planner(int n_tokens);

    struct state_header;
    void check_state(const state_header & h, int64_t size) const;

    struct growth;
    int room(const ask & a, int n_asks) const;
    ask grown(ask a, int n_asks) const;
    void begin_growth(growth & g, const std::vector<ask> & asks);
    void grow_level(growth & g, std::vector<int> level);
    void add_children(
        growth & g, int ask, const int32_t * ids, const float * probs, int row, int parent, uint64_t path);
    std::vector<int> fixed_front(const growth & g) const;
    std::vector<int> planned_front(const growth & g) const;
    void take_nodes(const growth & g, int ask, std::vector<int> order);
    void grow(growth & g);
    bool planner_drafts(const std::vector<ask> & asks);
    void catch_up(const std::vector<ask> & asks);
    std::vector<std::vector<int>> choose(const growth & g);
    void grow_drafts(std::vector<ask> asks);
    void check_asks(const std::vector<ask> & asks) const;

    llama_context * ctx_;
    llama_memory_t memory_;
    head * head_;
    std::unique_ptr<runner> runner_;  // null without a head
    bool capture_ = false;
    int n_batch_, n_ctx_, n_vocab_;
    int most_rows_;  // of a round: a micro-batch, and as many as are computed alike
    std::vector<slot_state> slots_;
    llama_batch batch_;
    std::vector<float> features_,
        trace_;  // features_: of the last batch's rows, taken when they are first asked for
    planner planner_;

    // the round under way, or the last one
    struct {
        std::vector<int> slots;
        std::vector<int32_t> slot_of, row_of;  // of each row of the batch, its slot and its number there
        std::vector<float> reach;              // probability that verification gets to it
        uint64_t done = 0;                     // rows whose logits are there, a bit each
        bool open = false, tree = false;
        float layers_seconds = 0.0f;
        float output_seconds = 0.0f;  // expected, of the pieces computed so far
    } round_;

    // what the planner chose last, until it hears how the round went
    struct {
        bool planned = false;
        int steps    = 0;
        float value = 0.0f, seconds = 0.0f;
        int64_t start = 0;  // ggml_time_us()
    } draft_;
};

}  // namespace eagle3
