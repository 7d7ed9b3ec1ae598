// What a pass and the steps behind it have found, out of the bytes that came back from the device.
#include "head/runner_parts.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace eagle3 {

namespace {

// Sorts by probability, then by id. place[i] becomes where the i-th is now. It is an insertion sort, as k is
// small.
void sort_best(int32_t * ids, float * probs, int k, std::vector<int> & place) {
    std::vector<int> from(k);
    for (int i = 0; i < k; ++i) {
        from[i] = i;
        for (int j = i;
            j > 0 && (probs[j] > probs[j - 1] || (probs[j] == probs[j - 1] && ids[j] < ids[j - 1])); --j) {
            std::swap(probs[j], probs[j - 1]);
            std::swap(ids[j], ids[j - 1]);
            std::swap(from[j], from[j - 1]);
        }
    }
    for (int i = 0; i < k; ++i) {
        place[from[i]] = i;
    }
}

}  // namespace

const uint8_t * runner::result(const built & b, const ggml_tensor * t) const {
    return results_.data() + ((const char *) t->data - (const char *) b.out->data);
}

void runner::read_ids(const built & b, const pass & p) const {
    const int k = p.k, width = b.shape.width, n_out = b.shape.out.n;
    std::vector<int> places;  // one for each id of the step before, among those of its row
    int32_t *ids = p.ids, *chosen = p.chosen;
    float * probs = p.probs;
    for (int step = 0; step <= b.shape.ahead; ++step) {
        const runner::step & from = b.steps[step];
        const int n               = rows_of(b, step);
        for (int i = 0; step > 0 && i < n; ++i) {
            // In the first step of a tree, and in each of a chain, rows continue one row of their output.
            int32_t id = i % width;
            if (from.chosen) {
                memcpy(&id, result(b, from.chosen) + i * sizeof(id), sizeof(id));
            }
            const int rows_before = rows_of(b, step - 1) / n_out, row = (i / width) * rows_before + id / k;
            *chosen++ = width == 1 ? 0 : id / k * k + places[row * k + id % k];
        }
        memcpy(ids, result(b, from.ids), (size_t) n * k * sizeof(int32_t));
        memcpy(probs, result(b, from.probs), (size_t) n * k * sizeof(float));
        places.resize((size_t) n * k);
        for (int row = 0; row < n; ++row) {
            std::vector<int> place(k);
            sort_best(ids, probs, k, place);
            std::copy(place.begin(), place.end(), places.begin() + row * k);
            ids += k;
            probs += k;
        }
    }
}

}  // namespace eagle3
