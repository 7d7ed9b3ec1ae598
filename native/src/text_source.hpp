// The slot's own text as a source of drafts: what followed the last tokens where they stood before.
#pragma once

#include "source.hpp"
#include "suffix_index.hpp"

#include <vector>

namespace eagle3 {

class text_source : public source {
  public:
    // n_ctx: positions of a slot
    text_source(int n_slots, int n_ctx);

    bool ready(int slot) const override { return slots_[slot].index.size() > 0; }
    void begin(growth & g, const std::vector<int> & asks) override;
    void follow(growth & g, const std::vector<int> & nodes) override;

    // The longest match of the slot's text, followed by token, that something follows: in tokens, at most
    // suffix_index::MAX_MATCH. 0 for none.
    int match(int slot, int32_t token) const;

    void kept(const kept_tokens & k) override;
    void rewind(int slot, int n_past) override;
    void reset(int slot, int n_past) override;

    int64_t state_size(int slot) const override;
    void save(int slot, int n_past, uint8_t * out) const override;
    int64_t check(const uint8_t * data, int64_t size) const override;
    void restore(int slot, int n_past, const uint8_t * data) override;
    static int saved_n_past(const uint8_t * data);  // of bytes that passed check

  private:
    // Tokens of the positions from `from` on. What came before was never told.
    struct text {
        int from = 0;
        suffix_index index;
    };
    struct state_header;
    struct open_node {
        int node;      // of the growth, -1: the ask's own token
        int first, n;  // its matches in pool_
        float reach;
    };

    void grow(growth & g, int ask, int node, const int32_t * last, int n_last);
    void offer_children(growth & g, int ask, const open_node & from);
    std::vector<int32_t> last_tokens(const growth & g, int ask, int node) const;

    int n_ctx_;
    std::vector<text> slots_;
    std::vector<suffix_index::match> pool_;  // of the draft that grows
    std::vector<open_node> open_;            // a heap, the likeliest first
};

}  // namespace eagle3
