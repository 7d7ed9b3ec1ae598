// Features: the inputs of some of the target's layers, kept by llama.cpp beside the logits.
#pragma once

#include "llama.h"

#include <cstdint>
#include <vector>

namespace eagle3 {

void capture_set(llama_context * ctx, const int32_t * layers, int n);
// Of these rows of the last llama_decode: out[n_rows][n][n_embd].
void capture_rows(
    llama_context * ctx, const int32_t * layers, int n, const std::vector<int32_t> & rows, float * out);

}  // namespace eagle3
