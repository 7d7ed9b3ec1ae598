#include "fused/together.h"

#include "products/multiply.hpp"
#include "fused/norm.hpp"
#include "tensors.hpp"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ops.h"

#include <algorithm>

namespace eagle3::kernels {

namespace {

constexpr int LOOK_AHEAD = 24;  // nodes; at most 32, a bit for each

bool is_computed(const ggml_tensor * t) {
    return !ggml_op_is_empty(t->op) && (t->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

// Says whether `late` may be computed before `early`, which comes before it in the graph: the graph's
// allocator gives memory that is no longer read to later nodes.
bool may_precede(const ggml_tensor * late, const ggml_tensor * early) {
    const auto reads = [](const ggml_tensor * a, const ggml_tensor * b) {
        return std::any_of(
            std::begin(a->src), std::end(a->src), [&](const ggml_tensor * t) { return t && overlap(t, b); });
    };
    return !overlap(late, early) && !reads(late, early) && !reads(early, late);
}

// A node of a graph. Bit i of computed: node at + i already is.
struct place {
    const ggml_cgraph * graph;
    int at;
    uint32_t computed;

    ggml_tensor * node() const { return graph->nodes[at]; }
};

// Calls take(node) for each node behind a place that may be computed together with the one there, until it
// returns false. Returns the bits of these nodes, with that one. fits(node): whether it is of the right kind.
template <typename Fits, typename Take>
uint32_t each_of_kind(const place & here, Fits && fits, Take && take) {
    const auto [graph, at, computed] = here;
    uint32_t taken                   = 1;
    const int end                    = std::min(at + LOOK_AHEAD, graph->n_nodes);
    for (int i = at + 1; i < end; ++i) {
        ggml_tensor * op = graph->nodes[i];
        const bool free  = (computed >> (i - at) & 1) == 0 && is_computed(op) && fits(op) &&
                           std::all_of(graph->nodes + at, graph->nodes + i,
                               [&](const ggml_tensor * t) { return !is_computed(t) || may_precede(op, t); });
        if (free) {
            taken |= 1u << (i - at);
            if (!take(op)) {
                break;
            }
        }
    }
    return taken;
}

// These products have the same activations.
uint32_t multiply_together(const ggml_compute_params * params, const place & here) {
    ggml_tensor * first    = here.node();
    const kernel * k_first = kernel_of_product(first);
    if (!k_first) {
        return 0;
    }
    matmul all[MOST_TOGETHER] = {{k_first, first}};
    int n                     = 1;
    const uint32_t computed   = each_of_kind(
        here,
        [&](const ggml_tensor * op) {
            const kernel * k = op->src[1] == first->src[1] ? kernel_of_product(op) : nullptr;
            return k && k->rows == k_first->rows;
        },
        [&](ggml_tensor * op) {
            all[n++] = {kernel_of_product(op), op};
            return n < MOST_TOGETHER;
        });
    if (n == 1) {
        return 0;
    }
    multiply(all, n, params);
    return computed;
}

// A gate whose result only the product behind it reads.
uint32_t multiply_gated(const ggml_compute_params * params, const place & here) {
    if (here.at + 1 >= here.graph->n_nodes || !ggml_node_has_n_uses(here.graph, here.at, 1) ||
        !is_gate(here.node())) {
        return 0;
    }
    ggml_tensor * op = here.graph->nodes[here.at + 1];
    const kernel * k = op->src[1] == here.node() && is_computed(op) ? kernel_of_product(op) : nullptr;
    if (!k) {
        return 0;
    }
    const matmul product = {k, op};
    multiply(&product, 1, params, here.node());
    return 3;
}

// Operations of one kind that need nothing of each other, such as those with a layer's keys and values. Each
// thread computes its part of all of them.
uint32_t compute_alike(const ggml_compute_params * params, const place & here,
    void (*compute)(const ggml_compute_params * params, ggml_tensor * op)) {
    const ggml_op kind      = here.node()->op;
    bool first              = true;
    const uint32_t computed = each_of_kind(
        here, [&](const ggml_tensor * op) { return op->op == kind; },
        [&](ggml_tensor * op) {
            if (first) {
                compute(params, here.node());
                first = false;
            }
            compute(params, op);
            return true;
        });
    return first ? 0 : computed;
}

}  // namespace

}  // namespace eagle3::kernels

uint32_t eagle3_compute_together(
    const ggml_compute_params * params, const ggml_cgraph * graph, int at, uint32_t computed) {
    using namespace eagle3::kernels;
    if (params->use_ref) {
        return 0;
    }
    const place here = {graph, at, computed};
    norm found;
    switch (here.node()->op) {
    case GGML_OP_MUL_MAT:
        return multiply_together(params, here);
    case GGML_OP_GLU:
        return multiply_gated(params, here);
    case GGML_OP_ROPE:
        return compute_alike(params, here, ggml_compute_forward_rope);
    case GGML_OP_SET_ROWS:
        return compute_alike(params, here, ggml_compute_forward_set_rows);
    case GGML_OP_ADD:
    case GGML_OP_RMS_NORM:
        if (norm_at(graph, at, found)) {
            compute(found, params);
            return (1u << found.n_node()) - 1;
        }
        return 0;
    default:
        return 0;
    }
}
