// Products of quantised matrices in AMX's layout: amx_test SEED. Exits with 77 where there is no AMX.
//
// Rows alone and together, bit for bit, and against plain loops; several batches and several matrices;
// nothing is written behind a result, nor read from it before; tiles that somebody else has configured in
// this thread.
#include "graphs.hpp"

#include <cstdint>
#include <initializer_list>

#if defined(__x86_64__) && defined(__GNUC__)

namespace {

constexpr float JUNK = 1e30f;  // in a result's memory before it is computed, and behind it

struct tile_configuration {
    uint8_t bytes[64] = {};
};

// what oneDNN might leave behind: other tiles than a product of ours needs
void configure_other_tiles() {
    alignas(64) tile_configuration c;
    c.bytes[0]  = 1;  // palette
    c.bytes[16] = 4;  // tile 0: one row of four bytes
    c.bytes[48] = 1;
    asm volatile("ldtilecfg %0" ::"m"(c));
}

void release_tiles() {
    asm volatile("tilerelease");
}

bool tiles_are_released() {
    alignas(64) tile_configuration c;
    asm volatile("sttilecfg %0" : "=m"(c));
    for (const uint8_t byte : c.bytes) {
        if (byte) {
            return false;
        }
    }
    return true;
}

// matrices [k, m, n_matrices] in a buffer of one type; q are the rows as they were quantised
struct weights {
    int k, m, n_matrices;
    ggml_type type;
    std::vector<uint8_t> q;
    ggml_context_ptr ctx = context(1);
    ggml_backend_buffer_ptr buffer;
    ggml_tensor * tensor;

    weights(ggml_type type, int k, int m, int n, const std::vector<uint8_t> & q)
        : k(k), m(m), n_matrices(n), type(type), q(q) {
        tensor = ggml_new_tensor_3d(ctx.get(), type, k, m, n);
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buffer_type("AMX")));
        ggml_backend_tensor_set(tensor, q.data(), 0, q.size());
    }

    std::vector<uint8_t> matrix(int i) const {
        const size_t size = q.size() / n_matrices;
        return {q.begin() + (ptrdiff_t) (i * size), q.begin() + (ptrdiff_t) ((i + 1) * size)};
    }
};

std::vector<uint8_t> quantised(ggml_type type, int k, int rows) {
    const std::vector<float> w = random_floats((size_t) k * rows);
    std::vector<uint8_t> q(ggml_row_size(type, k) * rows);
    ggml_quantize_chunk(type, w.data(), q.data(), 0, rows, k, nullptr);
    return q;
}

// x [k, n, batches] times the weights; the memory of the result and behind it is full of junk. permuted: x is
// [k, batches, n], and its batches are turned over.
std::vector<float> product(const weights & w, const float * x, int n, int batches, bool permuted = false) {
    ggml_context_ptr ctx = context(5);
    ggml_tensor * in =
        ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w.k, permuted ? batches : n, permuted ? n : batches);
    ggml_tensor * seen = permuted ? ggml_permute(ctx.get(), in, 0, 2, 1, 3) : in;
    ggml_tensor * out  = ggml_mul_mat(ctx.get(), w.tensor, seen);
    if (!ggml_backend_supports_op(backend(), out)) {
        std::fprintf(stderr, "%s: a product of %s rows is refused\n", ggml_type_name(w.type),
            permuted ? "permuted" : "contiguous");
        std::exit(1);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    const size_t size = ggml_nelements(out), guard = size + 4096;
    ggml_tensor * behind = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, (int64_t) (size + guard));

    ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_buffer(backend(), ggml_nbytes(in) + ggml_nbytes(behind) + 4096));
    char * base        = (char *) ggml_backend_buffer_get_base(buffer.get());
    const size_t align = ggml_backend_buffer_get_alignment(buffer.get());
    char * result      = base + (ggml_nbytes(in) + align - 1) / align * align;
    ggml_backend_tensor_alloc(buffer.get(), in, base);
    if (permuted) {
        ggml_backend_view_init(seen);
    }
    ggml_backend_tensor_alloc(buffer.get(), out, result);
    ggml_backend_tensor_alloc(buffer.get(), behind, result);
    std::vector<float> all(size + guard, JUNK);
    ggml_backend_tensor_set(behind, all.data(), 0, ggml_nbytes(behind));
    ggml_backend_tensor_set(in, x, 0, ggml_nbytes(in));
    if (ggml_backend_graph_compute(backend(), graph) != GGML_STATUS_SUCCESS) {
        std::abort();
    }
    ggml_backend_tensor_get(behind, all.data(), 0, ggml_nbytes(behind));
    for (size_t i = size; i < all.size(); ++i) {
        if (all[i] != JUNK) {
            std::fprintf(stderr, "%s: %zu floats behind a result of [%d, %d, %d] are overwritten\n",
                ggml_type_name(w.type), i - size + 1, w.m, n, batches);
            std::exit(1);
        }
    }
    all.resize(size);
    return all;
}

// rows of one matrix, each alone
std::vector<float> one_by_one(const weights & w, const std::vector<float> & x) {
    std::vector<float> out;
    for (size_t r = 0; r < x.size() / w.k; ++r) {
        const std::vector<float> y = product(w, x.data() + r * w.k, 1, 1);
        out.insert(out.end(), y.begin(), y.end());
    }
    return out;
}

void check_rows(ggml_type type, int k, int m) {
    const weights w(type, k, m, 1, quantised(type, k, m));
    const std::vector<float> x     = random_floats((size_t) k * 130);
    const std::vector<float> alone = one_by_one(w, x);
    expect_exact(type, w.q, x, alone, k, m, "one row");
    for (const int n : {2, 3, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 96, 127, 128, 129, 130}) {
        expect_same(
            product(w, x.data(), n, 1).data(), alone.data(), (size_t) n * m, "rows", ggml_type_name(type), n);
    }
}

// batches of n rows times matrices, of which each serves as many batches: what each matrix alone gives
void check_batches(ggml_type type, int k, int m, int n_matrices, int n, int batches) {
    const weights w(type, k, m, n_matrices, quantised(type, k, m * n_matrices));
    const std::vector<float> x   = random_floats((size_t) k * n * batches);
    const std::vector<float> all = product(w, x.data(), n, batches);
    for (int b = 0; b < batches; ++b) {
        const weights single(type, k, m, 1, w.matrix(b / (batches / n_matrices)));
        const size_t size            = (size_t) n * m;
        const std::vector<float> own = product(single, x.data() + (size_t) b * n * k, n, 1);
        expect_same(all.data() + b * size, own.data(), size, "batches", ggml_type_name(type), n);
    }
}

// Activations that are permuted, as those of a model with MLA, give what contiguous ones give.
void check_permuted(ggml_type type, int k, int m, int n, int batches) {
    const weights w(type, k, m, batches, quantised(type, k, m * batches));
    const std::vector<float> x = random_floats((size_t) k * n * batches);
    std::vector<float> turned;
    for (int r = 0; r < n; ++r) {
        for (int b = 0; b < batches; ++b) {
            const auto from = x.begin() + (ptrdiff_t) (b * n + r) * k;
            turned.insert(turned.end(), from, from + k);
        }
    }
    const std::vector<float> want = product(w, x.data(), n, batches);
    expect_same(product(w, turned.data(), n, batches, true).data(), want.data(), want.size(), "permuted rows",
        ggml_type_name(type), n);
}

// this thread computes a part of each product, so its tiles matter
void check_tiles_of_others(ggml_type type) {
    const int k = 512, m = 64;
    const weights w(type, k, m, 1, quantised(type, k, m));
    const std::vector<float> x = random_floats((size_t) k * 40), want = product(w, x.data(), 40, 1);
    for (int i = 0; i < 4; ++i) {
        i % 2 ? release_tiles() : configure_other_tiles();
        expect_same(product(w, x.data(), 40, 1).data(), want.data(), want.size(), "others' tiles",
            ggml_type_name(type), 40);
        if (!tiles_are_released()) {
            std::fprintf(stderr, "a product leaves its tiles behind\n");
            std::exit(1);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    rng.seed(argc > 1 ? std::atoi(argv[1]) : 1);
    if (!buffer_type("AMX")) {
        std::puts("no AMX");
        return 77;
    }
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K,
             GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS}) {
        check_rows(type, 512, 96);
        check_rows(type, 256, 32);
        for (const int n : {1, 5, 33}) {
            check_batches(type, 256, 64, 1, n, 3);
            check_batches(type, 256, 96, 4, n, 4);
            check_batches(type, 256, 32, 2, n, 6);
            check_permuted(type, 256, 64, n, 4);
        }
        check_tiles_of_others(type);
    }
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0}) {
        check_rows(type, 32, 64);
    }
    for (const int n : {1, 5, 33}) {
        check_batches(GGML_TYPE_F16, 256, 64, 1, n, 3);
        check_batches(GGML_TYPE_F16, 256, 32, 2, n, 6);
        check_permuted(GGML_TYPE_F16, 256, 64, n, 4);
    }
    std::puts("ok");
}

#else

int main() {
    std::puts("no AMX");
    return 77;
}

#endif
