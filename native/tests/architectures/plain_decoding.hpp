// Texts, and the logits that plain decoding gives them: row by row, in a context of its own.
#pragma once

#include "generator.hpp"

namespace plain {

constexpr int N_CTX = 256;  // of a slot: the generator's models know no more positions

using logits_row = std::vector<float>;

struct text {
    std::vector<int32_t> tokens;   // decoded
    std::vector<logits_row> rows;  // behind each of them; empty where nobody asked for it
    int32_t next = 0;              // sampled, not decoded yet

    void cut(size_t n) {
        tokens.resize(n);
        rows.resize(n);
    }
};

inline llama_context_params settings(llama_flash_attn_type flash, int n_slots, int n_rs_seq) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = N_CTX * n_slots;
    p.n_seq_max            = n_slots;
    p.n_batch = p.n_ubatch = 64;
    p.n_threads = p.n_threads_batch = 1;
    p.flash_attn_type               = flash;
    p.n_rs_seq                      = n_rs_seq;
    return p;
}

inline int decode(llama_context * ctx, const std::vector<int32_t> & tokens, int from, bool all = true) {
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    for (const int32_t token : tokens) {
        const int i        = batch.n_tokens++;
        batch.token[i]     = token;
        batch.pos[i]       = from + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = all || i + 1 == (int) tokens.size();
    }
    const int code = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return code;
}

inline logits_row row_of(llama_context * ctx, int i) {
    const float * row = llama_get_logits_ith(ctx, i);
    return row ? logits_row(row, row + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))) : logits_row();
}

inline bool same(const logits_row & a, const logits_row & b) {
    return a.size() == b.size() && !a.empty() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline llama_context_ptr context(llama_model * model, const llama_context_params & params) {
    llama_context_ptr ctx(llama_init_from_model(model, params));
    return ctx ? std::move(ctx) : throw std::runtime_error("no context can be made of this model");
}

class decoding {
  public:
    decoding(llama_model * model, llama_flash_attn_type flash) : ctx_(context(model, settings(flash, 1, 0))) {}

    // The number of the text's rows that have other bits here.
    int differing(const text & t) {
        if (held_.size() > t.tokens.size() || !std::equal(held_.begin(), held_.end(), t.tokens.begin())) {
            llama_memory_clear(llama_get_memory(ctx_.get()), true);
            held_.clear();
            rows_.clear();
        }
        while (held_.size() < t.tokens.size()) {
            const int32_t token = t.tokens[held_.size()];
            if (decode(ctx_.get(), {token}, (int) held_.size()) != 0) {
                throw std::runtime_error("plain decoding fails");
            }
            held_.push_back(token);
            rows_.push_back(row_of(ctx_.get(), 0));
        }
        int n = 0;
        for (size_t i = 0; i < t.rows.size(); ++i) {
            n += !t.rows[i].empty() && !same(t.rows[i], rows_[i]);
        }
        return n;
    }

  private:
    llama_context_ptr ctx_;
    std::vector<int32_t> held_;
    std::vector<logits_row> rows_;
};

}  // namespace plain
