// This is the head as a source of drafts: what it has seen of each slot, its passes, its saved state.
#pragma once

#include "head/runner.hpp"
#include "head/head.hpp"
#include "draft/source.hpp"

#include <memory>
#include <vector>

namespace eagle3 {

class head_source : public pass_source {
  public:
    head_source(llama_context * ctx, const head & h, int n_slots, int n_ctx);
    ~head_source() override;

    head_source(const head_source &)             = delete;
    head_source & operator=(const head_source &) = delete;

    void set_on(bool on) override;  // captures features
    void expect(int n) override;    // the rows' features go to free rows of the store, if there is one
    bool needs_all_logits() const override;

    static constexpr const char * NAME = "head";
    const char * name() const override { return NAME; }
    bool ready(int slot) const override { return n_pending(slots_[slot]) > 0; }
    int n_pending(int slot) const override { return n_pending(slots_[slot]); }
    void catch_up(int slot, int at_most) override;
    void begin(draft_tree & g, const std::vector<int> & asks) override;
    void extend(draft_tree & g, const std::vector<int> & nodes) override;
    int n_extensible(int ask) const override;

    // If it fails, the head starts over behind these tokens.
    void kept(const kept_tokens & k) override;
    void rewind(int slot, int n_past) override;
    void reset(int slot, int n_past) override;

    int64_t state_size(int slot) const override;
    void save(int slot, int n_past, uint8_t * out) const override;
    int64_t check(const uint8_t * data, int64_t size) const override;
    void restore(int slot, int n_past, const uint8_t * data) override;
    static int saved_n_past(const uint8_t * data);  // from bytes that passed check

    const runner & passes() const { return runner_; }
    bytes memory() const override;
    void forget_graphs() override { runner_.forget_graphs(); }
    float measure(int slot, int n_past, int n) override;
    float measure_step(int slot, int n_past, int n) override;  // for a draft that looks ahead

    // These are for tests and `compare`: see eagle3_head_forward and eagle3_head_trace. n_past is the slot's.
    void forward(int slot, int n_past, const int32_t * tokens, const float * features, int n, float * g,
        float * state, float * logits);
    const std::vector<float> & trace(
        int slot, int n_past, const int32_t * tokens, const float * features, int n, const char * stage);

  private:
    static constexpr int MAX_CELLS   = 64;   // cells of its cache for one draft of a slot: bits of a path
    static constexpr int MAX_PENDING = 256;  // features that may wait for a draft; more are fed without one

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
        // The pending rows' features: [n_pending][n_features] here, or [n_pending] rows of the store.
        std::vector<float> features;
        std::vector<int32_t> stored;

        void clear_pending(int pos) {
            pending_pos = pos;
            tokens.clear();
            features.clear();
            stored.clear();
        }
    };
    // This is what a pass needs to extend a node of the draft.
    struct mark {
        int state;      // row of the runner's states: its parent's, which it starts from
        uint64_t path;  // cells of the nodes above it
        int known;      // the row of the first pass, or of those ahead, that found its children; or UNKNOWN
    };
    struct guesses {  // children that rows of a pass found, [n][k_]; and of rows ahead: see pass::chosen
        std::vector<int32_t> ids, chosen;
        std::vector<float> probs;
    };
    // This is how far the first pass looks ahead: so many steps, of so many rows for each ask.
    struct horizon {
        int steps = 0, width = 1;
    };
    static constexpr int UNKNOWN = -1;
    struct state_header;

    int n_pending(const seen & s) const {
        return (int) (runner_.store() ? s.stored.size() : s.features.size() / h_.n_features());
    }
    int state_row(int slot, int cell) const { return slot * (MAX_CELLS + 1) + cell; }
    int root_state(int slot) const { return state_row(slot, MAX_CELLS); }
    std::vector<int32_t> free_rows(int n) const;
    void store(seen & s, int n_past);
    void start_from(pass & p, const seen & s, int done, int n) const;
    horizon look(const draft_tree & g, const std::vector<int> & asks) const;
    void look_ahead(const draft_tree & g, const std::vector<int> & asks, pass & p) const;
    int ahead_row(int step, int place, int i) const;
    float timed_draft(int slot, int n_past, int n, int steps);
    void take(const kept_tokens & k);
    void begin_pending(seen & s, int pos);
    void append_features(seen & s, const kept_tokens & k);
    void feed(int slot);
    void fed(seen & s, int n);
    void run(pass & p, int n_out, int k, guesses & found);
    std::vector<int> offer_children(
        draft_tree & g, int ask, const guesses & found, int row, int parent, mark below);
    void offer_known(draft_tree & g, int ask, int row, int parent, mark below);
    bool was_ahead(draft_tree & g, int node);
    pass_row row_of(const draft_tree & g, int node);
    pass whole_pass(int slot, int n_past, const int32_t * tokens, const float * features, int n);

    llama_context * ctx_;
    const head & h_;
    runner runner_;
    int n_ctx_;
    bool on_ = false;
    std::vector<seen> slots_;
    std::vector<int32_t> batch_;  // row of the store of each row of the last decode
    std::vector<float> trace_;

    // These belong to the draft that grows. Cells of the head's cache after a slot's are taken one after the
    // other; the next feed overwrites them.
    std::vector<int> n_cells_, n_cells_max_;  // one for each ask
    std::vector<mark> marks_;                 // one for each node
    std::vector<float> x_;
    guesses first_, later_;
    std::vector<int> n_known_;  // one for each ask, rows ahead whose children were not offered yet
    horizon ahead_;             // for the first pass
    int n_first_ = 0;           // asks of the first pass
    int k_       = 0;           // children of a row that a pass finds
    int n_used_  = 1;           // levels that the last draft extended
};

}  // namespace eagle3
