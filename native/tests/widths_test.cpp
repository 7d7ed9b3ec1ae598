// Which numbers of rows a device computes alike: it prints the classes of widths 1 to 64 for each format's
// product, for a gated pair of products, and for attention. Two widths are alike if the rows that both have
// are the same bits.
//
//     widths_test [N_IN N_OUT [LIBRARY ENDPOINT]]
//
// It tries every device that ggml has. LIBRARY and ENDPOINT add the one of tests/kit/rpc_device.py. On the
// CPU and on that one all widths have to be one class, as the text is plain decoding's only so.
#include "check.hpp"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

static constexpr int MOST = 64;

using rows_of = std::vector<std::vector<uint8_t>>;  // the bytes of each row

// Makes a graph of n rows from inputs, and its result, whose last dimension that is not 1 is the rows'.
using graph_of_rows =
    std::function<ggml_tensor *(ggml_context * ctx, int n, std::vector<ggml_tensor *> & inputs)>;
using fill = std::function<void(std::vector<ggml_tensor *> & inputs)>;

static std::vector<float> noise(size_t n, unsigned seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<float> out(n);
    for (float & x : out) {
        x = normal(rng);
    }
    return out;
}

static void set(ggml_tensor * t, const std::vector<float> & data) {
    const size_t n = ggml_nelements(t);
    CHECK(data.size() >= n);
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
        return;
    }
    std::vector<uint8_t> bytes(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, data.data(), bytes.data(), 0, n / t->ne[0], t->ne[0], nullptr);
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

// Returns the n rows of the result; empty if the device does not compute such a graph.
static rows_of computed(ggml_backend_t backend, const graph_of_rows & make, const fill & give, int n) {
    const ggml_context_ptr ctx(
        ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    std::vector<ggml_tensor *> inputs;
    ggml_tensor * result = make(ctx.get(), n, inputs);
    ggml_cgraph * graph  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, i))) {
            return {};
        }
    }
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    CHECK(buffer != nullptr);
    give(inputs);
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
    std::vector<uint8_t> bytes(ggml_nbytes(result));
    ggml_backend_tensor_get(result, bytes.data(), 0, bytes.size());
    const size_t size = bytes.size() / n;
    rows_of rows;
    for (int i = 0; i < n; ++i) {
        rows.emplace_back(bytes.begin() + i * size, bytes.begin() + (i + 1) * size);
    }
    return rows;
}

// As "3-5,7".
static std::string ranges(const std::vector<int> & widths) {
    std::string out;
    for (size_t i = 0, end; i < widths.size(); i = end) {
        for (end = i + 1; end < widths.size() && widths[end] == widths[end - 1] + 1;) {
            ++end;
        }
        out += (out.empty() ? "" : ",") + std::to_string(widths[i]);
        out += end - i > 1 ? "-" + std::to_string(widths[end - 1]) : "";
    }
    return out;
}

static bool alike(const rows_of & a, const rows_of & b) {
    return std::equal(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin());
}

// Prints the classes, and returns their number: 0 where the device does not compute this.
static int classes(
    ggml_backend_t backend, const std::string & what, const graph_of_rows & make, const fill & give) {
    std::vector<rows_of> seen;  // the widest rows of each class
    std::vector<std::vector<int>> widths;
    for (int n = 1; n <= MOST; ++n) {
        rows_of rows = computed(backend, make, give, n);
        if (rows.empty()) {
            fprintf(stderr, "%s, %s: not computed there\n", ggml_backend_name(backend), what.c_str());
            return 0;
        }
        size_t i = 0;
        while (i < seen.size() && !alike(seen[i], rows)) {
            ++i;
        }
        if (i == seen.size()) {
            seen.emplace_back();
            widths.emplace_back();
        }
        seen[i] = std::move(rows);
        widths[i].push_back(n);
    }
    std::string line;
    for (const std::vector<int> & w : widths) {
        line += (line.empty() ? "" : " | ") + ranges(w);
    }
    fprintf(stderr, "%s, %s: %s\n", ggml_backend_name(backend), what.c_str(), line.c_str());
    return (int) seen.size();
}

static graph_of_rows product(ggml_type type, int n_in, int n_out, bool gated) {
    return [=](ggml_context * ctx, int n, std::vector<ggml_tensor *> & inputs) {
        ggml_tensor * w = ggml_new_tensor_2d(ctx, type, n_in, n_out);
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, n);
        inputs          = {w, x};
        if (!gated) {
            return ggml_mul_mat(ctx, w, x);
        }
        ggml_tensor * up = ggml_new_tensor_2d(ctx, type, n_in, n_out);
        inputs.push_back(up);
        return ggml_swiglu_split(ctx, ggml_mul_mat(ctx, w, x), ggml_mul_mat(ctx, up, x));
    };
}

// Rows of four times as many heads as there are of keys; row i sees CELLS - MOST + i cells.
static graph_of_rows attention(int n_head_size) {
    constexpr int CELLS = 256, N_KV = 2;
    return [=](ggml_context * ctx, int n, std::vector<ggml_tensor *> & inputs) {
        ggml_tensor * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_head_size, n, 4 * N_KV);
        ggml_tensor * k    = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, n_head_size, CELLS, N_KV);
        ggml_tensor * v    = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, n_head_size, CELLS, N_KV);
        ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, CELLS, n);
        inputs             = {q, k, v, mask};
        const float scale  = 1.0f / std::sqrt((float) n_head_size);
        return ggml_flash_attn_ext(ctx, q, k, v, mask, scale, 0.0f, 0.0f);
    };
}

static void give_product(std::vector<ggml_tensor *> & inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) {
        set(inputs[i], noise(ggml_nelements(inputs[i]), (unsigned) i));
    }
}

static void give_attention(std::vector<ggml_tensor *> & inputs) {
    ggml_tensor *q = inputs[0], *mask = inputs[3];
    const int64_t d = q->ne[0], n = q->ne[1], n_head = q->ne[2], cells = mask->ne[0];
    const std::vector<float> all = noise(d * MOST * n_head, 9);  // a row has the same numbers in each width
    std::vector<float> given;
    for (int64_t h = 0; h < n_head; ++h) {
        given.insert(given.end(), all.begin() + h * MOST * d, all.begin() + (h * MOST + n) * d);
    }
    set(q, given);
    set(inputs[1], noise(ggml_nelements(inputs[1]), 10));
    set(inputs[2], noise(ggml_nelements(inputs[2]), 11));
    std::vector<float> hidden;
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < cells; ++c) {
            hidden.push_back(c < cells - MOST + i ? 0.0f : -INFINITY);
        }
    }
    set(mask, hidden);
}

static void try_device(ggml_backend_dev_t dev, bool must_be_one, int n_in, int n_out) {
    const ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    CHECK(backend != nullptr);
    const auto check = [&](int n) {
        CHECK(!must_be_one || n == 1);
    };
    for (const ggml_type type :
        {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
            GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
        for (const bool gated : {false, true}) {
            const std::string what = std::string(ggml_type_name(type)) + (gated ? ", gated" : "");
            check(classes(backend.get(), what, product(type, n_in, n_out, gated), give_product));
        }
    }
    for (const int size : {64, 128}) {
        const std::string what = "attention with heads of " + std::to_string(size);
        check(classes(backend.get(), what, attention(size), give_attention));
    }
}

int main(int argc, char ** argv) {
    const int n_in = argc > 2 ? atoi(argv[1]) : 512, n_out = argc > 2 ? atoi(argv[2]) : 32;
    ggml_backend_reg_t served = nullptr;
    if (argc > 4) {
        void * library = dlopen(argv[3], RTLD_NOW);
        CHECK(library != nullptr);
        const auto add = (ggml_backend_reg_t (*)(const char *)) dlsym(library, "counted_device_register");
        CHECK(add != nullptr);
        served = add(argv[4]);
        CHECK(served != nullptr);
    }
    ggml_backend_load_all();
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        const bool cpu         = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
        try_device(dev, cpu || ggml_backend_dev_backend_reg(dev) == served, n_in, n_out);
    }
    printf("ok\n");
    return 0;
}
