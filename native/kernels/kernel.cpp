#include "kernel.hpp"

#include <utility>

namespace eagle3::kernels {

#if EAGLE3_LANES

namespace {

template <typename F> void put(void * wide, int column, const void * narrow) {
    ((typename F::block *) wide)->put(column, *(const typename F::block::narrow *) narrow);
}

template <typename F> void get(const void * wide, int column, void * narrow) {
    ((const typename F::block *) wide)->get(column, *(typename F::block::narrow *) narrow);
}

template <typename F, int... I> kernel make(ggml_type type, std::integer_sequence<int, I...> /*rows*/) {
    using narrow = typename F::block::narrow;
    static_assert(sizeof(typename F::block) == COLUMNS * sizeof(narrow), "blocks have no holes");
    return {type, sizeof(narrow), put<F>, get<F>, {nullptr, multiply_tile<F, I + 1>...}};
}

template <typename F> kernel make(ggml_type type) {
    return make<F>(type, std::make_integer_sequence<int, MOST_AT_ONCE>());
}

}  // namespace

const kernel * kernel_of(ggml_type type) {
    static const kernel all[] = {
        make<q8_0>(GGML_TYPE_Q8_0),
        make<q4_0>(GGML_TYPE_Q4_0),
        make<q4_1>(GGML_TYPE_Q4_1),
        make<q5_0>(GGML_TYPE_Q5_0),
        make<q5_1>(GGML_TYPE_Q5_1),
        make<iq4_nl>(GGML_TYPE_IQ4_NL),
        make<mxfp4>(GGML_TYPE_MXFP4),
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
