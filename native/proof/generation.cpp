// Tiny generations of a random llama: row by row, and the same text in one batch.
#include "proof.hpp"

#include "ggml-cpp.h"
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

#ifdef _WIN32
#include <process.h>
#else
#include <unistd.h>
#endif

namespace {

// A file in the temporary folder, gone at the end.
struct temporary {
#ifdef _WIN32  // each user has a folder; ggml opens UTF-8 names, which mkstemp does not take
    std::string path =
        (std::filesystem::temp_directory_path() / "eagle3-proof-").u8string() + std::to_string(_getpid());
#else
    std::string path = (std::filesystem::temp_directory_path() / "eagle3-proof-XXXXXX").string();
    temporary() {
        const int fd = mkstemp(path.data());
        if (fd < 0) {
            end(CANNOT, "no file can be made at " + path);
        }
        close(fd);
    }
#endif
    ~temporary() {
        std::error_code ignored;
        std::filesystem::remove(std::filesystem::u8path(path), ignored);
    }
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

}  // namespace

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
    const size_t n = few ? 8 : 56;
    std::vector<llama_token> text(n / 4 * 3);
    for (llama_token & t : text) {
        t = (llama_token) (rng() % N_VOCAB);
    }
    std::vector<float> alone;  // row by row, which goes on as a generation
    for (size_t i = 0; i < text.size(); ++i) {
        const std::vector<float> y = decode(ctx.get(), {text[i]}, (int) i);
        alone.insert(alone.end(), y.begin(), y.end());
        if (i + 1 == text.size() && text.size() < n) {
            text.push_back(best(y));
        }
    }
    llama_memory_clear(llama_get_memory(ctx.get()), true);
    const std::vector<float> together = decode(ctx.get(), text, 0);
    check_near(alone, together);
    check_same(alone.data(), together.data(), alone.size(), (int) text.size());
}
