#include "products/kernel.hpp"

namespace eagle3::kernels {

#if EAGLE3_LANES

const kernel * kernel_of(ggml_type type) {
    static const kernel all[] = {
        make_kernel<q8_0>(GGML_TYPE_Q8_0),
        make_kernel<q4_0>(GGML_TYPE_Q4_0),
        make_kernel<q4_1>(GGML_TYPE_Q4_1),
        make_kernel<q5_0>(GGML_TYPE_Q5_0),
        make_kernel<q5_1>(GGML_TYPE_Q5_1),
        make_kernel<iq4_nl>(GGML_TYPE_IQ4_NL),
        make_kernel<mxfp4>(GGML_TYPE_MXFP4),
        make_kernel<q4_k>(GGML_TYPE_Q4_K),
        make_kernel<q5_k>(GGML_TYPE_Q5_K),
        make_kernel<q6_k>(GGML_TYPE_Q6_K),
#if !defined(__AVX512F__)  // with AVX-512, few rows of floats have products of their own (patch 0102)
        make_kernel<f32>(GGML_TYPE_F32),
        make_kernel<f16>(GGML_TYPE_F16),
        make_kernel<bf16>(GGML_TYPE_BF16),
#endif
    };
    for (const kernel & k : all) {
        if (k.type == type) {
            return &k;
        }
    }
    return nullptr;
}

#else

const kernel * kernel_of(ggml_type /*type*/) {
    return nullptr;
}

#endif

}  // namespace eagle3::kernels
