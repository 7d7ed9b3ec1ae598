// Products and attention of several rows against each row alone, bit for bit, and products of quantised
// matrices against vec_dot: products_test SEED
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

namespace {

constexpr int N_ROWS = 10;

std::mt19937 rng;

std::vector<float> random_floats(size_t n) {
    std::uniform_real_distribution<float> u(-1.0f, 1.0f);
    std::vector<float> out(n);
    for (float & x : out) {
        x = u(rng);
    }
    return out;
}

std::vector<ggml_fp16_t> halves(const std::vector<float> & x) {
    std::vector<ggml_fp16_t> out(x.size());
    ggml_fp32_to_fp16_row(x.data(), out.data(), (int64_t) x.size());
    return out;
}

ggml_backend_t backend() {
    static ggml_backend_ptr b(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(b.get(), 2);
    return b.get();
}

ggml_backend_buffer_type_t repacking() {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend());
    auto get               = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * b = get ? get(dev) : nullptr; b && *b; ++b) {
        if (std::strstr(ggml_backend_buft_name(*b), "REPACK")) {
            return *b;
        }
    }
    return nullptr;
}

ggml_context_ptr context(size_t n) {
    return ggml_context_ptr(ggml_init({n * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
}

// what a graph of one operation computes; fill gives its inputs their data
std::vector<float> compute(const std::function<ggml_tensor *(ggml_context *)> & make,
    const std::function<void(ggml_context *)> & fill) {
    ggml_context_ptr ctx = context(16);
    ggml_tensor * out    = make(ctx.get());
    ggml_cgraph * graph  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend()));
    fill(ctx.get());
    if (ggml_backend_graph_compute(backend(), graph) != GGML_STATUS_SUCCESS) {
        std::abort();
    }
    std::vector<float> y(ggml_nelements(out));
    ggml_backend_tensor_get(out, y.data(), 0, ggml_nbytes(out));
    return y;
}

void expect_same(const float * a, const float * b, size_t n, const char * what, const char * type, int rows) {
    if (std::memcmp(a, b, n * sizeof(float)) != 0) {
        std::fprintf(stderr, "%s %s: %d rows differ\n", what, type, rows);
        std::exit(1);
    }
}

void check_product(ggml_type type, ggml_backend_buffer_type_t buft, const char * what) {
    const int k = 768, m = 72;
    const std::vector<float> w = random_floats((size_t) k * m), x = random_floats((size_t) k * N_ROWS);
    std::vector<uint8_t> q(ggml_row_size(type, k) * m);
    ggml_quantize_chunk(type, w.data(), q.data(), 0, m, k, nullptr);
    ggml_context_ptr weights = context(1);
    ggml_tensor * matrix     = ggml_new_tensor_2d(weights.get(), type, k, m);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), buft));
    ggml_backend_tensor_set(matrix, q.data(), 0, q.size());

    const auto product = [&](int from, int n) {
        return compute(
            [&](ggml_context * ctx) {
                return ggml_mul_mat(
                    ctx, matrix, ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, n), "x"));
            },
            [&](ggml_context * ctx) {
                ggml_backend_tensor_set(ggml_get_tensor(ctx, "x"), x.data() + (size_t) from * k, 0,
                    (size_t) n * k * sizeof(float));
            });
    };
    std::vector<float> alone;
    for (int r = 0; r < N_ROWS; ++r) {
        const std::vector<float> y = product(r, 1);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    for (int n = 1; n <= N_ROWS; ++n) {
        expect_same(product(0, n).data(), alone.data(), (size_t) n * m, what, ggml_type_name(type), n);
    }
    // Q5_K's vec_dot adds its minima in plain C, which a compiler may fuse or not
    if (buft == ggml_backend_cpu_buffer_type() && type != GGML_TYPE_Q5_K) {
        const auto * traits = ggml_get_type_traits_cpu(type);
        std::vector<uint8_t> y(ggml_row_size(traits->vec_dot_type, k));
        std::vector<float> dots(m);
        ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(x.data(), y.data(), k);
        for (int i = 0; i < m; ++i) {
            traits->vec_dot(k, &dots[i], 0, q.data() + i * ggml_row_size(type, k), 0, y.data(), 0, 1);
        }
        expect_same(dots.data(), alone.data(), m, "vec_dot", ggml_type_name(type), 1);
    }
}

// Rows that see different cells: a prompt's, then some of their own; here and there a hidden one
void check_attention(
    int d, int n_head, int n_head_kv, int n_seen, float max_bias, float softcap, bool sinks) {
    const int n_kv             = (n_seen + N_ROWS + 255) / 256 * 256;
    const std::vector<float> q = random_floats((size_t) d * n_head * N_ROWS), s = random_floats(n_head);
    const std::vector<ggml_fp16_t> k = halves(random_floats((size_t) d * n_head_kv * n_kv)),
                                   v = halves(random_floats((size_t) d * n_head_kv * n_kv));
    std::vector<float> hidden((size_t) n_kv * N_ROWS, -INFINITY);
    for (int r = 0; r < N_ROWS; ++r) {
        for (int c = 0; c < n_seen + r; ++c) {
            hidden[(size_t) r * n_kv + c] = c > 0 && rng() % (c < n_seen ? 97 : 3) == 0 ? -INFINITY : 0.0f;
        }
    }
    const std::vector<ggml_fp16_t> mask = halves(hidden);

    const auto attend = [&](int from, int n) {  // [d, n_head, n]
        return compute(
            [&](ggml_context * ctx) {
                auto input = [&](ggml_type type, const char * name, int a, int b, int c) {
                    return ggml_set_name(ggml_new_tensor_3d(ctx, type, a, b, c), name);
                };
                ggml_tensor * out = ggml_flash_attn_ext(ctx,
                    ggml_permute(ctx, input(GGML_TYPE_F32, "q", d, n_head, n), 0, 2, 1, 3),
                    input(GGML_TYPE_F16, "k", d, n_kv, n_head_kv),
                    input(GGML_TYPE_F16, "v", d, n_kv, n_head_kv), input(GGML_TYPE_F16, "mask", n_kv, n, 1),
                    1.0f / std::sqrt((float) d), max_bias, softcap);
                if (sinks) {
                    ggml_flash_attn_ext_add_sinks(out, input(GGML_TYPE_F32, "sinks", n_head, 1, 1));
                }
                return out;
            },
            [&](ggml_context * ctx) {
                const auto set = [&](const char * name, const void * data) {
                    ggml_backend_tensor_set(
                        ggml_get_tensor(ctx, name), data, 0, ggml_nbytes(ggml_get_tensor(ctx, name)));
                };
                set("q", q.data() + (size_t) from * d * n_head);
                set("k", k.data());
                set("v", v.data());
                set("mask", mask.data() + (size_t) from * n_kv);
                if (sinks) {
                    set("sinks", s.data());
                }
            });
    };
    const std::vector<float> all = attend(0, N_ROWS);
    for (int r = 0; r < N_ROWS; ++r) {
        expect_same(attend(r, 1).data(), all.data() + (size_t) r * d * n_head, (size_t) d * n_head,
            "attention", "F16", r);
    }
    for (const float x : all) {
        if (!std::isfinite(x)) {
            std::fprintf(stderr, "attention: not finite\n");
            std::exit(1);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    rng.seed(argc > 1 ? std::atoi(argv[1]) : 1);
    for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
             GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
        check_product(type, ggml_backend_cpu_buffer_type(), "product");
    }
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_K}) {
        if (repacking()) {
            check_product(type, repacking(), "repacked product");
        }
    }
    check_attention(64, 9, 3, 700, 0.0f, 0.0f, false);
    check_attention(64, 8, 1, 30, 0.0f, 0.0f, true);
    check_attention(80, 4, 4, 511, 8.0f, 0.0f, false);
    check_attention(96, 4, 2, 520, 0.0f, 9.0f, true);
    check_attention(128, 6, 2, 1, 0.0f, 0.0f, false);
    check_attention(256, 2, 1, 130, 0.0f, 0.0f, false);
    std::puts("ok");
}
