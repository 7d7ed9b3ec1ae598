// This reads a head's weights and geometry from a GGUF: architecture "eagle3" (upstream llama.cpp's keys and
// tensor names, and those written before its merge: eagle3.extract_layers, blk.0.hidden_norm) or "eagle"
// (EAGLE-1).
#pragma once

#include "error.hpp"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "llama.h"

#include <memory>
#include <string>
#include <vector>

namespace eagle3 {

struct rope_params {
    int n_dims        = 0;
    int n_ctx_orig    = 0;
    float freq_base   = 10000.0f;
    float freq_scale  = 1.0f;
    float ext_factor  = 0.0f;
    float attn_factor = 1.0f;
    float beta_fast   = 32.0f;
    float beta_slow   = 1.0f;
};

// This is a decoder layer. With hidden_norm it reads the token too: attention takes [attn_norm(e),
// hidden_norm(state)], else attn_norm(state), or the state itself if attn_norm is null. Biases, q_norm and
// k_norm may be null.
struct block {
    ggml_tensor *attn_norm = nullptr, *hidden_norm = nullptr;
    ggml_tensor *wq = nullptr, *wk = nullptr, *wv = nullptr, *wo = nullptr;
    ggml_tensor *bq = nullptr, *bk = nullptr, *bv = nullptr, *bo = nullptr;
    ggml_tensor *q_norm = nullptr, *k_norm = nullptr;
    ggml_tensor *ffn_norm = nullptr, *ffn_gate = nullptr, *ffn_up = nullptr, *ffn_down = nullptr;
    ggml_tensor *b_gate = nullptr, *b_up = nullptr, *b_down = nullptr;
};

struct head {
    const llama_model * target = nullptr;

    int n_embd = 0, n_embd_target = 0, n_vocab = 0, n_vocab_target = 0;
    int n_head = 0, n_head_kv = 0, n_embd_head = 0, n_ff = 0;
    float norm_eps = 1e-5f, feature_norm_eps = 0.0f;
    bool norm_before_residual = false;
    bool norm_output          = false;  // a draft's next step takes the state after the final norm
    rope_params rope;
    std::vector<int32_t> layers;  // ids of the captured target layers
    std::vector<int32_t> d2t;     // target id of each draft id

    // These make g of features, each step if its weights are there: fc_norm (one RMSNorm a layer,
    // [n_embd_target, layers]), input_norm (one over all), feature_norm (the target's own final norm), fc.
    ggml_tensor *fc_norm = nullptr, *input_norm = nullptr, *feature_norm = nullptr, *fc = nullptr,
                *fc_bias = nullptr;
    // These make the first layer's state of [e, g] (EAGLE-1, two projections); without them the state is g.
    ggml_tensor *embd_fc = nullptr, *embd_fc_bias = nullptr;
    std::vector<block> blocks;
    ggml_tensor * output_norm = nullptr;  // may be null
    ggml_tensor *tok_embd = nullptr, *output = nullptr,
                *rope_freqs = nullptr;  // the first two may be the target's own
    // d2t on the head's device, I32 [1, n_vocab], where this is not the CPU and has the tokens' embeddings
    // too: then the next token of a chain is looked up without the host.
    ggml_tensor * d2t_ids = nullptr;

    ggml_backend_dev_t device = nullptr;  // where the weights live
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer,
        matrices;  // matrices: those that lie otherwise than the rest; may be null
    ggml_context_ptr tables_ctx;
    ggml_backend_buffer_ptr tables;  // d2t_ids, and the target's embeddings once more; may be null

    size_t n_bytes() const {
        size_t n = 0;
        for (const auto * b : {&buffer, &matrices, &tables}) {
            n += *b ? ggml_backend_buffer_get_size(b->get()) : 0;
        }
        return n;
    }
    int n_features() const { return (int) layers.size() * n_embd_target; }
    int n_embd_kv() const { return n_head_kv * n_embd_head; }
};

std::unique_ptr<head> load_head(const std::string & path, const llama_model * target);

// Returns the device that holds the target's last norm or output matrix: the head goes there.
ggml_backend_dev_t output_device(const llama_model * target);

}  // namespace eagle3
