// Capture held against the graph, on a tiny random model of an architecture, as llama.cpp's own test makes it.
//     architectures check ARCH dense|moe    prints: n_layer, llama_decode's code, layers seen, layers equal, code without
//                                          capture, whether rows have the same bits alone and together (1, 0, or -1 if they cannot be decoded),
//                                          and the code of three sequences
//     architectures save ARCH FOLDER        writes its models there
//     architectures list
#include "eagle3.h"
#include "generator.hpp"

#include <map>
#include <set>

namespace {

constexpr int N_TOKENS = 24;

struct watcher {
    int n_embd = 0, n_layer = 0;
    const char * last = nullptr;  // what the model calls the stream after the last layer, if it renames it
    std::map<int, std::vector<float>> seen;  // by layer whose input it is
};

// The layer whose input a tensor of the graph is, -1 for others. Some models give the stream another name later.
int layer_of(const char * name) {
    for (const auto & [known, after] : {std::pair("l_out", 1), {"ffn_residual", 1}, {"nemotron_h_block_out", 1}, {"attn_norm_in", 0}, {"layer_inp", 0}}) {
        const size_t n = strlen(known);
        if (strncmp(name, known, n) == 0 && name[n] == '-' && name[n + 1] >= '0' && name[n + 1] <= '9') {
            char * end = nullptr;
            const int il = (int) strtol(name + n + 1, &end, 10);
            return *end == '\0' ? il + after : -1;
        }
    }
    return -1;
}

bool watch(ggml_tensor * t, bool ask, void * data) {
    watcher & w = *(watcher *) data;
    const int k = w.last && strcmp(t->name, w.last) == 0 ? w.n_layer : layer_of(t->name);
    if (k < 1) {
        return !ask;
    }
    if (!ask && t->type == GGML_TYPE_F32 && t->ne[0] == w.n_embd && ggml_is_contiguous(t)) {
        std::vector<float> & rows = w.seen[k];
        rows.resize(ggml_nelements(t));
        ggml_backend_tensor_get(t, rows.data(), 0, ggml_nbytes(t));
    }
    return true;
}

int decode(llama_context * ctx) {
    llama_batch batch = llama_batch_init(N_TOKENS, 0, 1);
    batch.n_tokens = N_TOKENS;
    for (int i = 0; i < N_TOKENS; ++i) {
        batch.token[i]     = 3 + 5 * i % 100;
        batch.pos[i]       = i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = true;
    }
    int code = llama_model_has_encoder(llama_get_model(ctx)) ? llama_encode(ctx, batch) : 0;
    code = code == 0 ? llama_decode(ctx, batch) : code;
    llama_batch_free(batch);
    return code;
}

// Logits of the last rows of a text, which are decoded one by one or together. Empty where that fails.
std::vector<float> last_rows(llama_context * ctx, bool together) {
    constexpr int N_PROMPT = 9, N_ROWS = 6;
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    llama_memory_clear(llama_get_memory(ctx), true);
    std::vector<float> out;
    llama_batch batch = llama_batch_init(N_PROMPT + N_ROWS, 0, 1);
    for (int from = 0, n = N_PROMPT; from < N_PROMPT + N_ROWS; from += n, n = together ? N_ROWS : 1) {
        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i]     = 3 + 7 * (from + i) % 100;
            batch.pos[i]       = from + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = true;
        }
        if (llama_decode(ctx, batch) != 0) {
            out.clear();
            break;
        }
        for (int i = 0; from > 0 && i < n; ++i) {
            const float * row = llama_get_logits_ith(ctx, i);
            out.insert(out.end(), row, row + n_vocab);
        }
    }
    llama_batch_free(batch);
    return out;
}

int rows_are_alike(llama_context * ctx) {
    if (!llama_get_memory(ctx)) {
        return -1;
    }
    const std::vector<float> alone = last_rows(ctx, false), together = last_rows(ctx, true);
    return alone.empty() || together.size() != alone.size() ? -1 : memcmp(alone.data(), together.data(), alone.size() * sizeof(float)) == 0;
}

// llama_decode's code for three sequences of different lengths in one batch. The context's batch size is no multiple
// of their number.
int three_sequences(llama_model * model, llama_context_params params) {
    params.n_seq_max = 3;
    llama_context_ptr ctx(llama_init_from_model(model, params));
    if (!ctx) {
        return -100;
    }
    llama_batch batch = llama_batch_init(6, 0, 1);
    for (int seq = 0; seq < 3; ++seq) {
        for (int pos = 0; pos <= seq; ++pos) {
            const int i        = batch.n_tokens++;
            batch.token[i]     = 3 + i;
            batch.pos[i]       = pos;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i]    = true;
        }
    }
    const int code = llama_decode(ctx.get(), batch);
    llama_batch_free(batch);
    return code;
}

int check(llm_arch arch, bool moe) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const llama_model_ptr made = generator::model(arch, moe);
    llama_model * model        = made.get();
    watcher w;
    w.n_embd  = llama_model_n_embd(model);
    w.n_layer = llama_model_n_layer(model);
    w.last    = arch == LLM_ARCH_T5 ? "result_embd" : arch == LLM_ARCH_STEP35 ? "h_nextn" : nullptr;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = params.n_ubatch = 64;
    params.n_threads = params.n_threads_batch = 1;
    params.cb_eval = watch;
    params.cb_eval_user_data = &w;
    llama_context_ptr ctx(llama_init_from_model(model, params));

    const int n_layer = w.n_layer;
    std::vector<int32_t> layers;
    for (int k = 1; k <= n_layer; ++k) {
        layers.push_back(k);
    }
    std::vector<float> features((size_t) N_TOKENS * n_layer * w.n_embd, NAN);
    std::set<int> equal;
    int code = eagle3_capture_set(ctx.get(), layers.data(), n_layer);
    code = code == EAGLE3_OK ? decode(ctx.get()) : code;
    if (code == 0) {
        code = eagle3_capture_get(ctx.get(), layers.data(), n_layer, N_TOKENS, features.data());
    }
    for (const auto & [k, rows] : w.seen) {
        bool same = rows.size() == (size_t) N_TOKENS * w.n_embd;
        for (size_t i = 0; same && i < rows.size(); ++i) {
            const float ours = features[((i / w.n_embd) * n_layer + k - 1) * w.n_embd + i % w.n_embd];
            same = ours == rows[i] && std::isfinite(ours);
        }
        if (same) {
            equal.insert(k);
        }
    }
    printf("%d\t%d\t", n_layer, code);
    for (const auto & s : w.seen) {
        printf("%d ", s.first);
    }
    printf("\t");
    for (const int k : equal) {
        printf("%d ", k);
    }
    eagle3_capture_set(ctx.get(), nullptr, 0);
    llama_memory_clear(llama_get_memory(ctx.get()), true);
    printf("\t%d", decode(ctx.get()));
    params.cb_eval = nullptr;
    ctx.reset(llama_init_from_model(model, params));
    const bool decodes = !llama_model_has_encoder(model);
    printf("\t%d", decodes ? rows_are_alike(ctx.get()) : -1);
    ctx.reset();
    printf("\t%d\n", decodes ? three_sequences(model, params) : 0);
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "list") {
        for (const llm_arch & arch : llm_arch_all()) {
            printf("%s\t%d\t%d\t%d\n", llm_arch_name(arch), (int) generator::makes(arch), (int) !moe_mandatory(arch), (int) moe_implemented(arch));
        }
        return 0;
    }
    if (what == "save" && argc == 4) {
        const std::string exact = std::string("^") + argv[2] + "$";
        char * args[] = {argv[0], (char *) "-a", (char *) exact.c_str(), (char *) "-s", (char *) "7", (char *) "-o", argv[3], nullptr};
        return upstream_main(7, args);
    }
    if (what == "check" && argc == 4) {
        return check(llm_arch_from_string(argv[2]), std::string(argv[3]) == "moe");
    }
    fprintf(stderr, "usage: architectures check ARCH dense|moe, save ARCH FOLDER, or list\n");
    return 2;
}
