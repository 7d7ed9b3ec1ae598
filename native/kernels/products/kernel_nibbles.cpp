#include "products/kernel_of_format.hpp"

namespace eagle3::kernels {

#if EAGLE3_LANES
template kernel make_kernel<q4_0>(ggml_type type);
template kernel make_kernel<q4_1>(ggml_type type);
template kernel make_kernel<q5_0>(ggml_type type);
template kernel make_kernel<q5_1>(ggml_type type);
#endif

}  // namespace eagle3::kernels
