#include "sampling/largest.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

bool precedes(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

bool is_nan(const llama_token_data & candidate) {
    return std::isnan(candidate.logit);
}

std::vector<llama_token_data> first_of(const float * x, int n_vocab, size_t n) {
    constexpr int BLOCK = 64;
    std::vector<llama_token_data> heap;  // the last of them is at the front
    float least       = -INFINITY;
    const auto may_be = [&](int i) {
        if (heap.size() == n && x[i] > least) {
            std::pop_heap(heap.begin(), heap.end(), precedes);
            heap.pop_back();
        }
        if (heap.size() < n) {
            heap.push_back({i, x[i], 0.0f});
            std::push_heap(heap.begin(), heap.end(), precedes);
            least = heap.size() == n ? heap.front().logit : least;
        }
        return !std::isnan(x[i]);
    };
    for (int i = 0; i < n_vocab; i += BLOCK) {
        const int end = std::min(i + BLOCK, n_vocab);
        int wanted    = heap.size() < n;
        for (int k = i; k < end; ++k) {
            wanted |= !(x[k] <= least);
        }
        for (int k = i; wanted && k < end; ++k) {
            if (!may_be(k)) {
                return {};
            }
        }
    }
    return heap;
}

}  // namespace eagle3
