// The state of the slots, and the four steps of a round over them.
#pragma once

#include "graph.hpp"
#include "head.hpp"
#include "planner.hpp"

#include <vector>

namespace eagle3 {

constexpr int MAX_DRAFT = MAX_ROWS - 1;  // with the token itself: the rows that are computed alike (batch invariance)

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

    int                  pending_pos = 0;
    std::vector<int32_t> pending_tokens;    // the token after each row; the last row's may be missing
    std::vector<float>   pending_features;  // [n_pending][n_features]

    bool                 in_round = false, round_tree = false;
    std::vector<int32_t> round_tokens;   // token, then drafts
    std::vector<int32_t> round_parents;  // row that each row follows, -1 for the first
    std::vector<int32_t> round_path;     // rows that verification went through; before it, the first only
    uint64_t             round_done = 0; // rows whose logits are there, a bit each

    // of the last draft_tree or draft_planned, for each node
    std::vector<float> draft_probs;  // the head's, its parent given
    std::vector<float> draft_reach;  // of the whole way to it
    bool    planned       = false;   // by the planner, which hears how the round went
    int     draft_steps   = 0;
    float   draft_value   = 0.0f;
    float   draft_seconds = 0.0f, layers_seconds = 0.0f;
    int64_t round_start   = 0;       // ggml_time_us()

    void clear_pending(int pos) {
        pending_pos = pos;
        pending_tokens.clear();
        pending_features.clear();
    }
};

class session {
  public:
    session(llama_context * ctx, head * h, int n_slots);  // h may be null: plain decoding
    ~session();

    void set_capture(bool on);
    int  n_past(int slot) const { return at(slot).n_past; }
    void rewind(int slot, int n_past);
    void reset(int slot, int n_past);
    void prefill(int slot, const int32_t * tokens, int n, bool all_logits);
    int  draft(int slot, int32_t token, int n_max, int n_min, float p_min, int32_t * tokens, float * probs);
    int  draft_tree(int slot, int32_t token, int n_max, int depth, int width, float p_min, int32_t * tokens, int32_t * parents, float * probs);
    int  draft_choices(int slot, int32_t token, int n, const int32_t * parents, const int32_t * ranks, int32_t * tokens, float * probs);
    int  draft_planned(int slot, int32_t token, int n_max, int width, int32_t * tokens, int32_t * parents, float * probs);
    void decode(int slot, int32_t token, const int32_t * draft, const int32_t * parents, int n);
    int  verify(int slot, llama_sampler * sampler, int32_t * out);
    int  verified_row(int slot, int i) const;
    bool can_tree();
    void commit(int slot, int n_keep);

    planner & plan() { return planner_; }

    float measure_target(int slot, int n);
    float measure_output(int n);
    float measure_head(int slot, int n);

    int64_t state_size(int slot) const;
    void    state_get(int slot, uint8_t * out) const;
    void    state_set(int slot, const uint8_t * data, int64_t size);

    void head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g, float * state, float * logits);
    const std::vector<float> & head_trace(int slot, const int32_t * tokens, const float * features, int n, const char * stage);

  private:
    slot_state &       at(int slot);
    const slot_state & at(int slot) const;
    int  n_pending(const slot_state & s) const;
    pass head_pass(int slot, const int32_t * tokens, const float * features, int n);
    void run_batch(int slot, const int32_t * tokens, const int32_t * depth, int n, bool all_logits);
    void take_features(slot_state & s, int pos, int n);
    void take_features(slot_state & s, int pos, const int32_t * rows, int n, int n_rows);
    void feed_token(int slot, int32_t token, int k);
    void begin_pending(slot_state & s, int pos);
    void feed(int slot, int n, int k);
    int  begin_draft(int slot, int32_t token, int n_max, int k);
    void    need_logits(slot_state & s, int row);
    void    tell_planner(slot_state & s, int n_tokens);

    struct growth;
    void grow_root(growth & g, int slot, bool calibrated);
    void grow_level(growth & g, int slot, std::vector<int> level, int width, bool calibrated);
    void add_children(growth & g, const int32_t * ids, const float * probs, int row, int parent, uint64_t path, int width, bool calibrated);
    int  take_nodes(growth & g, int slot, int n, int32_t * tokens, int32_t * parents, float * probs);

    llama_context * ctx_;
    llama_memory_t  memory_;
    head *          head_;
    std::unique_ptr<runner> runner_;  // null without a head
    bool            capture_ = false;
    int             n_batch_, n_ctx_, n_vocab_;
    std::vector<slot_state> slots_;
    llama_batch             batch_;
    std::vector<float>      state_, features_, trace_;  // state_: of the head's last row
    std::vector<int32_t>    ids_;                 // the head's guesses after that row, most probable first,
    std::vector<float>      probs_;               // and their probabilities
    planner                 planner_;
};

} // namespace eagle3
