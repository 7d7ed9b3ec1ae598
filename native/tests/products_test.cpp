// Products and attention of several rows against each row alone, bit for bit; products of quantised matrices
// against vec_dot; both against plain loops in double precision: products_test SEED
#include "graphs.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace {

constexpr int K = 768, M = 80;
constexpr int N_ROWS = 64;  // GGML_CPU_INVARIANT_ROWS

void check_product(ggml_type type, ggml_backend_buffer_type_t buft, const char * what) {
    const int k = K, m = M;
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
    for (const int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 17, 18, 19, 31, 32, 33, 48, 63, 64}) {
        expect_same(product(0, n).data(), alone.data(), (size_t) n * m, what, ggml_type_name(type), n);
    }
    alone.resize((size_t) 8 * m);
    expect_exact(type, q, x, alone, k, m, what);
    // Q5_K's vec_dot adds its minima in plain C, which a compiler may fuse or not; that of IQ4_NL has two
    // sums; with AVX alone those that tinyBLAS knows sum blocks in pairs
    const bool avx_alone = ggml_cpu_has_avx() && !ggml_cpu_has_avx2();
    const bool in_pairs =
        avx_alone && (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q5_0);
    const bool sums_so =
        ggml_is_quantized(type) && type != GGML_TYPE_Q5_K && type != GGML_TYPE_IQ4_NL && !in_pairs;
    if (buft == ggml_backend_cpu_buffer_type() && sums_so) {
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

struct attention {
    int d, n_head, n_head_kv, n_seen;
    float max_bias, softcap;
    bool sinks;
    int n_rows;  // of the batch; more than N_ROWS is a prompt
    ggml_type cache = GGML_TYPE_F16;
    int d_v         = 0;           // of values, if another number than of keys
    int n_long      = N_ROWS * 2;  // rows that see so many cells; the others see few
    bool head_masks = false;       // each head has a mask of its own

    int values() const { return d_v ? d_v : d; }
};

// what ggml_flash_attn_ext promises, in double precision; keys and values [head][cell][d], mask [row][cell]
std::vector<double> attended(const attention & a, int n_kv, const float * q, const std::vector<float> & k,
    const std::vector<float> & v, const float * mask, const std::vector<float> & sinks, int head) {
    const int n2       = 1 << (int) std::floor(std::log2(a.n_head));
    const double base  = head < n2 ? std::pow(2.0, -a.max_bias / n2) : std::pow(2.0, -a.max_bias / 2 / n2);
    const double slope = a.max_bias > 0 ? std::pow(base, head < n2 ? head + 1 : 2 * (head - n2) + 1) : 1.0;
    const int kv       = head / (a.n_head / a.n_head_kv);
    double total = a.sinks ? std::exp((double) sinks[head]) : 0.0;  // scores are small: no maximum needed
    std::vector<double> out(a.values());
    for (int c = 0; c < n_kv; ++c) {
        if (mask[c] == -INFINITY) {
            continue;
        }
        double score = 0;
        for (int i = 0; i < a.d; ++i) {
            score += (double) q[i] * k[((size_t) kv * n_kv + c) * a.d + i];
        }
        score /= std::sqrt((double) a.d);
        score          = (a.softcap > 0 ? a.softcap * std::tanh(score / a.softcap) : score) + slope * mask[c];
        const double p = std::exp(score);
        total += p;
        for (int i = 0; i < a.values(); ++i) {
            out[i] += p * v[((size_t) kv * n_kv + c) * a.values() + i];
        }
    }
    for (double & x : out) {
        x /= total;
    }
    return out;
}

// x as a cache of this type holds it, and what it then is
std::vector<uint8_t> stored(ggml_type type, std::vector<float> & x, int d) {
    std::vector<uint8_t> out(ggml_row_size(type, (int64_t) x.size()));
    ggml_quantize_chunk(type, x.data(), out.data(), 0, (int64_t) x.size() / d, d, nullptr);
    if (type != GGML_TYPE_F32) {
        ggml_get_type_traits(type)->to_float(out.data(), x.data(), (int64_t) x.size());
    }
    return out;
}

// Rows that see different cells: a prompt's, then some of their own; here and there a hidden one. Each row
// alone gives the bits that it gives among the others, and what a plain loop gives.
void check_attention(const attention & a) {
    const int n_rows           = a.n_rows;
    const int n_kv             = (a.n_seen + n_rows + 255) / 256 * 256;
    const size_t width         = (size_t) a.values() * a.n_head;
    const std::vector<float> q = random_floats((size_t) a.d * a.n_head * n_rows), s = random_floats(a.n_head);
    std::vector<float> k                = random_floats((size_t) a.d * a.n_head_kv * n_kv),
                       v                = random_floats((size_t) a.values() * a.n_head_kv * n_kv);
    const std::vector<uint8_t> k_stored = stored(a.cache, k, a.d), v_stored = stored(a.cache, v, a.values());
    std::vector<float> hidden((size_t) n_kv * n_rows, -INFINITY);
    for (int r = 0; r < n_rows; ++r) {
        for (int c = 0; c < (r < a.n_long ? a.n_seen : 20) + r; ++c) {
            const float seen              = a.max_bias > 0 ? (float) (c - a.n_seen - r) / 16 : 0.0f;
            const bool hide               = c > 0 && rng() % (c < a.n_seen ? 97 : 3) == 0;
            hidden[(size_t) r * n_kv + c] = hide ? -INFINITY : seen;
        }
    }
    const std::vector<ggml_fp16_t> mask = halves(hidden);
    ggml_fp16_to_fp32_row(mask.data(), hidden.data(), (int64_t) hidden.size());
    const int n_mask = a.head_masks ? a.n_head : 1;

    const auto attend = [&](int from, int n) {  // [values, n_head, n]
        return compute(
            [&](ggml_context * ctx) {
                auto input = [&](ggml_type type, const char * name, int x, int y, int z) {
                    return ggml_set_name(ggml_new_tensor_3d(ctx, type, x, y, z), name);
                };
                ggml_tensor * out = ggml_flash_attn_ext(ctx,
                    ggml_permute(ctx, input(GGML_TYPE_F32, "q", a.d, a.n_head, n), 0, 2, 1, 3),
                    input(a.cache, "k", a.d, n_kv, a.n_head_kv),
                    input(a.cache, "v", a.values(), n_kv, a.n_head_kv),
                    input(GGML_TYPE_F16, "mask", n_kv, n, n_mask), 1.0f / std::sqrt((float) a.d), a.max_bias,
                    a.softcap);
                if (a.sinks) {
                    ggml_flash_attn_ext_add_sinks(out, input(GGML_TYPE_F32, "sinks", a.n_head, 1, 1));
                }
                return out;
            },
            [&](ggml_context * ctx) {
                const auto set = [&](const char * name, const void * data) {
                    ggml_backend_tensor_set(
                        ggml_get_tensor(ctx, name), data, 0, ggml_nbytes(ggml_get_tensor(ctx, name)));
                };
                set("q", q.data() + (size_t) from * a.d * a.n_head);
                set("k", k_stored.data());
                set("v", v_stored.data());
                ggml_tensor * masks = ggml_get_tensor(ctx, "mask");
                for (int h = 0; h < n_mask; ++h) {
                    ggml_backend_tensor_set(
                        masks, mask.data() + (size_t) from * n_kv, h * masks->nb[2], masks->nb[2]);
                }
                if (a.sinks) {
                    set("sinks", s.data());
                }
            });
    };
    const std::vector<float> all = attend(0, n_rows);
    char what[64];
    std::snprintf(what, sizeof(what), "attention of %d, %d rows,", a.d, n_rows);
    // keys and values are exact here; kernels may round queries and sums to halves, and queries to Q8_0
    const double bound = ggml_is_quantized(a.cache) ? 1e-2 : 2e-3;
    for (int r = 0; r < n_rows; r += n_rows > 16 ? 7 : 1) {
        expect_same(attend(r, 1).data(), all.data() + r * width, width, what, ggml_type_name(a.cache), r);
        for (int h = 0; h < a.n_head; h += std::max(1, a.n_head / 3)) {
            const float * x                = all.data() + r * width + (size_t) h * a.values();
            const std::vector<double> want = attended(a, n_kv, q.data() + ((size_t) r * a.n_head + h) * a.d,
                k, v, hidden.data() + (size_t) r * n_kv, s, h);
            for (int i = 0; i < a.values(); ++i) {
                if (!(std::fabs(x[i] - want[i]) <= bound)) {
                    std::fprintf(stderr, "%s %s: row %d, head %d, value %d is %g, not %g\n", what,
                        ggml_type_name(a.cache), r, h, i, x[i], want[i]);
                    std::exit(1);
                }
            }
        }
    }
}

// Attention of few rows takes no more memory when the context grows.
void check_work(int n_rows, int n_head, int d) {
    const auto bytes = [&](int n_kv) {
        ggml_context_ptr ctx = context(16);
        const auto input     = [&](ggml_type type, int x, int y, int z) {
            return ggml_new_tensor_3d(ctx.get(), type, x, y, z);
        };
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(
            graph, ggml_flash_attn_ext(ctx.get(), input(GGML_TYPE_F32, d, n_rows, n_head),
                       input(GGML_TYPE_F16, d, n_kv, 1), input(GGML_TYPE_F16, d, n_kv, 1),
                       input(GGML_TYPE_F16, n_kv, n_rows, 1), 1.0f, 0.0f, 0.0f));
        return ggml_graph_plan(graph, 2, nullptr).work_size;
    };
    // what upstream's own kernels ask for does not depend on the context either
    const size_t most = bytes(512) + (8 << 20);
    for (const int n_kv : {4096, 131072, 1 << 20}) {
        if (bytes(n_kv) > most) {
            std::fprintf(stderr, "attention of %d rows over %d cells takes %zu bytes of work, at most %zu\n",
                n_rows, n_kv, bytes(n_kv), most);
            std::exit(1);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    rng.seed(argc > 1 ? std::atoi(argv[1]) : 1);
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
             GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
             GGML_TYPE_Q6_K}) {
        check_product(type, ggml_backend_cpu_buffer_type(), "product");
    }
    for (const char * layout : {"REPACK", "INTERLEAVED"}) {
        for (const ggml_type type : types_of(buffer_type(layout), K, M)) {
            check_product(type, buffer_type(layout), layout);
        }
    }
    for (const attention & a : std::initializer_list<attention>{
             {64, 9, 3, 700, 0.0f, 0.0f, false, 10},
             {64, 8, 1, 30, 0.0f, 0.0f, true, 10},
             {16, 4, 2, 520, 0.0f, 0.0f, true, 70},
             {80, 4, 4, 511, 8.0f, 0.0f, false, 10},
             {96, 4, 2, 520, 0.0f, 9.0f, true, 10},
             {128, 6, 2, 1, 0.0f, 0.0f, false, 10},
             {256, 2, 1, 130, 0.0f, 0.0f, false, 10},
             {64, 6, 2, 450, 0.0f, 0.0f, false, 100},
             {8, 2, 1, 3, 0.0f, 0.0f, false, 66},
             {40, 6, 2, 480, 4.0f, 5.0f, true, 70},
             {128, 4, 2, 440, 8.0f, 0.0f, false, 80},
             {256, 2, 1, 450, 0.0f, 30.0f, true, 70},
             {192, 2, 2, 40, 0.0f, 0.0f, false, 70, GGML_TYPE_F16, 128},
             {64, 2, 1, 480, 0.0f, 0.0f, false, 70, GGML_TYPE_F32},
             {72, 2, 1, 40, 0.0f, 0.0f, true, 70, GGML_TYPE_BF16},
             {64, 4, 2, 480, 0.0f, 0.0f, true, 70, GGML_TYPE_Q8_0},
             // more spans than the work buffer has places for, where rows are together
             {256, 32, 1, 4600, 0.0f, 0.0f, true, 64, GGML_TYPE_F16, 0, 1},
             {256, 32, 1, 2600, 0.0f, 0.0f, false, 64, GGML_TYPE_F16, 0, 2, true},
         }) {
        check_attention(a);
    }
    check_work(64, 64, 128);
    check_work(1, 64, 128);
    check_work(64, 8, 64);
    std::puts("ok");
}
