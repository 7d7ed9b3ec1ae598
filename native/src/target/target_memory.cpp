#include "target/target_memory.hpp"

#include "planner/tuning.hpp"

#include <algorithm>

namespace eagle3 {

namespace {

constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

bool has_state(const llama_model * model) {
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
}

}  // namespace

target_memory::target_memory(llama_context * ctx, int n_slots)
    : handle(llama_get_memory(ctx)), ctx_(ctx), drops_any_(!has_state(llama_get_model(ctx))),
      n_window_(llama_model_n_swa(llama_get_model(ctx))), n_snapshots_((int) llama_n_rs_seq(ctx)),
      of_(n_slots) {}

// -- going back -------------------------------------------------------------------------------------------

// A row of a window layer reads the window's positions before it and its own. Where these were overwritten,
// llama.cpp drops the rows and says nothing.
bool target_memory::window_is_there(int slot, int n_past) const {
    if (n_window_ <= 0 || n_past == 0) {
        return true;
    }
    const int first = llama_memory_seq_pos_min(handle, slot);
    return first >= 0 && first <= std::max(0, n_past + 1 - n_window_);
}

// An image has fewer positions than rows, and whoever decoded it says how many: then the tokens before are
// not known, and a KV cache is not asked.
int target_memory::holds_of(int slot, int n_past, int known) const {
    const int has = (int) llama_memory_seq_pos_max(handle, slot) + 1;
    return drops_any_ && known > 0 ? n_past : std::min(n_past, std::max(has, known));
}

// Removes what is at a position and behind it. Whoever goes back has other ways if this fails, also by an
// exception.
bool target_memory::remove(int slot, int from) {
    try {
        return llama_memory_seq_rm(handle, slot, from, -1);
    } catch (const std::exception &) {
        return false;
    }
}

bool target_memory::drop(int slot, int n_past, int known) {
    const int has = (int) llama_memory_seq_pos_max(handle, slot) + 1;
    if (has > n_past && drops_any_ && !window_is_there(slot, n_past)) {
        return false;
    }
    if ((has > n_past || drops_any_) && !remove(slot, n_past)) {
        return false;
    }
    of_[slot].held = holds_of(slot, n_past, known);
    return true;
}

const target_memory::checkpoint * target_memory::nearest(const text & t, int n_past, int known) const {
    const checkpoint * best = nullptr;
    const auto look         = [&](const checkpoint & c) {
        if (c.n_past >= known && c.n_past <= n_past && (!best || c.n_past > best->n_past)) {
            best = &c;
        }
    };
    look(t.of_round);
    std::for_each(t.kept.begin(), t.kept.end(), look);
    return best;
}

bool target_memory::restore(int slot, const checkpoint & c) {
    const buffer & b = c.state;
    if (b.size == 0) {
        remove(slot, -1);
    } else if (llama_state_seq_set_data_ext(ctx_, b.data.get(), b.size, slot, PARTIAL) != b.size ||
               !remove(slot, c.n_past)) {
        return false;
    }
    of_[slot].held = c.n_past;
    return true;
}

// Drops the checkpoints of positions that are gone: another text follows.
void target_memory::forget_behind(text & t, int n_past) {
    if (t.of_round.n_past > n_past) {
        t.of_round.n_past = -1;
    }
    t.kept.erase(
        std::remove_if(t.kept.begin(), t.kept.end(), [&](const checkpoint & c) { return c.n_past > n_past; }),
        t.kept.end());
}

bool target_memory::go_back(int slot, int n_past, int known) {
    if (drop(slot, n_past, known)) {
        forget_behind(of_[slot], n_past);
        return true;
    }
    return restore_before(slot, n_past, known);
}

bool target_memory::undo(int slot, int n_past, int known) {
    return drops_any_ ? go_back(slot, n_past, known) : restore_before(slot, n_past, known);
}

bool target_memory::restore_before(int slot, int n_past, int known) {
    text & t             = of_[slot];
    const checkpoint * c = nearest(t, n_past, known);
    if (c && restore(slot, *c)) {
        forget_behind(t, n_past);
        return true;
    }
    if (known > 0) {
        return false;
    }
    clear(slot);
    return true;
}

void target_memory::clear(int slot) {
    remove(slot, -1);
    is_another_text(slot, 0);
}

void target_memory::is_another_text(int slot, int held) {
    text & t          = of_[slot];
    t.held            = held;
    t.of_round.n_past = -1;
    t.kept.clear();
}

// -- checkpoints ------------------------------------------------------------------------------------------

void target_memory::buffer::resize(size_t n) {
    if (n > capacity) {
        data.reset();  // before the new one is there
        capacity = 0;
        data.reset(new uint8_t[n]);
        capacity = n;
    }
    size = n;
}

// Of an empty sequence there is nothing to copy. A caller may say that a slot holds fewer positions than it
// does: then the next decode fails, and nothing may be taken for a checkpoint of these.
bool target_memory::take(int slot, checkpoint & c) {
    const int has = (int) llama_memory_seq_pos_max(handle, slot) + 1;
    buffer & b    = c.state;
    c.n_past      = -1;
    b.resize(has > 0 && has <= of_[slot].held ? llama_state_seq_get_size_ext(ctx_, slot, PARTIAL) : 0);
    if (has > 0) {
        const size_t n = llama_state_seq_get_data_ext(ctx_, b.data.get(), b.size, slot, PARTIAL);
        if (n == 0 || n != b.size) {
            return false;
        }
    }
    c.n_past = of_[slot].held;
    return true;
}

bool target_memory::begin_round(int slot) {
    text & t = of_[slot];
    return !drops_any_ && nearest(t, t.held, t.held) == nullptr && take(slot, t.of_round);
}

void target_memory::keep_checkpoint(int slot) {
    text & t = of_[slot];
    if (drops_any_ || !is_due(t)) {
        return;
    }
    checkpoint c = thin_out(t);
    if (take(slot, c)) {
        t.kept.push_back(std::move(c));
    }
}

bool target_memory::goes_back(int slot) {
    checkpoint & c = of_[slot].of_round;
    return take(slot, c) && restore(slot, c);
}

// Says whether a checkpoint of what is held would stay: thin_out keeps their distances alike.
bool target_memory::is_due(const text & t) const {
    using limits       = checkpoint_limits;
    const int distance = std::max(limits::least_distance, t.held / (int) limits::most);
    return t.held > 0 && (t.kept.empty() || t.held - t.kept.back().n_past >= distance);
}

// Drops the checkpoint whose neighbours lie nearest to each other, until one more has room. Returns the last
// of them, so that its memory serves again.
target_memory::checkpoint target_memory::thin_out(text & t) {
    using limits       = checkpoint_limits;
    const size_t bytes = t.kept.empty() ? 1 : std::max<size_t>(t.kept.back().state.size * of_.size(), 1);
    const size_t most  = std::clamp<size_t>(limits::most_bytes / bytes, 1, limits::most);
    checkpoint dropped;
    while (t.kept.size() >= most) {
        size_t drop = 0;
        int least   = INT32_MAX;
        for (size_t i = 0; i < t.kept.size(); ++i) {
            const int next = i + 1 < t.kept.size() ? t.kept[i + 1].n_past : t.held;
            const int gap  = next - (i > 0 ? t.kept[i - 1].n_past : 0);
            if (gap < least) {
                least = gap;
                drop  = i;
            }
        }
        dropped = std::move(t.kept[drop]);
        t.kept.erase(t.kept.begin() + (ptrdiff_t) drop);
    }
    return dropped;
}

size_t target_memory::checkpoint_bytes() const {
    size_t n = 0;
    for (const text & t : of_) {
        n += t.of_round.state.capacity;
        for (const checkpoint & c : t.kept) {
            n += c.state.capacity;
        }
    }
    return n;
}

}  // namespace eagle3
