#include "target/deferral.hpp"

#include "error.hpp"

#include "ggml-cpp.h"

#include <cstring>

namespace eagle3 {

void compute_logits(llama_context * ctx, int first, int n, float * out) {
    const llama_deferred_logits left_out = llama_get_deferred_logits(ctx);
    if (left_out.n_nodes == 0) {
        return;
    }
    const int n_rows = (int) left_out.n_rows;
    require(first >= 0 && n >= 1 && first <= n_rows - n, EAGLE3_E_ARGUMENT,
        format("no %d rows from row %d on: the last decode had %d", n, first, n_rows));

    const size_t n_nodes = left_out.n_nodes, graph_size = 2 * n_nodes + 8;
    const ggml_init_params params = {
        (n_nodes + 1) * ggml_tensor_overhead() + ggml_graph_overhead_custom(graph_size, false), nullptr,
        /*.no_alloc =*/true};
    const ggml_context_ptr graph_ctx(ggml_init(params));
    require(graph_ctx != nullptr, EAGLE3_E_MEMORY, "not enough memory to compute logits");

    // The operations run again, for these rows only; each writes its result over that of the one before.
    const ggml_tensor * before = left_out.nodes[0]->src[1];
    ggml_tensor * result       = ggml_new_tensor_2d(graph_ctx.get(), GGML_TYPE_F32, before->ne[0], n);
    result->data               = const_cast<float *>(left_out.input) + first * before->ne[0];
    for (size_t i = 0; i < n_nodes; ++i) {
        const ggml_tensor * node = left_out.nodes[i];
        ggml_tensor * t          = ggml_new_tensor_2d(graph_ctx.get(), GGML_TYPE_F32, node->ne[0], n);
        t->op                    = node->op;
        t->data                  = out ? out : llama_get_logits(ctx) + first * node->ne[0];
        memcpy(t->op_params, node->op_params, sizeof(t->op_params));
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            t->src[k] = node->src[k] == before ? result : node->src[k];
        }
        before = node;
        result = t;
    }
    ggml_cgraph * graph = ggml_new_graph_custom(graph_ctx.get(), graph_size, false);
    ggml_build_forward_expand(graph, result);
    require(ggml_backend_graph_compute(left_out.backend, graph) == GGML_STATUS_SUCCESS, EAGLE3_E_DECODE,
        "the output matrix could not be computed");
    if (out == nullptr) {
        llama_set_logits_computed(ctx, first, n);
    }
}

}  // namespace eagle3
