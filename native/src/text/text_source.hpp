// This is the text as a source of drafts: what followed the slot's last tokens where they stood before, in
// its own text and in the memory of earlier texts that the slot may read.
#pragma once

#include "draft/source.hpp"
#include "text/suffix_index.hpp"
#include "text/text_memory.hpp"

#include <memory>
#include <vector>

namespace eagle3 {

class text_source : public source {
  public:
    // n_ctx counts the positions of a slot. model is its mark, without which a state is another model's.
    text_source(int n_slots, int n_ctx, int n_vocab, uint64_t model);

    static constexpr const char * NAME = "text";
    const char * name() const override { return NAME; }
    bool ready(int slot) const override { return slots_[slot].index.size() > 0; }
    void begin(draft_tree & g, const std::vector<int> & asks) override;
    void follow(draft_tree & g, const std::vector<int> & nodes) override;

    // Returns the longest match of the slot's text, followed by token, that something follows: in tokens, at
    // most suffix_index::MAX_MATCH, and 0 for none.
    int match(int slot, int32_t token) const;

    // Sets the texts that a slot may draft from beside its own; null for none. A slot keeps them through
    // resets.
    void set_memory(int slot, std::shared_ptr<const text_memory> memory) {
        slots_[slot].memory = std::move(memory);
    }

    // The slot's tokens are known from this position on.
    int from(int slot) const { return slots_[slot].from; }
    int end(int slot) const { return slots_[slot].from + slots_[slot].index.size(); }  // and up to this one
    int32_t token(int slot, int pos) const { return slots_[slot].index[pos - slots_[slot].from]; }

    void kept(const kept_tokens & k) override;
    void rewind(int slot, int n_past) override;
    void reset(int slot, int n_past) override;

    int64_t state_size(int slot) const override;
    void save(int slot, int n_past, uint8_t * out) const override;
    int64_t check(const uint8_t * data, int64_t size) const override;
    void restore(int slot, int n_past, const uint8_t * data) override;
    static int saved_n_past(const uint8_t * data);  // from bytes that passed check

  private:
    // These are the tokens of the positions from `from` on. What came before was never told.
    struct text {
        int from = 0;
        suffix_index index;
        std::shared_ptr<const text_memory> memory;
    };
    // The last `length` tokens stand in `in`, before the position `next`.
    struct found {
        const suffix_index * in;
        int32_t next, length;

        int32_t token() const { return (*in)[next]; }
    };
    struct state_header;
    struct open_node {
        int node;      // in the draft_tree, -1: the ask's own token
        int first, n;  // what was found for it, in pool_
        float reach;
    };

    void find(int slot, const std::vector<int32_t> & last, bool remembered, std::vector<found> & out) const;
    void grow(draft_tree & g, int ask, int node);
    void offer_children(draft_tree & g, int ask, const open_node & from);
    std::vector<int32_t> last_tokens(const draft_tree & g, int ask, int node) const;

    int n_ctx_, n_vocab_;
    uint64_t model_;
    std::vector<text> slots_;
    std::vector<found> pool_;      // for the draft that grows
    std::vector<open_node> open_;  // a heap, the likeliest first
};

}  // namespace eagle3
