// This is the head as a source of drafts: what it has seen of each slot, its passes, its saved state.
#pragma once

#include "runner.hpp"
#include "head.hpp"
#include "source.hpp"

#include <memory>
#include <vector>

namespace eagle3 {

class head_source : public source {
  public:
    head_source(llama_context * ctx, const head & h, int n_slots, int n_ctx);
    ~head_source() override;

    head_source(const head_source &)             = delete;
    head_source & operator=(const head_source &) = delete;

    // While it is off, a slot that decodes drafts nothing until new text has been captured.
    void set_capture(bool on);
    // Says whether each row of a batch must ask for logits, so that its features are captured.
    bool needs_all_logits() const;

    static constexpr const char * NAME = "head";
    const char * name() const override { return NAME; }
    bool takes_passes() const override { return true; }
    bool ready(int slot) const override { return n_pending(slots_[slot]) > 0; }
    int n_pending(int slot) const { return n_pending(slots_[slot]); }  // rows of the slot's next pass
    void catch_up(int slot, int at_most) override;
    void begin(growth & g, const std::vector<int> & asks) override;
    void extend(growth & g, const std::vector<int> & nodes) override;
    int n_extensible(int ask) const override { return n_cells_max_[ask] - n_cells_[ask]; }

    // If it fails, the head starts over behind these tokens.
    void kept(const kept_tokens & k) override;
    void rewind(int slot, int n_past) override;
    void reset(int slot, int n_past) override;

    int64_t state_size(int slot) const override;
    void save(int slot, int n_past, uint8_t * out) const override;
    int64_t check(const uint8_t * data, int64_t size) const override;
    void restore(int slot, int n_past, const uint8_t * data) override;
    static int saved_n_past(const uint8_t * data);  // of bytes that passed check

    const runner & passes() const { return runner_; }
    size_t weight_bytes() const { return h_.n_bytes(); }
    void forget_graphs() { runner_.forget_graphs(); }
    float measure(int slot, int n_past, int n);

    // These are for tests and `compare`: see eagle3_head_forward and eagle3_head_trace. n_past is the slot's.
    void forward(int slot, int n_past, const int32_t * tokens, const float * features, int n, float * g,
        float * state, float * logits);
    const std::vector<float> & trace(
        int slot, int n_past, const int32_t * tokens, const float * features, int n, const char * stage);

  private:
    // This is what the head has seen of a slot's text, and what waits for its next pass.
    //
    //     0 ... from ........... n .......... pending ...... n_past
    //           [ pairs in the head's cache )[ features waiting     )
    //
    // The pair of position p needs the token of p + 1; so the last pending row always waits for the next
    // token. If there is a gap before the pending rows (features never seen), the head starts over there: it
    // sees less of the past, which costs acceptance and nothing else.
    struct seen {
        int from = 0, n = 0;
        int pending_pos = 0;
        std::vector<int32_t> tokens;  // the token after each pending row; the last row's may be missing
        std::vector<float> features;  // [n_pending][n_features]

        void clear_pending(int pos) {
            pending_pos = pos;
            tokens.clear();
            features.clear();
        }
    };
    // This is what a pass needs to extend a node of the draft.
    struct mark {
        int row;        // of the last pass: its parent's, whose state it takes
        uint64_t path;  // cells of the nodes above it
    };
    struct state_header;

    int n_pending(const seen & s) const { return (int) (s.features.size() / h_.n_features()); }
    void take(const kept_tokens & k);
    void begin_pending(seen & s, int pos);
    void append_features(seen & s, const kept_tokens & k);
    void feed(int slot);
    void fed(seen & s, int n);
    void run(pass & p, int n_out, int k);
    void offer_children(growth & g, int ask, int row, int parent, uint64_t path);
    pass whole_pass(int slot, int n_past, const int32_t * tokens, const float * features, int n);

    llama_context * ctx_;
    const head & h_;
    runner runner_;
    int n_ctx_;
    bool capture_ = false;
    std::vector<seen> slots_;
    std::vector<float> trace_;

    // These belong to the draft that grows. Cells of the head's cache after a slot's are taken one after the
    // other; the next feed overwrites them.
    std::vector<int> n_cells_, n_cells_max_;  // of each ask
    std::vector<mark> marks_;                 // of each node
    std::vector<float> states_, x_, probs_;
    std::vector<int32_t> ids_;
    int k_ = 0;  // children of a row that a pass finds
};

}  // namespace eagle3
