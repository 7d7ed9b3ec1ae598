// These are the calls of eagle3.h that need no session.
#include "api/capi.hpp"

#include "target/capture.hpp"

#include <algorithm>
#include <numeric>

#if defined(EAGLE3_LIBGOMP) && __GNUC__ < 9
#undef EAGLE3_LIBGOMP  // has no omp_pause_resource_all
#endif
#ifdef EAGLE3_LIBGOMP
#include <omp.h>
#endif

using namespace eagle3;

namespace {

thread_local std::string last_error;

}  // namespace

int32_t eagle3::fail(int32_t status, const char * what) noexcept {
    try {
        last_error = what;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

int32_t eagle3_abi_version(void) {
    return EAGLE3_ABI_VERSION;
}

const char * eagle3_last_error(void) {
    return last_error.c_str();
}

void eagle3_release_threads(void) {
#ifdef EAGLE3_LIBGOMP
    omp_pause_resource_all(
        omp_pause_soft);  // for the calling thread alone, and nothing within a parallel region
#endif
}

int32_t eagle3_capture_set(struct llama_context * ctx, const int32_t * layers, int32_t n) {
    return guard([&]() -> int32_t {
        not_null(ctx, "ctx");
        require(layers != nullptr || n == 0, EAGLE3_E_ARGUMENT, "layers is NULL");
        capture_set(ctx, layers, n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_capture_get(
    struct llama_context * ctx, const int32_t * layers, int32_t n, int32_t n_tokens, float * out) {
    return guard([&]() -> int32_t {
        not_null(ctx, "ctx");
        not_null(out, "out");
        require(layers != nullptr || n == 0, EAGLE3_E_ARGUMENT, "layers is NULL");
        require(n_tokens >= 0 && n_tokens <= (int32_t) llama_n_batch(ctx), EAGLE3_E_ARGUMENT,
            "n_tokens exceeds n_batch");
        std::vector<int32_t> rows(n_tokens);
        std::iota(rows.begin(), rows.end(), 0);
        capture_rows(ctx, layers, n, rows, out);
        return EAGLE3_OK;
    });
}

int32_t eagle3_head_open(const char * path, struct llama_model * model, eagle3_head ** out) {
    return guard([&]() -> int32_t {
        not_null(path, "path");
        not_null(model, "model");
        not_null(out, "out");
        *out = new eagle3_head{load_head(path, model)};
        return EAGLE3_OK;
    });
}

void eagle3_head_close(eagle3_head * head) {
    delete head;
}

int32_t eagle3_drafter_open(const char * path, struct llama_context * ctx, int32_t n_slots,
    int32_t n_gpu_layers, eagle3_drafter ** out) {
    return guard([&]() -> int32_t {
        not_null(path, "path");
        not_null(ctx, "ctx");
        not_null(out, "out");
        require(n_slots >= 1 && n_slots <= (int32_t) llama_n_seq_max(ctx), EAGLE3_E_ARGUMENT,
            format("n_slots is %d, the context has %u sequences", n_slots, llama_n_seq_max(ctx)));
        *out = new eagle3_drafter{std::make_unique<drafter_model>(path, ctx, n_slots, n_gpu_layers)};
        return EAGLE3_OK;
    });
}

void eagle3_drafter_close(eagle3_drafter * d) {
    delete d;
}

const char * eagle3_drafter_about(const eagle3_drafter * d) {
    return d ? d->impl->about().c_str() : "";
}

int32_t eagle3_head_set_layers(eagle3_head * head, const int32_t * layers, int32_t n) {
    return guard([&]() -> int32_t {
        not_null(head, "head");
        not_null(layers, "layers");
        eagle3::head & h = *head->impl;
        require(n == (int32_t) h.layers.size(), EAGLE3_E_ARGUMENT,
            format("the head reads %zu layers, not %d", h.layers.size(), n));
        const int n_layer = llama_model_n_layer(h.target);
        const int bad     = first_bad_layer(layers, n, n_layer);
        require(bad == n, EAGLE3_E_ARGUMENT,
            format("layer %d is not one of 0..%d in ascending order", bad < n ? layers[bad] : 0, n_layer));
        h.layers.assign(layers, layers + n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_head_get_info(const eagle3_head * head, struct eagle3_head_info * out) {
    return guard([&]() -> int32_t {
        not_null(head, "head");
        not_null(out, "out");
        const eagle3::head & h = *head->impl;
        *out                   = {};
        out->n_embd            = h.n_embd;
        out->n_embd_target     = h.n_embd_target;
        out->n_vocab_draft     = h.n_vocab;
        out->n_blocks          = (int32_t) h.blocks.size();
        out->n_layers_captured = (int32_t) h.layers.size();
        std::copy(h.layers.begin(), h.layers.end(), out->layers);
        out->n_bytes = (int64_t) h.n_bytes();
        out->n_bytes_step =
            (int64_t) ggml_nbytes(h.output) + (h.embd_fc ? (int64_t) ggml_nbytes(h.embd_fc) : 0);
        for (const eagle3::block & b : h.blocks) {
            for (const ggml_tensor * t : {b.wq, b.wk, b.wv, b.wo, b.ffn_gate, b.ffn_up, b.ffn_down}) {
                out->n_bytes_step += (int64_t) ggml_nbytes(t);
            }
        }
        return EAGLE3_OK;
    });
}

int32_t eagle3_head_d2t(const eagle3_head * head, int32_t * out) {
    return guard([&]() -> int32_t {
        not_null(head, "head");
        not_null(out, "out");
        std::copy(head->impl->d2t.begin(), head->impl->d2t.end(), out);
        return EAGLE3_OK;
    });
}
