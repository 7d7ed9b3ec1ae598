// An EAGLE-3 head of random weights for any target.
#pragma once

#include "generator.hpp"

namespace random_head {

inline void matrix(ggml_context * ctx, gguf_context * gguf, std::mt19937 & rng, const char * name, int n_in, int n_out) {
    ggml_tensor * t = n_out ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, n_out) : ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_in);
    for (int64_t i = 0; i < ggml_nelements(t); ++i) {
        ((float *) t->data)[i] = n_out ? 0.3f * ((float) (rng() % 2001) / 1000 - 1) : 1.0f;
    }
    ggml_set_name(t, name);
    gguf_add_tensor(gguf, t);
}

inline void write(const llama_model * target, const std::string & path) {
    const int n_embd = llama_model_n_embd(target), n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(target));
    const int n_head = 4, n_kv = 2, d = n_embd / n_head, n_ff = 2 * n_embd, layer = 1;
    gguf_context_ptr gguf(gguf_init_empty());
    gguf_set_val_str(gguf.get(), "general.architecture", "eagle3");
    const auto set = [&](const char * key, uint32_t value) { gguf_set_val_u32(gguf.get(), (std::string("eagle3.") + key).c_str(), value); };
    set("block_count", 1);
    set("context_length", 1024);
    set("embedding_length", n_embd);
    set("feed_forward_length", n_ff);
    set("attention.head_count", n_head);
    set("attention.head_count_kv", n_kv);
    set("rope.dimension_count", d);
    set("target_hidden_size", n_embd);
    gguf_set_val_f32(gguf.get(), "eagle3.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_set_arr_data(gguf.get(), "eagle3.target_layers", GGUF_TYPE_INT32, &layer, 1);

    const size_t n_weights = (size_t) n_embd * (2 * n_vocab + 16 * (size_t) n_embd);
    ggml_context_ptr ctx(ggml_init({n_weights * sizeof(float) + (1 << 20), nullptr, false}));
    std::mt19937 rng(11);
    const auto add = [&](const char * name, int n_in, int n_out) { matrix(ctx.get(), gguf.get(), rng, name, n_in, n_out); };
    add("fc.weight", n_embd, n_embd);
    add("token_embd.weight", n_embd, n_vocab);
    add("output.weight", n_embd, n_vocab);
    for (const char * name : {"output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight", "blk.0.ffn_norm.weight"}) {
        add(name, n_embd, 0);
    }
    add("blk.0.attn_q.weight", 2 * n_embd, n_embd);
    add("blk.0.attn_k.weight", 2 * n_embd, n_kv * d);
    add("blk.0.attn_v.weight", 2 * n_embd, n_kv * d);
    add("blk.0.attn_output.weight", n_embd, n_embd);
    add("blk.0.ffn_gate.weight", n_embd, n_ff);
    add("blk.0.ffn_up.weight", n_embd, n_ff);
    add("blk.0.ffn_down.weight", n_ff, n_embd);
    if (!gguf_write_to_file(gguf.get(), path.c_str(), false)) {
        throw std::runtime_error("cannot write " + path);
    }
}

}  // namespace random_head
