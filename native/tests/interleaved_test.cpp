// Weights interleaved by columns: what is read back is what was written; a row's product has the same bits
// alone, in a prompt, in a batch of several matrices of activations, and among the rows that share an expert;
// and a product has the same bits alone, together with others of the same activations, and with the gate that
// makes these.
#include "graphs.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

constexpr int K = 768;
constexpr int M = 272;  // 17 groups of columns: each thread takes some together, and an odd one is left
constexpr int M_OF_EXPERT = 48;

struct matrix {
    ggml_context_ptr ctx = context(1);
    ggml_tensor * t      = nullptr;
    ggml_backend_buffer_ptr buffer;
    std::vector<uint8_t> bytes;

    // n_expert matrices of m columns, K weights long
    matrix(ggml_type type, int m, int n_expert) : bytes(ggml_row_size(type, K) * m * n_expert) {
        const std::vector<float> w = random_floats((size_t) K * m * n_expert);
        ggml_quantize_chunk(type, w.data(), bytes.data(), 0, (int64_t) m * n_expert, K, nullptr);
        t = n_expert == 1 ? ggml_new_tensor_2d(ctx.get(), type, K, m)
                          : ggml_new_tensor_3d(ctx.get(), type, K, m, n_expert);
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buffer_type("INTERLEAVED")));
        ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
    }
};

void expect(bool right, const char * what, ggml_type type) {
    if (!right) {
        std::fprintf(stderr, "%s: %s\n", ggml_type_name(type), what);
        std::exit(1);
    }
}

void check_bytes(ggml_type type) {
    const matrix m(type, M_OF_EXPERT, 3);
    std::vector<uint8_t> all(m.bytes.size());
    ggml_backend_tensor_get(m.t, all.data(), 0, all.size());
    expect(all == m.bytes, "reads back other bytes than were written", type);
    const size_t block = ggml_type_size(type);
    for (int i = 0; i < 50; ++i) {
        const size_t n_block = all.size() / block, from = rng() % n_block,
                     to = from + 1 + rng() % (n_block - from);
        std::vector<uint8_t> part((to - from) * block);
        ggml_backend_tensor_get(m.t, part.data(), from * block, part.size());
        expect(std::equal(part.begin(), part.end(), m.bytes.begin() + (long) (from * block)),
            "reads back other bytes in parts", type);
        for (uint8_t & b : part) {
            b ^= 0xff;
        }
        ggml_backend_tensor_set(m.t, part.data(), from * block, part.size());
        std::copy(part.begin(), part.end(), all.begin() + (long) (from * block));
        ggml_backend_tensor_set(m.t, m.bytes.data() + from * block, from * block, part.size());
    }
    ggml_backend_tensor_get(m.t, all.data(), 0, all.size());
    expect(all == m.bytes, "parts that were written and written back left a trace", type);
}

// [columns, rows...] of activations x with this shape
std::vector<float> product(const matrix & m, const float * x, int n, int n2 = 1, int n3 = 1) {
    return compute(
        [&](ggml_context * ctx) {
            return ggml_mul_mat(
                ctx, m.t, ggml_set_name(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, K, n, n2, n3), "x"));
        },
        [&](ggml_context * ctx) {
            ggml_tensor * t = ggml_get_tensor(ctx, "x");
            ggml_backend_tensor_set(t, x, 0, ggml_nbytes(t));
        });
}

void check_rows(ggml_type type) {
    constexpr int N = 150;
    const matrix m(type, M, 1);
    const std::vector<float> x = random_floats((size_t) K * N);
    std::vector<float> alone;
    for (int i = 0; i < N; ++i) {
        const std::vector<float> y = product(m, x.data() + (size_t) i * K, 1);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    expect_exact(type, m.bytes, x, alone, K, M, "interleaved");
    for (int n = 1; n <= N; n += n < 40 ? 1 : 11) {
        expect_same(product(m, x.data(), n).data(), alone.data(), (size_t) n * M, "interleaved",
            ggml_type_name(type), n);
    }
    expect_same(product(m, x.data(), 5, 3, 2).data(), alone.data(), (size_t) 30 * M, "batches",
        ggml_type_name(type), 5);
}

// The products a, b and c of x, and the sums of a's squares: once all is kept, so that they are computed
// together, and once the allocator gives a's memory to b, so that b must wait until the sums are there.
void check_together(ggml_type type, ggml_type other, int n, bool keep) {
    const matrix a(type, M, 1), b(other, M, 1), c(type, M_OF_EXPERT, 1);
    const std::vector<float> x = random_floats((size_t) K * n);
    ggml_context_ptr ctx       = context(16);
    ggml_tensor * in           = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, K, n);
    ggml_set_input(in);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    const auto add      = [&](ggml_tensor * t, bool kept) {
        if (kept) {
            ggml_set_output(t);
        }
        ggml_build_forward_expand(graph, t);
        return t;
    };
    ggml_tensor * y_a  = add(ggml_mul_mat(ctx.get(), a.t, in), keep);
    ggml_tensor * sums = add(ggml_sum_rows(ctx.get(), add(ggml_sqr(ctx.get(), y_a), false)), true);
    ggml_tensor * y_b  = add(ggml_mul_mat(ctx.get(), b.t, in), true);
    ggml_tensor * y_c  = add(ggml_mul_mat(ctx.get(), c.t, in), true);
    ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend())));
    expect(ggml_gallocr_alloc_graph(memory.get(), graph), "no memory", type);
    expect(keep || y_a->data == y_b->data, "the allocator gave b other memory: this shows nothing", type);
    ggml_backend_tensor_set(in, x.data(), 0, x.size() * sizeof(float));
    expect(ggml_backend_graph_compute(backend(), graph) == GGML_STATUS_SUCCESS, "does not compute", type);

    const auto same = [&](ggml_tensor * t, const std::vector<float> & want) {
        std::vector<float> got(ggml_nelements(t));
        ggml_backend_tensor_get(t, got.data(), 0, ggml_nbytes(t));
        expect_same(got.data(), want.data(), want.size(), "together", ggml_type_name(type), n);
    };
    std::vector<float> squares = product(a, x.data(), n);
    if (keep) {
        same(y_a, squares);
    }
    same(y_b, product(b, x.data(), n));
    same(y_c, product(c, x.data(), n));
    for (float & v : squares) {
        v *= v;
    }
    std::vector<float> got(n);
    ggml_backend_tensor_get(sums, got.data(), 0, ggml_nbytes(sums));
    for (int r = 0; r < n; ++r) {
        const double sum = std::accumulate(squares.begin() + r * M, squares.begin() + (r + 1) * M, 0.0);
        expect(std::fabs(got[r] - sum) <= 1e-4 * sum, "sums are of other rows", type);
    }
}

// A product of what a gate makes, where only the product needs it and where it is kept: the same bits.
enum class gate { OF_TWO, OF_HALVES, OF_SWAPPED_HALVES };
void check_gate(ggml_type type, int n, gate kind, bool kept) {
    const matrix m(type, M, 1);
    const std::vector<float> x = random_floats((size_t) 2 * K * n), z = random_floats((size_t) K * n);
    const int width         = kind == gate::OF_TWO ? K : 2 * K;
    ggml_tensor * of_values = nullptr;  // the gate's node
    const auto make         = [&](ggml_context * ctx) {
        ggml_tensor * a = ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, n), "x");
        of_values =
            kind == gate::OF_TWO
                ? ggml_swiglu_split(ctx, a, ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, K, n), "z"))
                : ggml_glu(ctx, a, GGML_GLU_OP_SWIGLU, kind == gate::OF_SWAPPED_HALVES);
        return of_values;
    };
    const auto fill = [&](ggml_context * ctx) {
        ggml_backend_tensor_set(ggml_get_tensor(ctx, "x"), x.data(), 0, sizeof(float) * width * n);
        if (kind == gate::OF_TWO) {
            ggml_backend_tensor_set(ggml_get_tensor(ctx, "z"), z.data(), 0, sizeof(float) * K * n);
        }
    };
    const std::vector<float> values = compute(make, fill);
    const std::vector<float> got    = compute(
        [&](ggml_context * ctx) {
            ggml_tensor * t = make(ctx);
            if (kept) {
                ggml_set_output(t);
            }
            return ggml_mul_mat(ctx, m.t, t);
        },
        [&](ggml_context * ctx) {
            fill(ctx);
            const std::vector<float> none((size_t) K * n, NAN);
            ggml_backend_tensor_set(of_values, none.data(), 0, none.size() * sizeof(float));
        },
        [&](ggml_context *) {
            std::vector<float> left((size_t) K * n);
            ggml_backend_tensor_get(of_values, left.data(), 0, left.size() * sizeof(float));
            if (kept) {
                expect_same(left.data(), values.data(), left.size(), "gate", ggml_type_name(type), n);
            } else {
                expect(std::isnan(left.front()), "the gate was computed by itself: this shows nothing", type);
            }
        });
    expect_same(got.data(), product(m, values.data(), n).data(), got.size(), "product of a gate",
        ggml_type_name(type), n);
}

void check_experts(ggml_type type, int n_token, int n_used, bool own_rows) {
    constexpr int N_EXPERT = 5;
    const matrix all(type, M_OF_EXPERT, N_EXPERT);
    const int n_x              = own_rows ? n_used : 1;
    const std::vector<float> x = random_floats((size_t) K * n_x * n_token);
    std::vector<int32_t> ids;
    for (int i = 0; i < n_token; ++i) {
        std::vector<int32_t> order = {0, 1, 2, 3, 4};
        std::shuffle(order.begin(), order.end(), rng);
        ids.insert(ids.end(), order.begin(), order.begin() + n_used);
    }
    const std::vector<float> y = compute(
        [&](ggml_context * ctx) {
            return ggml_mul_mat_id(ctx, all.t,
                ggml_set_name(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, K, n_x, n_token), "x"),
                ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_token), "ids"));
        },
        [&](ggml_context * ctx) {
            ggml_backend_tensor_set(ggml_get_tensor(ctx, "x"), x.data(), 0, x.size() * sizeof(float));
            ggml_backend_tensor_set(ggml_get_tensor(ctx, "ids"), ids.data(), 0, ids.size() * sizeof(int32_t));
        });
    matrix one(type, M_OF_EXPERT, 1);
    const size_t size = one.bytes.size();
    for (int token = 0; token < n_token; ++token) {
        for (int i = 0; i < n_used; ++i) {
            const int at = token * n_used + i;
            ggml_backend_tensor_set(one.t, all.bytes.data() + (size_t) ids[at] * size, 0, size);
            const std::vector<float> want = product(one, x.data() + (size_t) K * (token * n_x + i % n_x), 1);
            expect_same(y.data() + (size_t) at * M_OF_EXPERT, want.data(), M_OF_EXPERT, "experts",
                ggml_type_name(type), n_token);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    rng.seed(argc > 1 ? std::atoi(argv[1]) : 1);
    if (!buffer_type("INTERLEAVED")) {
        std::puts("ok: this build interleaves no weights");
        return 0;
    }
    const std::vector<ggml_type> types = types_of(buffer_type("INTERLEAVED"), K, M);
    for (const ggml_type type : types) {
        check_bytes(type);
        check_rows(type);
        for (const int n : {1, 5, 70}) {
            check_together(type, type, n, true);
            check_together(type, types.front(), n, false);
        }
        for (const int n : {1, 6, 40}) {
            for (const gate kind : {gate::OF_TWO, gate::OF_HALVES, gate::OF_SWAPPED_HALVES}) {
                check_gate(type, n, kind, n == 6);
                check_gate(type, n, kind, false);
            }
        }
        check_experts(type, 1, 2, false);
        check_experts(type, 40, 3, true);
    }
    // both are rounded by blocks of 256
    check_together(GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, 3, true);
    check_together(GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, 3, false);
    expect(types.size() >= 10, "fewer than ten formats have products", GGML_TYPE_F32);
    std::puts("ok");
}
