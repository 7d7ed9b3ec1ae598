// A head's weights and geometry, read from a GGUF of architecture "eagle3" (upstream llama.cpp's keys and
// tensor names, and those written before its merge: eagle3.extract_layers, blk.0.hidden_norm).
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
    int     n_dims      = 0;
    int     n_ctx_orig  = 0;
    float   freq_base   = 10000.0f;
    float   freq_scale  = 1.0f;
    float   ext_factor  = 0.0f;
    float   attn_factor = 1.0f;
    float   beta_fast   = 32.0f;
    float   beta_slow   = 1.0f;
};

struct head {
    const llama_model * target = nullptr;

    int n_embd = 0, n_embd_target = 0, n_vocab = 0, n_vocab_target = 0;
    int n_head = 0, n_head_kv = 0, n_embd_head = 0, n_ff = 0;
    float norm_eps = 1e-5f;
    bool norm_before_residual = false, norm_before_fc = false;
    rope_params rope;
    std::vector<int32_t> layers;  // ids of the captured target layers
    std::vector<int32_t> d2t;     // target id of each draft id

    // weights; tok_embd and output may be the target's own
    ggml_tensor * tok_embd = nullptr, * output = nullptr, * fc = nullptr, * fc_norm = nullptr;
    ggml_tensor * attn_norm = nullptr, * hidden_norm = nullptr, * wq = nullptr, * wk = nullptr, * wv = nullptr,
                      * wo = nullptr;
    ggml_tensor * ffn_norm = nullptr, * ffn_gate = nullptr, * ffn_up = nullptr, * ffn_down = nullptr;
    ggml_tensor * output_norm = nullptr, * rope_freqs = nullptr;

    ggml_backend_dev_t      device = nullptr;  // where the weights live
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

    int n_features() const { return (int) layers.size() * n_embd_target; }
    int n_embd_kv()  const { return n_head_kv * n_embd_head; }
};

std::unique_ptr<head> load_head(const std::string & path, const llama_model * target);

} // namespace eagle3
