// GGML_OP_RMS_NORM with the multiplication behind it, and the addition before it where there is one: a row is
// read and written once, by one thread.
#pragma once

struct ggml_cgraph;
struct ggml_compute_params;
struct ggml_tensor;

namespace eagle3::kernels {

struct norm {
    ggml_tensor * add;  // null: none
    ggml_tensor *rms, *mul;

    int n_node() const { return add ? 3 : 2; }
};

// Says whether node `at` of the graph is the first of such nodes, which may be computed as one.
bool norm_at(const ggml_cgraph * graph, int at, norm & out);
// Called by each of the threads at once.
void compute(const norm & of, const ggml_compute_params * params);

}  // namespace eagle3::kernels
