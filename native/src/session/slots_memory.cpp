// This is how a slot goes back in the target's memory, and what waits then: see target_memory.hpp.
#include "session/slots.hpp"

#include "llama-ext.h"

#include <algorithm>

namespace eagle3 {

// Returns the position from which on the slot's tokens are known.
int slots::known_from(int slot) const {
    return text_ ? text_->from(slot) : at(slot).n_past + 1;
}

// After the target's memory has gone back, the tokens that it lost wait, up to n_past. Those behind the
// slot's text are the round's.
void slots::wait_from(int slot, int n_past) {
    slot_state & s                    = at(slot);
    const std::vector<int32_t> before = std::move(s.waiting);
    const int first_before            = s.n_past - (int) before.size();
    s.waiting.clear();
    for (int pos = target.held(slot); pos < n_past; ++pos) {
        s.waiting.push_back(pos >= s.n_past       ? s.round.tokens[pos - s.n_past]
                            : pos >= first_before ? before[pos - first_before]
                                                  : text_->token(slot, pos));
    }
}

void slots::holds(int slot, int n_past) {
    at(slot).n_past = n_past;
    at(slot).waiting.clear();
    target.decoded(slot, n_past);
}

void slots::settle(int slot) {
    slot_state & s = at(slot);
    while (!s.waiting.empty()) {
        const int n = std::min((int) s.waiting.size(), n_batch), pos = target.held(slot);
        for (int i = 0; i < n; ++i) {
            put_row(i, s.waiting[i], pos + i, slot, head_ && head_->needs_all_logits());
        }
        run_rows(n, &slot, 1);
        s.waiting.erase(s.waiting.begin(), s.waiting.begin() + n);
        target.decoded(slot, pos + n);
    }
}

bool slots::drop_from(int slot, int n_past, bool failed) {
    const int known = known_from(slot);
    if (failed ? target.undo(slot, n_past, known) : target.go_back(slot, n_past, known)) {
        wait_from(slot, n_past);
        return true;
    }
    target.clear(slot);
    reset(slot, 0);
    return false;
}

// No message is made before: there may be no memory for one.
void slots::must_drop_from(int slot, int n_past, bool failed) {
    if (!drop_from(slot, n_past, failed)) {
        throw error(EAGLE3_E_UNSUPPORTED,
            format("the target cannot go back to a part of its sequence: slot %d is empty now", slot));
    }
}

bool slots::drop_rows(const int * of, int n_of, bool failed) {
    llama_memory_tree_set(memory, nullptr, 0);
    bool whole = true;
    for (int i = 0; i < n_of; ++i) {
        whole = drop_from(of[i], at(of[i]).n_past, failed) && whole;
    }
    return whole;
}

}  // namespace eagle3
