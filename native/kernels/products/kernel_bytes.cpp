#include "products/kernel_of_format.hpp"

namespace eagle3::kernels {

#if EAGLE3_LANES
template kernel make_kernel<q8_0>(ggml_type type);
template kernel make_kernel<iq4_nl>(ggml_type type);
template kernel make_kernel<mxfp4>(ggml_type type);
#endif

}  // namespace eagle3::kernels
