// These are the largest logits of a row, which are all that most samplers read of it.
#pragma once

#include "llama.h"

#include <vector>

namespace eagle3 {

// This is the order of candidates: their logits fall, and of equal ones the lower token comes first.
bool precedes(const llama_token_data & a, const llama_token_data & b);

bool is_nan(const llama_token_data & candidate);  // its logit has no order

// Returns the n first candidates of a row, n at least 1, as a heap whose front is their last one. Returns
// nothing if a logit is NaN.
std::vector<llama_token_data> first_of(const float * logits, int n_vocab, size_t n);

}  // namespace eagle3
