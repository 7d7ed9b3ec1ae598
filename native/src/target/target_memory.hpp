// This is what the target's memory holds of each slot, and how it goes back: a KV cache drops any rows, a
// state of a recurrent layer has none to drop.
#pragma once

#include "eagle3.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace eagle3 {

// A memory goes back in three ways, the first that it has:
//
//   1. it drops the rows: a KV cache any; a pruned window as far as it still holds the window before them; a
//      recurrent state those of which the context keeps snapshots (n_rs_seq);
//   2. a checkpoint from before the rows is restored. The tokens between it and the text's end then wait:
//      they are decoded in front of the slot's next batch;
//   3. it is emptied, and all of the text waits.
//
// A checkpoint has what cannot be dropped, llama.cpp's "partial" state: of recurrent layers, and windows.
class target_memory {
  public:
    target_memory(llama_context * ctx, int n_slots);

    const llama_memory_t handle;

    bool drops_any() const { return drops_any_; }  // so that it needs no checkpoints
    // Says whether slots share a pass only as far as they have as many rows: states go through these
    // together.
    bool needs_even_rows() const { return !drops_any_; }
    // Says whether a slot can go back by so many rows of a batch that it has not decoded yet.
    bool will_drop(int n_rows) const { return n_rows <= n_free(); }
    // Returns how many draft tokens a lone slot takes back without a checkpoint.
    int n_free() const { return drops_any_ ? EAGLE3_MAX_ROWS : n_snapshots_; }

    // Returns how many of the slot's positions it holds; those of its text from there on wait.
    int held(int slot) const { return of_[slot].held; }
    // Returns how many of the first n_past positions llama.cpp has, whose tokens are known from `known` on.
    int holds_of(int slot, int n_past, int known) const;
    void decoded(int slot, int n_past) { of_[slot].held = n_past; }

    // Goes back to the first n_past positions. The text is known from position `known` on: others cannot wait
    // to be decoded. Returns false, and has changed nothing, if there is no way.
    bool go_back(int slot, int n_past, int known);
    // Does the same after a decode that failed: of a recurrent layer's state nothing is right then.
    bool undo(int slot, int n_past, int known);
    void clear(int slot);                      // empties the slot
    void is_another_text(int slot, int held);  // somebody else has decoded it

    // Takes a checkpoint of what it holds of the slot, unless it drops any rows. A round's is for its own
    // rows, and the next one overwrites it; others are kept, as many as have room.
    bool begin_round(int slot);      // whether it took one
    void keep_checkpoint(int slot);  // none if one lies near
    bool goes_back(int slot);        // takes a round's checkpoint and restores it, to see how long that takes
    size_t checkpoint_bytes() const;

  private:
    // Memory that is used again for as long as it is large enough, and never set to zero: a state has
    // megabytes.
    struct buffer {
        std::unique_ptr<uint8_t[]> data;
        size_t size = 0, capacity = 0;
        void resize(size_t n);
    };
    struct checkpoint {
        int n_past = -1;  // -1: none
        buffer state;
    };
    struct text {
        int held = 0;
        checkpoint of_round;
        std::vector<checkpoint> kept;  // by n_past
    };

    bool remove(int slot, int from);
    bool drop(int slot, int n_past, int known);
    bool restore_before(int slot, int n_past, int known);
    bool window_is_there(int slot, int n_past) const;
    const checkpoint * nearest(const text & t, int n_past, int known) const;
    bool take(int slot, checkpoint & c);
    bool restore(int slot, const checkpoint & c);
    void forget_behind(text & t, int n_past);
    bool is_due(const text & t) const;
    checkpoint thin_out(text & t);

    llama_context * ctx_;
    const bool drops_any_;
    const int n_window_, n_snapshots_;
    std::vector<text> of_;
};

}  // namespace eagle3
