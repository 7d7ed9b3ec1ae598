#include "text/suffix_index.hpp"

#include <algorithm>

namespace eagle3 {

// Returns where the chain of the last ORDERS[order] tokens before `end` begins.
size_t suffix_index::place(int order, const int32_t * end) const {
    uint64_t h = 0;
    for (int i = 1; i <= ORDERS[order]; ++i) {
        h = (h ^ (uint64_t) (uint32_t) end[-i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return (size_t) h & (heads_[order].size() - 1);
}

void suffix_index::begin() {
    size_t n = 64;
    while (n < (size_t) capacity_) {
        n *= 2;
    }
    std::array<std::vector<int32_t>, N_ORDERS> heads;
    heads.fill(std::vector<int32_t>(n, -1));
    heads_ = std::move(heads);
}

// Makes room for one more token. After it, nothing of an append can fail.
void suffix_index::reserve() {
    if (heads_[0].empty()) {
        begin();
    }
    if (tokens_.size() == tokens_.capacity()) {
        const size_t n = std::max<size_t>(64, tokens_.size() + tokens_.size() / 2);
        for (auto & before : before_) {
            before.reserve(n);
        }
        tokens_.reserve(n);
    }
}

void suffix_index::append(int32_t token) {
    reserve();
    const int at = size();
    tokens_.push_back(token);
    for (int o = 0; o < N_ORDERS; ++o) {
        int32_t before = -1;
        if (at + 1 >= ORDERS[o]) {
            int32_t & head = heads_[o][place(o, tokens_.data() + at + 1)];
            before         = head;
            head           = at;
        }
        before_[o].push_back(before);
    }
}

void suffix_index::truncate(int n) {
    for (int at = size() - 1; at >= std::max(n, 0); --at) {
        for (int o = 0; o < N_ORDERS; ++o) {
            if (at + 1 >= ORDERS[o]) {
                heads_[o][place(o, tokens_.data() + at + 1)] = before_[o][at];
            }
            before_[o].pop_back();
        }
        tokens_.pop_back();
    }
}

int suffix_index::find(const int32_t * last, int n, match * out) const {
    int found = 0;
    for (int o = 0; o < N_ORDERS && size() > 0; ++o) {
        if (n < ORDERS[o]) {
            continue;
        }
        int32_t at = heads_[o][place(o, last + n)];
        for (int visits = 0; at >= 0 && visits < N_VISITS; ++visits, at = before_[o][at]) {
            const int most = std::min({n, at + 1, MAX_MATCH});
            int length     = 0;
            while (length < most && tokens_[at - length] == last[n - 1 - length]) {
                ++length;
            }
            const auto known = [&](const match & m) {
                return m.next == at + 1;
            };
            if (length < ORDERS[o] || at + 1 >= size() || std::any_of(out, out + found, known)) {
                continue;
            }
            out[found++] = {at + 1, length};
            if (found == N_FOUND) {
                return found;
            }
        }
    }
    return found;
}

size_t suffix_index::n_bytes() const {
    size_t n = tokens_.capacity() * sizeof(int32_t);
    for (int o = 0; o < N_ORDERS; ++o) {
        n += (before_[o].capacity() + heads_[o].capacity()) * sizeof(int32_t);
    }
    return n;
}

}  // namespace eagle3
