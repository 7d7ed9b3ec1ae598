// A slot's head state as bytes: a fixed header, the pending rows, then the head's keys and values.
#include "session.hpp"

#include <algorithm>
#include <cstring>

namespace eagle3 {

namespace {

const char MAGIC[8] = {'e', 'a', 'g', 'l', 'e', '3', 's', '\0'};

}  // namespace

struct session::state_header {
    char magic[8];
    int32_t version, n_embd_kv, n_features, n_past, head_from, head_n, pending_pos, n_pending,
        n_pending_tokens, n_blocks;
};

int64_t session::state_size(int slot) const {
    const slot_state & s = at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    return (int64_t) (sizeof(state_header) + s.pending_tokens.size() * sizeof(int32_t) +
                      s.pending_features.size() * sizeof(float) + runner_->cells_size(s.head_from, s.head_n));
}

void session::state_get(int slot, uint8_t * out) const {
    const slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    state_header h = {};
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    h.version          = 2;
    h.n_blocks         = (int32_t) head_->blocks.size();
    h.n_embd_kv        = head_->n_embd_kv();
    h.n_features       = head_->n_features();
    h.n_past           = s.n_past;
    h.head_from        = s.head_from;
    h.head_n           = s.head_n;
    h.pending_pos      = s.pending_pos;
    h.n_pending        = n_pending(s);
    h.n_pending_tokens = (int32_t) s.pending_tokens.size();
    auto put           = [&](const void * data, size_t n) {
        if (n) {
            memcpy(out, data, n);
            out += n;
        }
    };
    put(&h, sizeof(h));
    put(s.pending_tokens.data(), s.pending_tokens.size() * sizeof(int32_t));
    put(s.pending_features.data(), s.pending_features.size() * sizeof(float));
    runner_->cells_get(slot, s.head_from, s.head_n, out);
}

// That the fields belong to this head, and hang together as a slot's always do (slot_state): what waits
// begins where the head's cache ends, and reaches no further than the text. Only then is their size one that
// can be computed.
void session::check_state(const state_header & h, int64_t size) const {
    const auto is = [](bool ok) {
        require(ok, EAGLE3_E_FORMAT, "the head's state is damaged or belongs to another head");
    };
    is(memcmp(h.magic, MAGIC, sizeof(MAGIC)) == 0 && h.version == 2);
    is(h.n_blocks == (int32_t) head_->blocks.size() && h.n_embd_kv == head_->n_embd_kv() &&
        h.n_features == head_->n_features());
    is(0 <= h.head_from && h.head_from <= h.head_n && h.head_n <= h.n_past && h.n_past <= n_ctx_);
    is(0 <= h.pending_pos && h.pending_pos <= h.n_past && 0 <= h.n_pending &&
        h.n_pending <= h.n_past - h.pending_pos);
    is(h.n_pending == 0 || h.pending_pos == h.head_n);
    is(h.n_pending_tokens == h.n_pending || (h.n_pending > 0 && h.n_pending_tokens == h.n_pending - 1));
    is((uint64_t) size == sizeof(h) + h.n_pending_tokens * sizeof(int32_t) +
                              (size_t) h.n_pending * h.n_features * sizeof(float) +
                              runner_->cells_size(h.head_from, h.head_n));
}

void session::state_set(int slot, const uint8_t * data, int64_t size) {
    slot_state & s = at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    state_header h = {};
    memcpy(&h, data, std::min((size_t) std::max<int64_t>(size, 0), sizeof(h)));
    check_state(h, size);
    data += sizeof(h);

    slot_state t;
    t.n_past      = h.n_past;
    t.head_from   = h.head_from;
    t.head_n      = h.head_n;
    t.pending_pos = h.pending_pos;
    t.pending_tokens.resize(h.n_pending_tokens);
    t.pending_features.resize((size_t) h.n_pending * h.n_features);
    auto take = [&](void * out, size_t n) {
        if (n) {
            memcpy(out, data, n);
            data += n;
        }
    };
    take(t.pending_tokens.data(), t.pending_tokens.size() * sizeof(int32_t));
    take(t.pending_features.data(), t.pending_features.size() * sizeof(float));
    for (int32_t id : t.pending_tokens) {
        require(id >= 0 && id < n_vocab_, EAGLE3_E_FORMAT,
            "the head's state is damaged: a token of it is not in the vocabulary");
    }
    if (t.pending_pos + h.n_pending != t.n_past) {
        t.clear_pending(
            t.n_past);  // written while rows were decoded without capture: nothing follows what waited
    }
    runner_->cells_set(slot, t.head_from, t.head_n, data);
    s = std::move(t);
}

}  // namespace eagle3
