// AMX's layout on processors without AMX: which products its buffer type takes, and those of halves, which use
// AVX-512 alone. The tree's own sources; only the question whether the system allows AMX is answered with yes.
// This file is compiled for any processor, since a compiler copies structures with the widest registers it may
// use. The products are in mmq.cpp, compiled by itself for AMX and called only where AVX-512 is.
#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

// after the headers with intrinsics, which would take them for the compiler's own
#include "amx/amx.h"
#include "amx/common.h"
#include "amx/mmq.h"
#include "traits.h"
#ifndef __AMX_INT8__
#define __AMX_INT8__
#endif
#ifndef __AVX512VNNI__
#define __AVX512VNNI__
#endif
ggml_backend_buffer_type_t ggml_backend_amx_buffer_type(void);
#define syscall(...) 0
#include "amx/amx.cpp"
#undef syscall

namespace {

constexpr int K = 64, N = 64, HEADS = 3, ROWS = 5;

// A weight of several matrices and its product. permuted: with activations [K, HEADS, ROWS], turned over.
struct product {
    ggml_context_ptr ctx{ggml_init({16 * ggml_tensor_overhead(), nullptr, true})};
    ggml_tensor *w, *x, *seen, *out;
    ggml_backend_buffer_ptr weights;

    product(ggml_type type, bool permuted) {
        w    = ggml_new_tensor_3d(ctx.get(), type, K, N, HEADS);
        x    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, K, permuted ? HEADS : ROWS, permuted ? ROWS : HEADS);
        seen = permuted ? ggml_permute(ctx.get(), x, 0, 2, 1, 3) : x;
        out  = ggml_mul_mat(ctx.get(), w, seen);
        ggml_backend_buffer_type_t type_of_amx = ggml_backend_amx_buffer_type();
        weights.reset(ggml_backend_buft_alloc_buffer(type_of_amx, 1 << 20));
        ggml_backend_tensor_alloc(weights.get(), w, ggml_backend_buffer_get_base(weights.get()));
    }
    bool taken() const {
        auto * all = (ggml::cpu::extra_buffer_type *) ggml_backend_amx_buffer_type()->context;
        return all->supports_op(nullptr, out);
    }
    std::vector<float> computed(const std::vector<ggml_fp16_t> & matrix, const std::vector<float> & rows) {
        std::vector<float> in(K * ROWS * HEADS), y(N * ROWS * HEADS);
        for (int h = 0; h < HEADS; ++h) {
            for (int r = 0; r < ROWS; ++r) {
                const int at = x->ne[1] == HEADS ? r * HEADS + h : h * ROWS + r;
                memcpy(in.data() + at * K, rows.data() + (h * ROWS + r) * K, K * sizeof(float));
            }
        }
        memcpy(w->data, matrix.data(), matrix.size() * sizeof(ggml_fp16_t));
        seen->data = x->data = in.data();
        out->data            = y.data();
        ggml_compute_params params = {};
        params.nth                 = 1;
        ((ggml::cpu::tensor_traits *) w->extra)->compute_forward(&params, out);
        return y;
    }
};

} // namespace

int main() {
    for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_F16}) {
        printf("%s %d %d\n", ggml_type_name(type), product(type, false).taken(), product(type, true).taken());
    }
    fflush(stdout);
    if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni")) {
        return 77;
    }
    std::vector<ggml_fp16_t> matrix;
    std::vector<float> rows;
    for (int i = 0; i < K * N * HEADS; ++i) {
        matrix.push_back(ggml_fp32_to_fp16((float) (i * 37 % 101) / 101 - 0.5f));
    }
    for (int i = 0; i < K * ROWS * HEADS; ++i) {
        rows.push_back((float) (i * 53 % 97) / 97 - 0.5f);
    }
    const bool same = product(GGML_TYPE_F16, false).computed(matrix, rows) == product(GGML_TYPE_F16, true).computed(matrix, rows);
    puts(same ? "same" : "different");
}
