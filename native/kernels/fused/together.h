// Operations that are computed together, so that threads wait for each other once (patch 0103): products of
// the same activations, such as those with a layer's query, key and value weights, whose rows are rounded
// once; others that need nothing of each other; and norms with what is before and behind them.
#pragma once

#include <stdint.h>

struct ggml_cgraph;
struct ggml_compute_params;

// Called by each of the threads at once. If node `at` of the graph is the first of several such operations,
// it computes all of them: bit i of the result is set if node at + i was computed. 0 if none was. computed:
// the same of the nodes that were computed with one before.
extern "C" uint32_t eagle3_compute_together(
    const ggml_compute_params * params, const ggml_cgraph * graph, int at, uint32_t computed);
