// Products in each weight format, in each kind of buffer that a model's weights are put into (repacked,
// AMX's, plain): 1 to 64 rows against sums in double, and against each row alone, bit for bit.
#include "proof.hpp"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <cmath>
#include <cstring>
#include <memory>

namespace {

ggml_backend_t backend() {
    static ggml_backend_ptr b(ggml_backend_dev_init(cpu(), nullptr));
    static const bool set = [] {
        auto threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads");
        threads(b.get(), 2);
        return true;
    }();
    (void) set;
    return b.get();
}

// as llama.cpp lists them for a model's weights
std::vector<ggml_backend_buffer_type_t> weight_buffers() {
    std::vector<ggml_backend_buffer_type_t> out;
    auto get = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(cpu()), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * b = get ? get(cpu()) : nullptr; b && *b; ++b) {
        out.push_back(*b);
    }
    out.push_back(ggml_backend_dev_buffer_type(cpu()));
    return out;
}

ggml_context_ptr context(size_t n) {
    return ggml_context_ptr(ggml_init({n * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

constexpr int K = 768, M = 96;

int most_rows() {
    return few ? 4 : 64;
}

const std::vector<float> & activations() {  // [most_rows(), K]
    static const std::vector<float> x = random_floats((size_t) K * most_rows(), 1.0f);
    return x;
}

struct matrix {
    ggml_type type;
    std::vector<uint8_t> bytes;  // M rows of K weights
    std::vector<double> sums;    // its products with the activations: [most_rows(), M]
    std::vector<double> norms;   // one for each of its rows
};

// Formats whose quantisation searches for seconds: any bytes are weights, if the scale of a block is sane.
bool made_of_bytes(ggml_type type, std::vector<uint8_t> & bytes) {
    const size_t size = ggml_type_size(type);
    switch (type) {
    case GGML_TYPE_IQ2_XXS:
    case GGML_TYPE_IQ2_XS:
    case GGML_TYPE_IQ2_S:
    case GGML_TYPE_IQ3_XXS:
    case GGML_TYPE_IQ3_S:
    case GGML_TYPE_IQ1_S:
    case GGML_TYPE_IQ1_M:
        break;
    default:
        return false;
    }
    for (uint8_t & b : bytes) {
        b = (uint8_t) rng();
    }
    for (size_t at = 0; at < bytes.size(); at += size) {
        if (type == GGML_TYPE_IQ1_M) {  // 0x2c00, a digit in each of the block's last four words
            for (int i = 0; i < 4; ++i) {
                uint8_t & high = bytes[at + size - 7 + 2 * i];
                high           = (uint8_t) ((high & 15) | (i == 2 ? 0xc0 : i == 3 ? 0x20 : 0));
            }
        } else {
            bytes[at]     = 0x00;
            bytes[at + 1] = 0x2c;
        }
    }
    return true;
}

matrix random_weights(ggml_type type) {
    matrix out{type, std::vector<uint8_t>(ggml_row_size(type, K) * M), {}, {}};
    if (!made_of_bytes(type, out.bytes)) {
        const std::vector<float> w = random_floats((size_t) K * M, 1.0f), even(K, 1.0f);
        ggml_quantize_chunk(type, w.data(), out.bytes.data(), 0, M, K, even.data());
    }
    std::vector<float> plain((size_t) K * M);
    if (type == GGML_TYPE_F32) {
        std::memcpy(plain.data(), out.bytes.data(), out.bytes.size());
    } else {
        ggml_get_type_traits(type)->to_float(out.bytes.data(), plain.data(), (int64_t) K * M);
    }
    for (int r = 0; r < most_rows(); ++r) {
        const float * x = activations().data() + (size_t) r * K;
        for (int i = 0; i < M; ++i) {
            const float * w = plain.data() + (size_t) i * K;
            double sum = 0, squares = 0;
            for (int j = 0; j < K; ++j) {
                sum += (double) w[j] * x[j];
                squares += (double) w[j] * w[j];
            }
            out.sums.push_back(sum);
            if (r == 0) {
                out.norms.push_back(std::sqrt(squares));
            }
        }
    }
    return out;
}

// false if the backend computes no such products of weights in this buffer, as llama.cpp asks it
bool supported(ggml_backend_buffer_type_t buft, ggml_type type) {
    ggml_context_ptr ctx = context(4);
    ggml_tensor * w      = ggml_new_tensor_2d(ctx.get(), type, K, M);
    ggml_tensor * y =
        ggml_mul_mat(ctx.get(), w, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, K, most_rows()));
    ggml_backend_buffer_ptr none(ggml_backend_buft_alloc_buffer(buft, 0));
    w->buffer      = none.get();
    const bool yes = ggml_backend_dev_supports_op(cpu(), y);
    w->buffer      = nullptr;
    return yes;
}

// x [rows, K] times weights: [rows, M]
std::vector<float> multiply(ggml_tensor * weights, const float * x, int rows) {
    ggml_context_ptr ctx = context(4);
    ggml_tensor * in     = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, K, rows);
    ggml_tensor * out    = ggml_mul_mat(ctx.get(), weights, in);
    ggml_cgraph * graph  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend()));
    ggml_backend_tensor_set(in, x, 0, ggml_nbytes(in));
    if (ggml_backend_graph_compute(backend(), graph) != GGML_STATUS_SUCCESS) {
        end(WRONG, "the backend refuses the product");
    }
    std::vector<float> y((size_t) rows * M);
    ggml_backend_tensor_get(out, y.data(), 0, ggml_nbytes(out));
    return y;
}

// Standard deviation of what rounding an activation in [-1, 1] adds: 8 bits a block, or a float's mantissa.
double rounding(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
        return 1e-6;
    case GGML_TYPE_F16:
#if defined(__aarch64__)
        return std::ldexp(1.0, -11);  // some of these processors add halves as halves
#else
        return std::ldexp(1.0, -12);
#endif
    case GGML_TYPE_BF16:
        return std::ldexp(1.0, -9);
    default:
        return 1.0 / (127 * std::sqrt(12.0));
    }
}

// Sums of products whose inputs were rounded lie around the true ones: within 12 standard deviations each,
// and within two all together. One product of the 768 left out would make it nine.
void check_sums(const matrix & w, const std::vector<float> & y) {
    const size_t n = y.size();
    double all     = 0;
    for (size_t i = 0; i < n; ++i) {
        const double off = std::fabs(y[i] - w.sums[i]) / (rounding(w.type) * w.norms[i % M]);
        if (!(off <= 12)) {
            end(WRONG, "with " + std::to_string(n / M) + " rows, " + std::to_string(y[i]) + " where " +
                           std::to_string(w.sums[i]) + " is right");
        }
        all += off * off;
    }
    if (all > 4.0 * (double) n) {
        end(WRONG, "with " + std::to_string(n / M) + " rows, errors of " +
                       std::to_string(std::sqrt(all / (double) n)) + " standard deviations");
    }
}

// The formats that decode in any number of rows as in one; the others, which hardly a model has, may do so.
bool rows_are_alike(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q5_1:
    case GGML_TYPE_Q2_K:
    case GGML_TYPE_Q3_K:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
    case GGML_TYPE_Q6_K:
    case GGML_TYPE_IQ4_XS:
        return true;
    default:
        return false;
    }
}

void check_products(ggml_backend_buffer_type_t buft, const matrix & w) {
    begin(std::string("products in ") + ggml_type_name(w.type) + " (" + ggml_backend_buft_name(buft) + ")");
    ggml_context_ptr ctx  = context(1);
    ggml_tensor * weights = ggml_new_tensor_2d(ctx.get(), w.type, K, M);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(weights, w.bytes.data(), 0, w.bytes.size());

    std::vector<float> alone;
    for (int r = 0; r < most_rows(); ++r) {
        const std::vector<float> y = multiply(weights, activations().data() + (size_t) r * K, 1);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    check_sums(w, alone);
    for (int rows : {2, 3, 4, 8, 16, 33, 64}) {
        if (rows > most_rows()) {
            break;
        }
        const std::vector<float> y = multiply(weights, activations().data(), rows);
        check_sums(w, y);
        if (rows_are_alike(w.type)) {
            check_same(y.data(), alone.data(), y.size(), rows);
        }
    }
}

bool computes(ggml_type type) {
    const ggml_type_traits * traits = ggml_get_type_traits(type);
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
           (traits->is_quantized && traits->to_float);
}

}  // namespace

void check_all_products() {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = (ggml_type) i;
        if (!ggml_type_name(type) || ggml_blck_size(type) == 0 || !computes(type)) {
            continue;
        }
        std::unique_ptr<matrix> weights;
        for (ggml_backend_buffer_type_t buft : weight_buffers()) {
            if (supported(buft, type)) {
                if (!weights) {
                    weights = std::make_unique<matrix>(random_weights(type));
                }
                check_products(buft, *weights);
            }
        }
    }
}
