// What the head knows of a slot is saved as bytes: a fixed header, the pending rows, then the head's keys and
// values.
#include "head/head_source.hpp"

#include <algorithm>
#include <cstring>

namespace eagle3 {

namespace {

const char MAGIC[8] = {'e', 'a', 'g', 'l', 'e', '3', 's', '\0'};

}  // namespace

struct head_source::state_header {
    char magic[8];
    int32_t version, n_embd_kv, n_features, n_past, head_from, head_n, pending_pos, n_pending,
        n_pending_tokens, n_blocks;

    int64_t pending_size() const {
        return n_pending_tokens * (int64_t) sizeof(int32_t) +
               (int64_t) n_pending * n_features * (int64_t) sizeof(float);
    }
};

int64_t head_source::state_size(int slot) const {
    const seen & s = slots_[slot];
    return (int64_t) (sizeof(state_header) + s.tokens.size() * sizeof(int32_t) +
                      (size_t) n_pending(s) * h_.n_features() * sizeof(float) +
                      runner_.cells_size(s.from, s.n));
}

void head_source::save(int slot, int n_past, uint8_t * out) const {
    const seen & s = slots_[slot];
    state_header h = {};
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    h.version          = 2;
    h.n_blocks         = (int32_t) h_.blocks.size();
    h.n_embd_kv        = h_.n_embd_kv();
    h.n_features       = h_.n_features();
    h.n_past           = n_past;
    h.head_from        = s.from;
    h.head_n           = s.n;
    h.pending_pos      = s.pending_pos;
    h.n_pending        = n_pending(s);
    h.n_pending_tokens = (int32_t) s.tokens.size();
    auto put           = [&](const void * data, size_t n) {
        if (n) {
            memcpy(out, data, n);
            out += n;
        }
    };
    put(&h, sizeof(h));
    put(s.tokens.data(), s.tokens.size() * sizeof(int32_t));
    put(s.features.data(), s.features.size() * sizeof(float));
    for (const int32_t row : s.stored) {
        runner_.store_get(row, out);
        out += h_.n_features() * sizeof(float);
    }
    runner_.cells_get(slot, s.from, s.n, out);
}

// The fields must belong to this head, and fit together as a slot's always do (head_source::seen): what waits
// begins where the head's cache ends, and reaches no further than the text. Only then can their size be
// computed.
int64_t head_source::check(const uint8_t * data, int64_t size) const {
    const auto is = [](bool ok) {
        require(ok, EAGLE3_E_FORMAT, "the head's state is damaged or belongs to another head");
    };
    state_header h = {};
    memcpy(&h, data, std::min((size_t) std::max<int64_t>(size, 0), sizeof(h)));
    is(memcmp(h.magic, MAGIC, sizeof(MAGIC)) == 0 && h.version == 2);
    is(h.n_blocks == (int32_t) h_.blocks.size() && h.n_embd_kv == h_.n_embd_kv() &&
        h.n_features == h_.n_features());
    is(0 <= h.head_from && h.head_from <= h.head_n && h.head_n <= h.n_past && h.n_past <= n_ctx_);
    is(0 <= h.pending_pos && h.pending_pos <= h.n_past && 0 <= h.n_pending &&
        h.n_pending <= h.n_past - h.pending_pos);
    is(h.n_pending == 0 || h.pending_pos == h.head_n);
    is(h.n_pending_tokens == h.n_pending || (h.n_pending > 0 && h.n_pending_tokens == h.n_pending - 1));
    const int64_t own =
        (int64_t) sizeof(h) + h.pending_size() + (int64_t) runner_.cells_size(h.head_from, h.head_n);
    is(size >= own);
    for (int i = 0; i < h.n_pending_tokens; ++i) {
        int32_t id;
        memcpy(&id, data + sizeof(h) + i * sizeof(id), sizeof(id));
        require(id >= 0 && id < h_.n_vocab_target, EAGLE3_E_FORMAT,
            "the head's state is damaged: a token of it is not in the vocabulary");
    }
    return own;
}

int head_source::saved_n_past(const uint8_t * data) {
    state_header h;
    memcpy(&h, data, sizeof(h));
    return h.n_past;
}

// Brings restored features to the store. There is room for what waits in a slot; a state of more starts over.
void head_source::store(seen & s, int n_past) {
    const int n = (int) (s.features.size() / h_.n_features());
    if (n > MAX_PENDING) {
        s.clear_pending(n_past);
        return;
    }
    s.stored = free_rows(n);
    for (int i = 0; i < n; ++i) {
        runner_.store_set(s.stored[i], s.features.data() + (size_t) i * h_.n_features());
    }
    s.features.clear();
}

void head_source::restore(int slot, int n_past, const uint8_t * data) {
    state_header h;
    memcpy(&h, data, sizeof(h));
    data += sizeof(h);
    seen s;
    s.from        = h.head_from;
    s.n           = h.head_n;
    s.pending_pos = h.pending_pos;
    s.tokens.resize(h.n_pending_tokens);
    s.features.resize((size_t) h.n_pending * h.n_features);
    auto take = [&](void * out, size_t n) {
        if (n) {
            memcpy(out, data, n);
            data += n;
        }
    };
    take(s.tokens.data(), s.tokens.size() * sizeof(int32_t));
    take(s.features.data(), s.features.size() * sizeof(float));
    if (s.pending_pos + h.n_pending != n_past) {
        s.clear_pending(n_past);  // rows were decoded without capture: nothing follows what waited
    }
    slots_[slot].stored.clear();
    if (runner_.store() && !s.features.empty()) {
        store(s, n_past);
    }
    runner_.cells_set(slot, s.from, s.n, data);
    slots_[slot] = std::move(s);
}

}  // namespace eagle3
