#include "together.h"

#include "multiply.hpp"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <algorithm>

namespace eagle3::kernels {

namespace {

constexpr int LOOK_AHEAD = 24;  // nodes; at most 32, a bit for each

bool is_computed(const ggml_tensor * t) {
    return !ggml_op_is_empty(t->op) && (t->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const auto *a_data = (const char *) a->data, *b_data = (const char *) b->data;
    return a_data < b_data + ggml_nbytes(b) && b_data < a_data + ggml_nbytes(a);
}

// Whether `late` may be computed before `early`, which comes before it in the graph and is not its source:
// the graph's allocator gives memory that is no longer read to later nodes.
bool may_precede(const ggml_tensor * late, const ggml_tensor * early) {
    if (overlap(late, early) || overlap(late->src[1], early)) {
        return false;
    }
    return std::none_of(std::begin(early->src), std::end(early->src),
        [&](const ggml_tensor * t) { return t && overlap(late, t); });
}

}  // namespace

}  // namespace eagle3::kernels

uint32_t eagle3_multiply_together(const ggml_compute_params * params, const ggml_cgraph * graph, int at) {
    using namespace eagle3::kernels;
    ggml_tensor * first    = graph->nodes[at];
    const kernel * k_first = kernel_of_product(first);
    if (!k_first || params->use_ref) {
        return 0;
    }
    matmul all[MOST_TOGETHER] = {{k_first, first}};
    int n                     = 1;
    uint32_t computed         = 1;
    const int end             = std::min(at + LOOK_AHEAD, graph->n_nodes);
    for (int i = at + 1; i < end && n < MOST_TOGETHER; ++i) {
        ggml_tensor * op = graph->nodes[i];
        const kernel * k = op->src[1] == first->src[1] && is_computed(op) ? kernel_of_product(op) : nullptr;
        const bool free  = k && std::all_of(graph->nodes + at, graph->nodes + i, [&](const ggml_tensor * t) {
            return !is_computed(t) || may_precede(op, t);
        });
        if (free && k->rows == k_first->rows) {
            all[n++] = {k, op};
            computed |= 1u << (i - at);
        }
    }
    if (n == 1) {
        return 0;
    }
    multiply(all, n, params);
    return computed;
}
