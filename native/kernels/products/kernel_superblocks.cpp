#include "products/kernel_of_format.hpp"

namespace eagle3::kernels {

#if EAGLE3_LANES
template kernel make_kernel<q4_k>(ggml_type type);
template kernel make_kernel<q5_k>(ggml_type type);
template kernel make_kernel<q6_k>(ggml_type type);
#endif

}  // namespace eagle3::kernels
