// A small model that drafts for the target: its file, its weights, and a context of its own.
#pragma once

#include "llama.h"

#include <memory>
#include <string>

namespace eagle3 {

// Loads the model, and makes a context with a sequence for each slot. Every sequence has the target's room.
// Keys and values are F16 whatever the target's are: drafts need no more, and other types fail in some
// models. Throws E_FORMAT for a file that is no model, E_MISMATCH for one whose vocabulary is not the
// target's, E_UNSUPPORTED for one that does not write a text from left to right, E_MEMORY.
class drafter_model {
  public:
    drafter_model(const char * path, llama_context * target, int n_slots, int n_gpu_layers);

    llama_context * ctx() const { return ctx_.get(); }
    const llama_model * model() const { return model_.get(); }
    llama_context * target() const { return target_; }
    int n_slots() const { return n_slots_; }
    // Token ids that both vocabularies have are below this number.
    int n_shared() const { return n_shared_; }
    const std::string & about() const { return about_; }  // what differs and does not matter; may be empty

  private:
    void check_vocab(const llama_vocab * of_target);
    void open_context();

    struct freed {
        void operator()(llama_model * m) const { llama_model_free(m); }
        void operator()(llama_context * c) const { llama_free(c); }
    };
    llama_context * target_;
    const int n_slots_;
    int n_shared_ = 0;
    std::string about_;
    std::unique_ptr<llama_model, freed> model_;
    std::unique_ptr<llama_context, freed> ctx_;
};

}  // namespace eagle3
