// This makes graphs of one operation on the CPU backend, random inputs, and what results are compared with.
#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

inline std::mt19937 rng;

inline std::vector<float> random_floats(size_t n) {
    std::uniform_real_distribution<float> u(-1.0f, 1.0f);
    std::vector<float> out(n);
    for (float & x : out) {
        x = u(rng);
    }
    return out;
}

inline std::vector<ggml_fp16_t> halves(const std::vector<float> & x) {
    std::vector<ggml_fp16_t> out(x.size());
    ggml_fp32_to_fp16_row(x.data(), out.data(), (int64_t) x.size());
    return out;
}

inline ggml_backend_t backend() {
    static ggml_backend_ptr b(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(b.get(), 2);
    return b.get();
}

// Returns the buffer type of the CPU backend whose name has this word, or null if there is none.
inline ggml_backend_buffer_type_t buffer_type(const char * word) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend());
    auto get               = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * b = get ? get(dev) : nullptr; b && *b; ++b) {
        if (std::strstr(ggml_backend_buft_name(*b), word)) {
            return *b;
        }
    }
    return nullptr;
}

inline ggml_context_ptr context(size_t n) {
    return ggml_context_ptr(ggml_init({n * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

// Returns the types that a product of k by m weights in such a buffer may have, and none for a null.
inline std::vector<ggml_type> types_of(ggml_backend_buffer_type_t buft, int k, int m) {
    std::vector<ggml_type> out;
    for (int i = 0; buft && i < GGML_TYPE_COUNT; ++i) {
        const auto type     = (ggml_type) i;
        const bool is_float = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
        if (!(is_float || ggml_is_quantized(type)) || ggml_quantize_requires_imatrix(type)) {
            continue;
        }
        ggml_context_ptr ctx = context(4);
        ggml_tensor * w      = ggml_new_tensor_2d(ctx.get(), type, k, m);
        ggml_tensor * y      = ggml_mul_mat(ctx.get(), w, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, k, 1));
        ggml_backend_buffer_ptr none(ggml_backend_buft_alloc_buffer(buft, 0));
        w->buffer = none.get();
        if (ggml_backend_supports_op(backend(), y)) {
            out.push_back(type);
        }
        w->buffer = nullptr;
    }
    return out;
}

// Returns what a graph of one operation computes; fill gives its inputs their data, look sees what is left.
inline std::vector<float> compute(
    const std::function<ggml_tensor *(ggml_context *)> & make,
    const std::function<void(ggml_context *)> & fill,
    const std::function<void(ggml_context *)> & look = [](ggml_context *) {}) {
    ggml_context_ptr ctx = context(16);
    ggml_tensor * out    = make(ctx.get());
    ggml_cgraph * graph  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend()));
    fill(ctx.get());
    if (ggml_backend_graph_compute(backend(), graph) != GGML_STATUS_SUCCESS) {
        std::abort();
    }
    look(ctx.get());
    std::vector<float> y(ggml_nelements(out));
    ggml_backend_tensor_get(out, y.data(), 0, ggml_nbytes(out));
    return y;
}

inline void expect_same(
    const float * a, const float * b, size_t n, const char * what, const char * type, int rows) {
    if (std::memcmp(a, b, n * sizeof(float)) != 0) {
        std::fprintf(stderr, "%s %s: %d rows differ\n", what, type, rows);
        std::exit(1);
    }
}

// Returns how far a product may be from an exact one of the same weights, in units of the sum of its terms'
// sizes: what activations lose when they are rounded for this format.
inline double rounding_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
        return 1e-6;
    case GGML_TYPE_F16:
        return 1e-3;
    case GGML_TYPE_BF16:
        return 4e-3;
    default:
        return 1e-2;
    }
}

// Compares rows [n, m] with a loop in double precision over the weights q [m, k], as to_float gives them.
inline void expect_exact(ggml_type type, const std::vector<uint8_t> & q, const std::vector<float> & x,
    const std::vector<float> & rows, int k, int m, const char * what) {
    std::vector<float> w(k);
    for (int i = 0; i < m; ++i) {
        const uint8_t * row = q.data() + i * ggml_row_size(type, k);
        type == GGML_TYPE_F32 ? (void) std::memcpy(w.data(), row, k * sizeof(float))
                              : ggml_get_type_traits(type)->to_float(row, w.data(), k);
        for (size_t r = 0; r < rows.size() / m; ++r) {
            double sum = 0, size = 0;
            for (int j = 0; j < k; ++j) {
                const double term = (double) w[j] * x[r * k + j];
                sum += term;
                size += std::fabs(term);
            }
            if (!(std::fabs(rows[r * m + i] - sum) <= rounding_of(type) * size)) {
                std::fprintf(stderr, "%s %s: row %zu, column %d is %g, not %g\n", what, ggml_type_name(type),
                    r, i, rows[r * m + i], sum);
                std::exit(1);
            }
        }
    }
}
