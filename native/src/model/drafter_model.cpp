#include "model/drafter_model.hpp"

#include "eagle3.h"
#include "error.hpp"

#include <algorithm>
#include <cstring>

namespace eagle3 {

namespace {

bool is_control(const llama_vocab * vocab, int32_t token) {
    return (llama_vocab_get_attr(vocab, token) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNUSED)) != 0;
}

}  // namespace

drafter_model::drafter_model(const char * path, llama_context * target, int n_slots, int n_gpu_layers)
    : target_(target), n_slots_(n_slots) {
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers       = n_gpu_layers;
    model_.reset(llama_model_load_from_file(path, p));
    require(model_ != nullptr, EAGLE3_E_FORMAT,
        format("%s cannot be loaded as a draft model: llama.cpp's log says why", path));
    require(!llama_model_is_diffusion(model()) && !llama_model_has_encoder(model()) &&
                llama_model_has_decoder(model()),
        EAGLE3_E_UNSUPPORTED, "the draft model does not write a text from left to right: take a decoder");
    check_vocab(llama_model_get_vocab(llama_get_model(target)));
    open_context();
}

// The ids of a text must mean the same to both. Control tokens may have other names, and a family's models
// may differ in how many tokens they keep in reserve: such ids are never offered.
void drafter_model::check_vocab(const llama_vocab * of_target) {
    const llama_vocab * own = llama_model_get_vocab(model());
    require(llama_vocab_type(own) == llama_vocab_type(of_target), EAGLE3_E_MISMATCH,
        "the draft model has a tokenizer of another kind than the target: take a model of its family");
    require(llama_vocab_type(own) != LLAMA_VOCAB_TYPE_NONE, EAGLE3_E_MISMATCH,
        "the draft model and the target have no vocabulary to compare");
    const int n = llama_vocab_n_tokens(own), n_target = llama_vocab_n_tokens(of_target);
    n_shared_ = std::min(n, n_target);
    for (int32_t id = 0; id < n_shared_; ++id) {
        if (is_control(own, id) || is_control(of_target, id)) {
            continue;
        }
        const char *a = llama_vocab_get_text(own, id), *b = llama_vocab_get_text(of_target, id);
        require(strcmp(a, b) == 0, EAGLE3_E_MISMATCH,
            format(
                "token %d is %.40s in the draft model's vocabulary and %.40s in the target's: take a draft "
                "model of the target's family",
                id, a, b));
    }
    if (n != n_target) {
        about_ = format(
            "its vocabulary has %d tokens, the target's %d: it drafts the first %d", n, n_target, n_shared_);
    }
}

void drafter_model::open_context() {
    const int n_rows       = std::clamp((int) llama_n_ubatch(target_), (int) EAGLE3_MAX_ROWS, 512);
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = llama_n_ctx_seq(target_) * (uint32_t) n_slots_;
    p.n_seq_max            = (uint32_t) n_slots_;
    p.n_batch = p.n_ubatch = (uint32_t) n_rows;
    p.n_threads            = llama_n_threads(target_);
    p.n_threads_batch      = llama_n_threads_batch(target_);
    p.no_perf              = true;
    ctx_.reset(llama_init_from_model(model_.get(), p));
    require(ctx_ != nullptr, EAGLE3_E_MEMORY,
        "the draft model's context cannot be made: give a smaller n_ctx, or a smaller draft model");
    require(llama_get_memory(ctx()) != nullptr, EAGLE3_E_UNSUPPORTED,
        "the draft model has no memory of its sequence");
}

}  // namespace eagle3
