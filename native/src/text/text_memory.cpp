#include "text/text_memory.hpp"

#include "error.hpp"

#include <algorithm>
#include <climits>

namespace eagle3 {

namespace {

// A quarter of the bytes at most are for places: chains are then one and a half times as long as in a slot.
int n_places(int64_t n_bytes) {
    int n = 64;
    while (n < INT_MAX / 4 && 4 * (int64_t) n * suffix_index::BYTES_A_PLACE <= n_bytes / 4) {
        n *= 2;
    }
    return n;
}

}  // namespace

text_memory::text_memory(int64_t n_bytes) : places_(n_places(n_bytes)), older_(places_), newer_(places_) {
    require(n_bytes >= LEAST_SIZE, EAGLE3_E_ARGUMENT,
        format("a text memory of %lld bytes, at least %lld are needed", (long long) n_bytes,
            (long long) LEAST_SIZE));
    const int64_t left = n_bytes / 2 - (int64_t) places_ * suffix_index::BYTES_A_PLACE;
    // An index grows by half of its size when it is full.
    most_ = (int) std::min<int64_t>(2 * left / (3 * suffix_index::BYTES_A_TOKEN), INT_MAX / 4);
}

void text_memory::turn() {
    older_ = std::move(newer_);
    newer_ = suffix_index(places_);
}

void text_memory::add(const int32_t * tokens, int n) {
    const int skipped = std::max(n + 1 - most_, 0);
    if (n < 1) {
        return;
    }
    if (newer_.size() + n - skipped + 1 > most_) {
        turn();
    }
    try {
        for (int i = skipped; i < n; ++i) {
            newer_.append(tokens[i]);
        }
        newer_.append(END);
    } catch (...) {  // half a text has no end
        newer_ = suffix_index(places_);
        throw;
    }
}

void text_memory::copy(int32_t * out) const {
    for (const suffix_index * half : halves()) {
        if (half->size() > 0) {
            out = std::copy_n(half->data(), half->size(), out);
        }
    }
}

}  // namespace eagle3
