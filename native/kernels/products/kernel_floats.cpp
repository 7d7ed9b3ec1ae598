#include "products/kernel_of_format.hpp"

namespace eagle3::kernels {

// With AVX-512, few rows of floats have products of their own (patch 0102).
#if EAGLE3_LANES && !defined(__AVX512F__)
template kernel make_kernel<f32>(ggml_type type);
template kernel make_kernel<f16>(ggml_type type);
template kernel make_kernel<bf16>(ggml_type type);
#endif

}  // namespace eagle3::kernels
