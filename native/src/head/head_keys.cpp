#include "head/head_keys.hpp"

namespace eagle3 {

namespace {

constexpr int MAX_BLOCKS = 64;

}  // namespace

void head_keys::read_geometry() {
    arch = meta.string("general.architecture");
    require(arch == "eagle3" || arch == "eagle", EAGLE3_E_FORMAT,
        format("general.architecture is \"%.60s\", expected "
               "\"eagle3\" or \"eagle\": not an EAGLE head (convert it with eagle3-llama convert)",
            arch.c_str()));
    h.blocks.resize(meta.integer(key("block_count"), 1, MAX_BLOCKS));
    h.n_embd      = meta.integer(key("embedding_length"), 1, 1 << 20);
    h.n_ff        = meta.integer(key("feed_forward_length"), 1, 1 << 22);
    h.n_head      = meta.integer(key("attention.head_count"), 1, 1 << 14);
    h.n_head_kv   = meta.integer(key("attention.head_count_kv"), 1, 1 << 14, h.n_head);
    h.n_embd_head = meta.integer(key("attention.key_length"), 1, 1 << 14, h.n_embd / h.n_head);
    require(h.n_head % h.n_head_kv == 0, EAGLE3_E_FORMAT,
        format("%s %d is no multiple of head_count_kv %d", key("attention.head_count").c_str(), h.n_head,
            h.n_head_kv));
    h.n_embd_target        = meta.integer(key("target_hidden_size"), 1, 1 << 20, h.n_embd);
    h.norm_eps             = meta.real(key("attention.layer_norm_rms_epsilon"), 1e-5f);
    h.feature_norm_eps     = meta.real(key("feature_norm_epsilon"), 0.0f);
    h.norm_before_residual = meta.boolean(key("norm_before_residual"));
    h.norm_output          = meta.boolean(key("norm_output"));
    h.layers               = meta.integers(key("target_layers"));
    if (h.layers.empty()) {
        h.layers = meta.integers(key("extract_layers"));  // files written before the merge upstream
    }
    require(!h.layers.empty(), EAGLE3_E_FORMAT, "key " + key("target_layers") + " is missing");
}

void head_keys::read_rope() {
    rope_params & r = h.rope;
    r.n_dims        = meta.integer(key("rope.dimension_count"), 2, h.n_embd_head, h.n_embd_head);
    require(r.n_dims % 2 == 0, EAGLE3_E_FORMAT, key("rope.dimension_count") + " is odd");
    r.freq_base            = meta.real(key("rope.freq_base"), 10000.0f);
    const std::string type = meta.string(key("rope.scaling.type"));
    const float factor     = meta.real(key("rope.scaling.factor"), 1.0f);
    require(factor > 0.0f, EAGLE3_E_FORMAT, key("rope.scaling.factor") + " is 0");
    if (type == "linear" || type == "yarn") {
        r.freq_scale = 1.0f / factor;
    }
    r.n_ctx_orig = meta.integer(key("rope.scaling.original_context_length"), 1, 1 << 30,
        meta.integer(key("context_length"), 1, 1 << 30, 4096));
    if (type == "yarn") {
        r.ext_factor = 1.0f;
        r.beta_fast  = meta.real(key("rope.scaling.yarn_beta_fast"), 32.0f);
        r.beta_slow  = meta.real(key("rope.scaling.yarn_beta_slow"), 1.0f);
        // ggml scales by 1 + 0.1 ln(factor) itself; the file's factor is on top of that.
        r.attn_factor = meta.real(key("rope.scaling.attn_factor"), 1.0f);
    }
}

}  // namespace eagle3
