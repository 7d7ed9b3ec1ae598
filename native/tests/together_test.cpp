// Operations that native/kernels computes together have the bits that they have alone: norms with the
// addition before them, positions of queries and keys, and writes to the KV cache. What needs another's
// result, or its memory, waits for it.
#include "graphs.hpp"

#include <algorithm>
#include <cmath>

namespace {

struct input {
    ggml_tensor * t;
    std::vector<float> values;
};

// A graph whose memory the allocator gives to one node after the other, as in a decode.
struct graph_of {
    ggml_context_ptr ctx = context(64);
    ggml_cgraph * graph  = ggml_new_graph(ctx.get());
    ggml_gallocr_ptr memory{ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend()))};
    std::vector<input> inputs;

    ggml_tensor * in(const std::vector<float> & x, int64_t n0, int64_t n1 = 1, int64_t n2 = 1) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n0, n1, n2);
        ggml_set_input(t);
        inputs.push_back({t, x});
        return t;
    }
    ggml_tensor * ints(const std::vector<int32_t> & x) {
        ggml_tensor * t = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, (int64_t) x.size());
        ggml_set_input(t);
        inputs.push_back({t, std::vector<float>(x.size())});
        std::memcpy(inputs.back().values.data(), x.data(), x.size() * sizeof(int32_t));
        return t;
    }
    ggml_tensor * add(ggml_tensor * t, bool kept = true) {
        if (kept) {
            ggml_set_output(t);
        }
        ggml_build_forward_expand(graph, t);
        return t;
    }
    void run() {
        if (!ggml_gallocr_alloc_graph(memory.get(), graph)) {
            std::abort();
        }
        for (const input & i : inputs) {
            ggml_backend_tensor_set(i.t, i.values.data(), 0, i.values.size() * sizeof(float));
        }
        if (ggml_backend_graph_compute(backend(), graph) != GGML_STATUS_SUCCESS) {
            std::abort();
        }
    }
    static std::vector<float> values(ggml_tensor * t) {
        std::vector<float> y(ggml_nelements(t));
        ggml_backend_tensor_get(t, y.data(), 0, ggml_nbytes(t));
        return y;
    }
};

void expect(const std::vector<float> & got, const std::vector<float> & want, const char * what, int n) {
    if (got.size() != want.size()) {
        std::abort();
    }
    expect_same(got.data(), want.data(), got.size(), what, "together", n);
}

// -- norms

constexpr float EPS = 1e-5f;

// of n rows of `width` values, by factors w
std::vector<float> norm_of(const std::vector<float> & x, const std::vector<float> & w, int64_t width) {
    graph_of g;
    const auto n = (int64_t) x.size() / width;
    ggml_tensor * y =
        ggml_mul(g.ctx.get(), ggml_rms_norm(g.ctx.get(), g.in(x, width, n), EPS), g.in(w, width));
    g.add(y);
    g.run();
    return graph_of::values(y);
}

void check_norm(int64_t width, int64_t n, bool keep) {
    const size_t size          = (size_t) (width * n);
    const std::vector<float> a = random_floats(size), b = random_floats(size),
                             w = random_floats((size_t) width);
    std::vector<float> sum(size);
    std::transform(a.begin(), a.end(), b.begin(), sum.begin(), [](float x, float y) { return x + y; });
    const std::vector<float> want = norm_of(sum, w, width);
    for (int64_t row = 0; row < n; ++row) {
        const std::vector<float> alone =
            norm_of({sum.begin() + row * width, sum.begin() + (row + 1) * width}, w, width);
        expect_same(want.data() + row * width, alone.data(), (size_t) width, "norm", "a row alone", (int) n);
        double squares = 0;
        for (int64_t i = 0; i < width; ++i) {
            squares += (double) sum[row * width + i] * sum[row * width + i];
        }
        for (int64_t i = 0; i < width; ++i) {
            const double exact = sum[row * width + i] / std::sqrt(squares / (double) width + EPS) * w[i];
            if (std::fabs(alone[i] - exact) > 1e-5) {
                std::fprintf(stderr, "norm of %d: %g instead of %g\n", (int) width, alone[i], exact);
                std::exit(1);
            }
        }
    }
    // the addends are results of the graph, so that the allocator gives their memory to later nodes
    graph_of g;
    ggml_context * c  = g.ctx.get();
    ggml_tensor * one = g.add(ggml_scale(c, g.in(a, width, n), 1.0f), false);
    ggml_tensor * two = g.add(ggml_scale(c, g.in(b, width, n), 1.0f), false);
    ggml_tensor * s   = g.add(ggml_add(c, one, two), keep);
    ggml_tensor * y   = g.add(ggml_mul(c, ggml_rms_norm(c, s, EPS), g.in(w, width)));
    ggml_tensor * z   = g.add(ggml_add(c, y, s));
    g.run();
    expect(graph_of::values(y), want, "norm of a sum", (int) n);
    if (keep) {
        expect(graph_of::values(s), sum, "sum before a norm", (int) n);
    }
    std::transform(
        want.begin(), want.end(), sum.begin(), sum.begin(), [](float x, float t) { return x + t; });
    expect(graph_of::values(z), sum, "sum behind a norm", (int) n);
}

// A sum of rows and one row is left to upstream, as is a norm whose result something else needs.
void check_other_norms(int64_t n) {
    constexpr int64_t WIDTH    = 96;
    const std::vector<float> a = random_floats(WIDTH * n), row = random_floats(WIDTH),
                             w = random_floats(WIDTH);
    std::vector<float> sum     = a;
    for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += row[i % WIDTH];
    }
    graph_of g;
    ggml_context * c   = g.ctx.get();
    ggml_tensor * s    = g.add(ggml_add(c, g.in(a, WIDTH, n), g.in(row, WIDTH)), false);
    ggml_tensor * rms  = g.add(ggml_rms_norm(c, s, EPS));
    ggml_tensor * y    = g.add(ggml_mul(c, rms, g.in(w, WIDTH)));
    ggml_tensor * both = g.add(ggml_add(c, rms, y));
    g.run();
    const std::vector<float> want = norm_of(sum, w, WIDTH), got = graph_of::values(y),
                             r = graph_of::values(rms);
    std::vector<float> sums(got.size());
    for (size_t i = 0; i < got.size(); ++i) {
        if (std::fabs(got[i] - want[i]) > 1e-5f) {
            std::fprintf(stderr, "norm of a sum with one row: %g instead of %g\n", got[i], want[i]);
            std::exit(1);
        }
        sums[i] = r[i] + got[i];
    }
    expect(graph_of::values(both), sums, "a norm that is needed again", (int) n);
}

// -- positions

constexpr int64_t HEAD = 32;

ggml_tensor * rope(ggml_context * ctx, ggml_tensor * x, ggml_tensor * positions, bool in_place = false) {
    const auto make = in_place ? ggml_rope_ext_inplace : ggml_rope_ext;
    return make(ctx, x, positions, nullptr, HEAD, 0, 4096, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
}

std::vector<float> rope_of(const std::vector<float> & x, int64_t n_head, const std::vector<int32_t> & at) {
    graph_of g;
    ggml_tensor * y = rope(g.ctx.get(), g.in(x, HEAD, n_head, (int64_t) at.size()), g.ints(at));
    g.add(y);
    g.run();
    return graph_of::values(y);
}

void check_positions(int64_t n) {
    std::vector<int32_t> at(n);
    for (int64_t i = 0; i < n; ++i) {
        at[i] = (int32_t) (17 + 3 * i);
    }
    const std::vector<float> q = random_floats(HEAD * 6 * n), k = random_floats(HEAD * 2 * n);
    const std::vector<float> want_q = rope_of(q, 6, at), want_k = rope_of(k, 2, at);
    graph_of g;
    ggml_context * c  = g.ctx.get();
    ggml_tensor * pos = g.ints(at);
    ggml_tensor * y_q = g.add(rope(c, g.in(q, HEAD, 6, n), pos));
    ggml_tensor * y_k = g.add(rope(c, g.in(k, HEAD, 2, n), pos));
    ggml_tensor * z   = g.add(rope(c, y_k, pos));  // needs the one before
    // in the memory of what it turns: twice would be wrong
    ggml_tensor * copy  = g.add(ggml_scale(c, g.in(k, HEAD, 2, n), 1.0f), false);
    ggml_tensor * here  = g.add(rope(c, copy, pos, true));
    ggml_tensor * other = g.add(rope(c, g.in(q, HEAD, 6, n), pos));
    g.run();
    expect(graph_of::values(y_q), want_q, "positions of queries", (int) n);
    expect(graph_of::values(y_k), want_k, "positions of keys", (int) n);
    expect(graph_of::values(z), rope_of(want_k, 2, at), "positions twice", (int) n);
    expect(graph_of::values(here), want_k, "positions in place", (int) n);
    expect(graph_of::values(other), want_q, "positions of others", (int) n);
}

// -- writes to a cache

void check_writes(int64_t n) {
    constexpr int64_t WIDTH = 48, N_CELL = 20;
    std::vector<int32_t> cells(n);
    for (int64_t i = 0; i < n; ++i) {
        cells[i] = (int32_t) ((5 * i + 2) % N_CELL);
    }
    const std::vector<float> k = random_floats(WIDTH * n), v = random_floats(WIDTH * n),
                             again = random_floats(WIDTH * n);
    const std::vector<float> old_k = random_floats(WIDTH * N_CELL), old_v = random_floats(WIDTH * N_CELL);
    graph_of g;
    ggml_context * c      = g.ctx.get();
    ggml_tensor * cache_k = g.in(old_k, WIDTH, N_CELL);
    ggml_tensor * cache_v = g.in(old_v, WIDTH, N_CELL);
    ggml_tensor * at      = g.ints(cells);
    g.add(ggml_set_rows(c, cache_k, g.in(k, WIDTH, n), at));
    g.add(ggml_set_rows(c, cache_v, g.in(v, WIDTH, n), at));
    // the same cells once more: the last one counts
    ggml_tensor * last   = g.add(ggml_set_rows(c, cache_k, g.in(again, WIDTH, n), at));
    ggml_tensor * read_k = g.add(ggml_scale(c, last, 1.0f));
    ggml_tensor * read_v = g.add(ggml_scale(c, cache_v, 1.0f));
    g.run();
    const auto written = [&](std::vector<float> cache, const std::vector<float> & rows) {
        for (int64_t i = 0; i < n; ++i) {
            std::copy_n(rows.begin() + i * WIDTH, WIDTH, cache.begin() + cells[i] * WIDTH);
        }
        return cache;
    };
    expect(graph_of::values(read_k), written(old_k, again), "writes to the same cells", (int) n);
    expect(graph_of::values(read_v), written(old_v, v), "writes of values", (int) n);
}

}  // namespace

int main(int argc, char ** argv) {
    rng.seed(argc > 1 ? std::atoi(argv[1]) : 1);
    for (const int64_t n : {1, 2, 5, 9, 70}) {
        for (const int64_t width : {7, 64, 100, 576}) {
            check_norm(width, n, true);
            check_norm(width, n, false);
        }
        check_other_norms(n);
        check_positions(n);
        if (n <= 9) {
            check_writes(n);
        }
    }
    std::puts("ok");
}
