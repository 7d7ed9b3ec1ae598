// Proves on this processor what a decode needs of the CPU backend: eagle3-proof [--stock]
//
// Products in each weight format, in each kind of buffer that a model's weights are put into (repacked,
// AMX's, plain): 1 to 64 rows against sums in double, and against each row alone, bit for bit. Then tiny
// generations of a random model. Says what it begins, a line each, and at the end "ok". It ends with 0 or
// with one of these, and on stderr says what differs. --stock: an unpatched library, whose rows need not be
// alike.
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "gguf.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

namespace {

constexpr int WRONG = 1, ROWS_DIFFER = 3, CANNOT = 4;  // native/proof.py has them too

bool stock = false;
std::mt19937 rng(1);

void begin(const std::string & step) {
    std::printf("%s\n", step.c_str());
    std::fflush(stdout);
}

[[noreturn]] void end(int code, const std::string & what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::fflush(stderr);
    _exit(code);  // no destructor hides the reason
}

std::vector<float> random_floats(size_t n, float size) {
    std::vector<float> out(n);
    for (float & x : out) {
        x = size * ((float) (rng() % 20001) / 10000.0f - 1.0f);
    }
    return out;
}

ggml_backend_dev_t cpu() {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return dev ? dev : (end(CANNOT, "ggml has no CPU backend"), nullptr);
}

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

constexpr int K = 768, M = 96, MOST_ROWS = 64;

const std::vector<float> & activations() {  // [MOST_ROWS, K]
    static const std::vector<float> x = random_floats((size_t) K * MOST_ROWS, 1.0f);
    return x;
}

struct matrix {
    ggml_type type;
    std::vector<uint8_t> bytes;  // M rows of K weights
    std::vector<double> sums;    // its products with the activations: [MOST_ROWS, M]
    std::vector<double> norms;   // of its rows
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
    for (int r = 0; r < MOST_ROWS; ++r) {
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
    ggml_tensor * y = ggml_mul_mat(ctx.get(), w, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, K, MOST_ROWS));
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
        return std::ldexp(1.0, -12);
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

void check_same(const float * a, const float * b, size_t n, int rows) {
    if (!stock && std::memcmp(a, b, n * sizeof(float)) != 0) {
        end(ROWS_DIFFER, "rows differ when " + std::to_string(rows) + " are computed together");
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
    for (int r = 0; r < MOST_ROWS; ++r) {
        const std::vector<float> y = multiply(weights, activations().data() + (size_t) r * K, 1);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    check_sums(w, alone);
    // llamafile's products in IQ4_NL, which only a matrix that cannot be repacked gets, sum in another order
    const bool alike = w.type != GGML_TYPE_IQ4_NL || buft != ggml_backend_dev_buffer_type(cpu());
    for (int rows : {2, 3, 4, 8, 16, 33, 64}) {
        const std::vector<float> y = multiply(weights, activations().data(), rows);
        check_sums(w, y);
        if (alike) {
            check_same(y.data(), alone.data(), y.size(), rows);
        }
    }
}

// A file in the temporary folder, gone at the end.
struct temporary {
    std::string path = (std::filesystem::temp_directory_path() / "eagle3-proof-XXXXXX").string();
    temporary() {
        const int fd = mkstemp(path.data());
        if (fd < 0) {
            end(CANNOT, "no file can be made at " + path);
        }
        close(fd);
    }
    ~temporary() { std::remove(path.c_str()); }
};

constexpr int N_EMBD = 256, N_LAYER = 2, N_VOCAB = 256, N_FF = 512;

// a llama of random weights, without a vocabulary
void write_model(const std::string & path, ggml_type type) {
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> file(gguf_init_empty(), gguf_free);
    gguf_set_val_str(file.get(), "general.architecture", "llama");
    gguf_set_val_str(file.get(), "tokenizer.ggml.model", "no_vocab");
    const std::map<const char *, int> sizes = {{"llama.block_count", N_LAYER}, {"llama.context_length", 128},
        {"llama.embedding_length", N_EMBD}, {"llama.feed_forward_length", N_FF},
        {"llama.vocab_size", N_VOCAB}, {"llama.attention.head_count", 4},
        {"llama.attention.head_count_kv", 2}};
    for (const auto & [key, value] : sizes) {
        gguf_set_val_u32(file.get(), key, (uint32_t) value);
    }
    gguf_set_val_f32(file.get(), "llama.attention.layer_norm_rms_epsilon", 1e-5f);

    ggml_context_ptr ctx(ggml_init({(size_t) 16 << 20, nullptr, false}));
    const auto add = [&](const std::string & name, ggml_type kind, int n, int rows) {
        ggml_tensor * t = rows > 0 ? ggml_new_tensor_2d(ctx.get(), kind, n, rows)
                                   : ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n);
        const std::vector<float> w =
            rows > 0 ? random_floats((size_t) n * rows, 0.2f) : std::vector<float>(n, 1.0f);
        if (rows > 0) {
            ggml_quantize_chunk(kind, w.data(), t->data, 0, rows, n, nullptr);
        } else {
            std::memcpy(t->data, w.data(), ggml_nbytes(t));
        }
        ggml_set_name(t, (name + ".weight").c_str());
        gguf_add_tensor(file.get(), t);
    };
    add("token_embd", type, N_EMBD, N_VOCAB);
    add("output", type, N_EMBD, N_VOCAB);
    add("output_norm", GGML_TYPE_F32, N_EMBD, 0);
    for (int i = 0; i < N_LAYER; ++i) {
        const std::string blk = "blk." + std::to_string(i) + ".";
        for (const char * name : {"attn_norm", "ffn_norm"}) {
            add(blk + name, GGML_TYPE_F32, N_EMBD, 0);
        }
        for (const char * name : {"attn_q", "attn_output"}) {
            add(blk + name, type, N_EMBD, N_EMBD);
        }
        for (const char * name : {"attn_k", "attn_v"}) {
            add(blk + name, type, N_EMBD, N_EMBD / 2);
        }
        for (const char * name : {"ffn_gate", "ffn_up"}) {
            add(blk + name, type, N_EMBD, N_FF);
        }
        add(blk + "ffn_down", type, N_FF, N_EMBD);
    }
    if (!gguf_write_to_file(file.get(), path.c_str(), false)) {
        end(CANNOT, path + " cannot be written");
    }
}

// logits [tokens, N_VOCAB]
std::vector<float> decode(llama_context * ctx, const std::vector<llama_token> & tokens, int pos) {
    llama_batch batch = llama_batch_init((int) tokens.size(), 0, 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = pos + (int) i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = 1;
    }
    batch.n_tokens   = (int) tokens.size();
    const int status = llama_decode(ctx, batch);
    llama_batch_free(batch);
    if (status != 0) {
        end(WRONG, "llama_decode returns " + std::to_string(status));
    }
    const float * y = llama_get_logits(ctx);
    return std::vector<float>(y, y + tokens.size() * N_VOCAB);
}

llama_token best(const std::vector<float> & logits) {
    return (llama_token) (std::max_element(logits.end() - N_VOCAB, logits.end()) - (logits.end() - N_VOCAB));
}

void check_near(const std::vector<float> & a, const std::vector<float> & b) {
    double size = 0, off = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        size += (double) a[i] * a[i];
        off += (double) (a[i] - b[i]) * (a[i] - b[i]);
    }
    if (!(size > 0) || !(off <= 0.0025 * size)) {  // 5% of the logits, root mean square
        end(WRONG,
            "logits differ: " + std::to_string(std::sqrt(off)) + " of " + std::to_string(std::sqrt(size)));
    }
}

void check_generation(ggml_type type) {
    begin(std::string("a generation in ") + ggml_type_name(type));
    const temporary file;
    write_model(file.path, type);
    ggml_backend_dev_t no_gpu[] = {nullptr};
    llama_model_params settings = llama_model_default_params();
    settings.devices            = no_gpu;
    settings.n_gpu_layers       = 0;
    std::unique_ptr<llama_model, void (*)(llama_model *)> model(
        llama_model_load_from_file(file.path.c_str(), settings), llama_model_free);
    llama_context_params p = llama_context_default_params();
    p.n_ctx = p.n_batch = 128;
    p.n_threads = p.n_threads_batch = 2;
    std::unique_ptr<llama_context, void (*)(llama_context *)> ctx(
        model ? llama_init_from_model(model.get(), p) : nullptr, llama_free);
    if (!ctx) {
        end(WRONG, "the model cannot be loaded");
    }
    std::vector<llama_token> text(40);
    for (llama_token & t : text) {
        t = (llama_token) (rng() % N_VOCAB);
    }
    std::vector<float> alone;  // row by row, which goes on as a generation
    for (size_t i = 0; i < text.size(); ++i) {
        const std::vector<float> y = decode(ctx.get(), {text[i]}, (int) i);
        alone.insert(alone.end(), y.begin(), y.end());
        if (i + 1 == text.size() && text.size() < 56) {
            text.push_back(best(y));
        }
    }
    llama_memory_clear(llama_get_memory(ctx.get()), true);
    const std::vector<float> together = decode(ctx.get(), text, 0);
    check_near(alone, together);
    check_same(alone.data(), together.data(), alone.size(), (int) text.size());
}

bool computes(ggml_type type) {
    const ggml_type_traits * traits = ggml_get_type_traits(type);
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
           (traits->is_quantized && traits->to_float);
}

}  // namespace

int main(int argc, char ** argv) {
    stock = argc > 1 && std::strcmp(argv[1], "--stock") == 0;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all();
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
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K}) {
        check_generation(type);
    }
    begin("ok");
    return 0;
}
