// GGML_OP_MUL_MAT and GGML_OP_MUL_MAT_ID of an interleaved matrix, as the CPU backend's threads compute them.
#pragma once

#include "products/kernel.hpp"

struct ggml_compute_params;
struct ggml_tensor;

namespace eagle3::kernels {

// They take so many bytes of the work buffer.
size_t work_of_product(const kernel & k, const ggml_tensor * op, int n_thread);
size_t work_of_experts(const kernel & k, const ggml_tensor * op, int n_thread);
// Finds the kernel of a product. It is null unless op is a GGML_OP_MUL_MAT of an interleaved matrix.
const kernel * kernel_of_product(const ggml_tensor * op);

// A GGML_OP_MUL_MAT, and the products of its weights' format.
struct matmul {
    const kernel * k;
    ggml_tensor * op;
};
constexpr int MOST_TOGETHER = 4;  // in a layer: query, key and value; gate and up
// Each of the threads calls this at once, for products of the same activations, rounded alike. gated is null,
// or the node that makes the activations and was not computed: is_gate() of it.
void multiply(const matmul * products, int n_product, const ggml_compute_params * params,
    const ggml_tensor * gated = nullptr);
// Says whether op is a gate whose rows can be made as they are rounded: SwiGLU of floats.
bool is_gate(const ggml_tensor * op);
void multiply_experts(const kernel & k, const ggml_compute_params * params, ggml_tensor * op);

}  // namespace eagle3::kernels
