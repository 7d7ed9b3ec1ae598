// This is what a round does for a target whose memory cannot drop rows: see target_memory.hpp.
#include "session/round.hpp"

#include <algorithm>

namespace eagle3 {

// Sees to it that each slot can go back to where it is now, by a checkpoint if need be. What waits is part of
// the batch, but not of a tree, nor of a batch that it would fill, nor before a draft if it has become much.
void round::prepare_memory() {
    size_t n  = 0;
    n_copies_ = 0;
    for (const int slot : of_) {
        n += slots_.at(slot).waiting.size() + slots_.at(slot).round.tokens.size();
    }
    for (const int slot : of_) {
        const slot_round & r = slots_.at(slot).round;
        const bool many      = r.tokens.size() > 1 && slots_.many_wait(slot);
        if (r.tree || many || n > (size_t) slots_.most_rows) {
            slots_.settle(slot);
        }
        slots_.target.keep_checkpoint(slot);
        const int n_drafted = (int) r.tokens.size() - 1;
        if (!slots_.target.will_drop(n_drafted)) {
            n_copies_ += slots_.target.begin_round(slot);
        }
    }
}

// A decode is deferred only if each row of it asks for logits, which those that wait never need.
void round::lay_out_waiting(bool with_logits) {
    int at = 0;
    for (const int slot : of_) {
        const slot_state & s = slots_.at(slot);
        const bool logits    = with_logits || (slots_.passes() && slots_.passes()->needs_all_logits());
        for (size_t i = 0; i < s.waiting.size(); ++i) {
            slots_.put_row(at++, s.waiting[i], slots_.target.held(slot) + (int) i, slot, logits);
        }
    }
}

}  // namespace eagle3
