// Features are the inputs of some of the target's layers. llama.cpp keeps them beside the logits.
#include "target/capture.hpp"

#include "error.hpp"
#include "llama-ext.h"

#include <algorithm>
#include <cstring>

namespace eagle3 {

int first_bad_layer(const int32_t * layers, int n, int n_layer) {
    int i = 0;
    while (i < n && is_layer(layers[i], n_layer) && (i == 0 || layers[i] > layers[i - 1])) {
        ++i;
    }
    return i;
}

void capture_set(llama_context * ctx, const int32_t * layers, int n) {
    const int n_layer = llama_model_n_layer(llama_get_model(ctx));
    require(
        n >= 0 && n <= n_layer + 1, EAGLE3_E_ARGUMENT, format("cannot capture %d layers of %d", n, n_layer));
    const int bad = first_bad_layer(layers, n, n_layer);
    if (bad < n) {
        require(is_layer(layers[bad], n_layer), EAGLE3_E_ARGUMENT,
            format("layer %d is out of range: the model has layers 0..%d", layers[bad], n_layer));
        throw error(EAGLE3_E_ARGUMENT, "layers are not ascending");
    }
    std::vector<bool> on(n_layer + 1);
    for (int i = 0; i < n; ++i) {
        on[layers[i]] = true;
    }
    for (int il = 0; il <= n_layer; ++il) {
        llama_set_embeddings_layer_inp(ctx, il, on[il]);
    }
}

void capture_rows(
    llama_context * ctx, const int32_t * layers, int n, const std::vector<int32_t> & rows, float * out) {
    const size_t n_embd = llama_model_n_embd(llama_get_model(ctx));
    const int n_kept    = (int) llama_n_embeddings_layer_inp(ctx);
    const int n_wanted  = rows.empty() ? 0 : 1 + *std::max_element(rows.begin(), rows.end());
    require(n_wanted <= n_kept, EAGLE3_E_ARGUMENT,
        format("features of %d tokens, but the last llama_decode kept %d (none if it failed)", n_wanted,
            n_kept));
    for (int i = 0; i < n; ++i) {
        const float * in = layers[i] < 0 ? nullptr : llama_get_embeddings_layer_inp(ctx, layers[i]);
        require(in != nullptr, EAGLE3_E_ARGUMENT, format("layer %d is not captured", layers[i]));
        for (size_t t = 0; t < rows.size(); ++t) {
            memcpy(out + (t * n + i) * n_embd, in + rows[t] * n_embd, n_embd * sizeof(float));
        }
    }
}

}  // namespace eagle3
