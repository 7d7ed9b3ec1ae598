// Features: the inputs of some of the target's layers, kept by llama.cpp beside the logits.
#include "session.hpp"

#include "llama-ext.h"

#include <cstring>

namespace eagle3 {

void capture_set(llama_context * ctx, const int32_t * layers, int n) {
    const int n_layer = llama_model_n_layer(llama_get_model(ctx));
    require(
        n >= 0 && n <= n_layer + 1, EAGLE3_E_ARGUMENT, format("cannot capture %d layers of %d", n, n_layer));
    for (int i = 0; i < n; ++i) {
        require(layers[i] >= 0 && layers[i] <= n_layer, EAGLE3_E_ARGUMENT,
            format("layer %d is out of range: the model has layers 0..%d", layers[i], n_layer));
        require(i == 0 || layers[i] > layers[i - 1], EAGLE3_E_ARGUMENT, "layers are not ascending");
    }
    std::vector<bool> on(n_layer + 1);
    for (int i = 0; i < n; ++i) {
        on[layers[i]] = true;
    }
    for (int il = 0; il <= n_layer; ++il) {
        llama_set_embeddings_layer_inp(ctx, il, on[il]);
    }
}

void capture_get(llama_context * ctx, const int32_t * layers, int n, int n_tokens, float * out) {
    const size_t n_embd = llama_model_n_embd(llama_get_model(ctx));
    const int n_rows    = (int) llama_n_embeddings_layer_inp(ctx);
    require(n_tokens >= 0 && n_tokens <= n_rows, EAGLE3_E_ARGUMENT,
        format("features of %d tokens, but the last llama_decode kept %d (none if it failed)", n_tokens,
            n_rows));
    for (int i = 0; i < n; ++i) {
        const float * rows = layers[i] < 0 ? nullptr : llama_get_embeddings_layer_inp(ctx, layers[i]);
        require(rows != nullptr, EAGLE3_E_ARGUMENT, format("layer %d is not captured", layers[i]));
        for (int t = 0; t < n_tokens; ++t) {
            memcpy(out + ((size_t) t * n + i) * n_embd, rows + t * n_embd, n_embd * sizeof(float));
        }
    }
}

}  // namespace eagle3
