// Products of the same activations, such as those with a layer's query, key and value weights, computed as
// one: rows are rounded once, and threads wait for each other once (patch 0302).
#pragma once

#include <stdint.h>

struct ggml_cgraph;
struct ggml_compute_params;

// Called by each of the threads at once. If node `at` of the graph is the first of several such products, it
// computes all of them: bit i of the result is set if node at + i was computed. 0 if none was.
extern "C" uint32_t eagle3_multiply_together(
    const ggml_compute_params * params, const ggml_cgraph * graph, int at);
