// Features are the inputs of some of the target's layers. llama.cpp keeps them beside the logits.
#pragma once

#include "llama.h"

#include <cstdint>
#include <vector>

namespace eagle3 {

// Says whether it names the input of one of n_layer layers, or what follows the last.
inline bool is_layer(int32_t layer, int n_layer) {
    return layer >= 0 && layer <= n_layer;
}
// Returns the first of them that is not in range or not ascending, or n if there is none.
int first_bad_layer(const int32_t * layers, int n, int n_layer);

void capture_set(llama_context * ctx, const int32_t * layers, int n);
// Copies the features of these rows of the last llama_decode to out[n_rows][n][n_embd].
void capture_rows(
    llama_context * ctx, const int32_t * layers, int n, const std::vector<int32_t> & rows, float * out);

}  // namespace eagle3
