// This has CHECK, and contexts, texts and fresh decodes that tests compare with.
#pragma once

#include "eagle3.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#define CHECK(x)                                                                                             \
    do {                                                                                                     \
        if (!(x)) {                                                                                          \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #x, eagle3_last_error());                \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

using tokens = std::vector<int32_t>;

// n_ctx is that of each sequence.
inline llama_context * make_context(
    llama_model * model, int n_seq, int n_ctx, int n_batch, int n_ubatch, bool flash = true) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = n_ctx * n_seq;
    p.n_batch              = n_batch;
    p.n_ubatch             = n_ubatch;
    p.n_seq_max            = n_seq;
    p.n_threads            = 1;  // two would wait for each other longer than they work
    p.n_threads_batch      = 1;
    p.flash_attn_type      = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * ctx    = llama_init_from_model(model, p);
    CHECK(ctx != nullptr && (int) llama_n_ctx_seq(ctx) == n_ctx);
    return ctx;
}

// These are the logits after a text that is decoded plainly, in a context of its own; they are remembered for
// each text. The prompt's first n_prompt tokens are decoded in batches, the others one by one, as plain
// decoding does.
class plain_decodes {
  public:
    plain_decodes(llama_model * model, int n_ctx, bool flash = true)
        : ctx_(make_context(model, 1, n_ctx, 64, 64, flash)),
          n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {}
    ~plain_decodes() { llama_free(ctx_); }
    plain_decodes(const plain_decodes &)             = delete;
    plain_decodes & operator=(const plain_decodes &) = delete;

    const std::vector<float> & after(const tokens & text, int n_prompt) {
        std::vector<float> & out = known_[text];
        if (out.empty()) {
            go_to(text, n_prompt);
            const float * l = llama_get_logits_ith(ctx_, -1);
            out.assign(l, l + n_vocab_);
        }
        return out;
    }

  private:
    // Goes on from what the context holds already, if this text begins so: the prompt and more.
    void go_to(const tokens & text, int n_prompt) {
        size_t at = 0;
        while (at < std::min(held_.size(), text.size() - 1) && held_[at] == text[at]) {
            ++at;
        }
        if (at < (size_t) n_prompt || n_prompt != n_prompt_) {
            at = 0;
        }
        n_prompt_ = n_prompt;
        if (!llama_memory_seq_rm(llama_get_memory(ctx_), 0, (llama_pos) at, -1)) {  // a state cannot go back
            llama_memory_clear(llama_get_memory(ctx_), false);
            at = 0;
        }
        while (at < text.size()) {
            const int n = at < (size_t) n_prompt ? std::min(64, n_prompt - (int) at) : 1;
            CHECK(llama_decode(ctx_, llama_batch_get_one(const_cast<int32_t *>(&text[at]), n)) == 0);
            at += n;
        }
        held_ = text;
    }

    llama_context * ctx_;
    int n_vocab_, n_prompt_ = 0;
    tokens held_;
    std::map<tokens, std::vector<float>> known_;
};

// Says whether a row of the last decode has these logits, bit for bit.
inline bool same_bits(llama_context * ctx, int row, const std::vector<float> & expected) {
    const float * got = llama_get_logits_ith(ctx, row);
    return got != nullptr && memcmp(got, expected.data(), expected.size() * sizeof(float)) == 0;
}
