// GGML_OP_MUL_MAT and GGML_OP_MUL_MAT_ID of an interleaved matrix, as the CPU backend's threads compute them.
#pragma once

#include "kernel.hpp"

struct ggml_compute_params;
struct ggml_tensor;

namespace eagle3::kernels {

// Bytes of the work buffer that these take.
size_t work_of_product(const kernel & k, const ggml_tensor * op);
size_t work_of_experts(const kernel & k, const ggml_tensor * op, int n_thread);
// Called by each of the threads at once.
void multiply(const kernel & k, const ggml_compute_params * params, ggml_tensor * op);
void multiply_experts(const kernel & k, const ggml_compute_params * params, ggml_tensor * op);

}  // namespace eagle3::kernels
