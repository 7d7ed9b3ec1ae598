// A grammar tests the likeliest tokens of a row only, as far as the samplers behind it can reach: they keep
// the same tokens in the same order, and draw the same one, as after a test of the whole vocabulary.
#pragma once

#include "llama.h"

#include <vector>

namespace eagle3 {

// The candidates of one row behind the samplers before the grammar. Make one for each row. The order of
// candidates is that of their logits, falling; of equal ones, the lower token comes first.
class grammar_mask {
  public:
    explicit grammar_mask(llama_sampler * sampler);

    // Says whether the grammar stands directly before top-k, or before a greedy sampler. Others that follow
    // it (top-p alone, typical, mirostat, ...) read all candidates, so the grammar must test them all.
    bool is_lazy() const { return k_ > 0; }

    // Says whether it is lazy, and the samplers before the grammar can only have lowered some logits.
    bool only_lowers() const;

    // Returns how many tokens the samplers behind the grammar keep at most.
    int k() const { return k_; }

    // Samples from a row of n_vocab logits as the chain does, and returns the token. Nothing accepts it yet.
    // Throws what a sampler throws.
    int sample(const float * logits, int n_vocab);

    // Samples from the largest logits of a row, in any order. Returns LLAMA_TOKEN_NULL, and the sampler is as
    // before, where they do not decide. Throws what a sampler throws.
    int take_from(std::vector<llama_token_data> found);

  private:
    bool decides(const std::vector<llama_token_data> & largest);
    int take();
    int take_from_all(llama_token_data_array all);
    bool test(const std::vector<llama_token_data> & largest);
    bool are_in_one_order(size_t n) const;
    size_t kept_with(size_t n_more) const;

    llama_sampler * sampler_;
    int n_          = 0;  // samplers of the chain
    int grammar_at_ = 0, top_k_at_ = 0, k_ = 0;
    bool is_bounded_ = false;  // all behind top-k, up to the last sampler, cut off the end of what it keeps
    bool failed_     = false;
    size_t n_tested_ = 0;
    float next_      = 0.0f;                 // no candidate that was not tested is larger
    std::vector<llama_token_data> allowed_;  // among those tested
};

// Returns the token that a chain has selected. Throws E_INTERNAL if there is none.
int selected_of(const llama_token_data_array & candidates);

}  // namespace eagle3
