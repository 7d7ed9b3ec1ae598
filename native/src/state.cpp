// A slot's head state as bytes: a fixed header, the pending rows, then the head's keys and values.
#include "session.hpp"

#include <cstring>

namespace eagle3 {

namespace {

struct state_header {
    char    magic[8];
    int32_t version, n_embd_kv, n_features, n_past, head_from, head_n, pending_pos, n_pending, n_pending_tokens, n_blocks;
};

const char MAGIC[8] = {'e', 'a', 'g', 'l', 'e', '3', 's', '\0'};

} // namespace

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
    auto put = [&](const void * data, size_t n) {
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

void session::state_set(int slot, const uint8_t * data, int64_t size) {
    slot_state & s = at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    state_header h;
    const char * damaged = "the head's state is damaged or belongs to another head";
    require(size >= (int64_t) sizeof(h), EAGLE3_E_FORMAT, damaged);
    memcpy(&h, data, sizeof(h));
    data += sizeof(h);
    require(memcmp(h.magic, MAGIC, sizeof(MAGIC)) == 0 && h.version == 2 && h.n_blocks == (int32_t) head_->blocks.size() && h.n_embd_kv == head_->n_embd_kv() &&
            h.n_features == head_->n_features(), EAGLE3_E_FORMAT, damaged);
    require(0 <= h.head_from && h.head_from <= h.head_n && h.head_n <= h.n_past && h.n_past <= n_ctx_ &&
            0 <= h.n_pending && 0 <= h.pending_pos && h.pending_pos <= h.n_past && h.n_pending <= h.n_past - h.pending_pos &&
            0 <= h.n_pending_tokens && h.n_pending_tokens <= h.n_pending && h.n_pending_tokens >= h.n_pending - 1,
            EAGLE3_E_FORMAT, damaged);
    const size_t n_tokens = h.n_pending_tokens, n_floats = (size_t) h.n_pending * h.n_features;
    require((uint64_t) size == sizeof(h) + n_tokens * sizeof(int32_t) + n_floats * sizeof(float) +
            runner_->cells_size(h.head_from, h.head_n), EAGLE3_E_FORMAT, damaged);

    slot_state t;
    t.n_past      = h.n_past;
    t.head_from   = h.head_from;
    t.head_n      = h.head_n;
    t.pending_pos = h.pending_pos;
    t.pending_tokens.resize(n_tokens);
    t.pending_features.resize(n_floats);
    auto take = [&](void * out, size_t n) {
        if (n) {
            memcpy(out, data, n);
            data += n;
        }
    };
    take(t.pending_tokens.data(), n_tokens * sizeof(int32_t));
    take(t.pending_features.data(), n_floats * sizeof(float));
    for (int32_t id : t.pending_tokens) {
        require(id >= 0 && id < n_vocab_, EAGLE3_E_FORMAT, damaged);
    }
    runner_->cells_set(slot, t.head_from, t.head_n, data);
    s = std::move(t);
}

} // namespace eagle3
