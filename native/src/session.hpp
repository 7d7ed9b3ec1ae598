// The state of the slots, and the four steps of a round over them.
#pragma once

#include "graph.hpp"
#include "head.hpp"

#include <vector>

namespace eagle3 {

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

    bool                 in_round = false;
    std::vector<int32_t> round_tokens;  // token, then drafts

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
    void decode(int slot, int32_t token, const int32_t * draft, int n);
    int  verify(int slot, llama_sampler * sampler, int32_t * out);
    void commit(int slot, int n_keep);

    int64_t state_size(int slot) const;
    void    state_get(int slot, uint8_t * out) const;
    void    state_set(int slot, const uint8_t * data, int64_t size);

    void head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g, float * prenorm, float * logits);

  private:
    slot_state &       at(int slot);
    const slot_state & at(int slot) const;
    int  n_pending(const slot_state & s) const;
    void run_batch(int slot, const int32_t * tokens, int n, bool all_logits);
    void take_features(slot_state & s, int pos, int n);
    void begin_pending(slot_state & s, int pos);
    void feed(int slot, int n, int n_out);
    int32_t best(float & prob) const;

    llama_context * ctx_;
    llama_memory_t  memory_;
    head *          head_;
    std::unique_ptr<runner> runner_;  // null without a head
    bool            capture_ = false;
    int             n_batch_, n_ctx_, n_vocab_;
    std::vector<slot_state> slots_;
    llama_batch             batch_;
    std::vector<float>      logits_, prenorm_;
};

} // namespace eagle3
