// The C boundary: every call turns exceptions into a code and a message.
#include "capture.hpp"
#include "session.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>

#if defined(EAGLE3_LIBGOMP) && __GNUC__ < 9
#undef EAGLE3_LIBGOMP  // has no omp_pause_resource_all
#endif
#ifdef EAGLE3_LIBGOMP
#include <omp.h>
#endif

using namespace eagle3;

struct eagle3_head {
    std::unique_ptr<head> impl;
};

struct eagle3_session {
    std::unique_ptr<session> impl;
};

namespace {

thread_local std::string last_error;

int32_t fail(int32_t status, const char * what) noexcept {
    try {
        last_error = what;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

// Runs f, which returns a count or EAGLE3_OK.
template <typename F> auto guard(F && f) noexcept -> decltype(f()) {
    try {
        return f();
    } catch (const error & e) {
        return fail(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return fail(EAGLE3_E_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(EAGLE3_E_INTERNAL, e.what());
    } catch (...) {
        return fail(EAGLE3_E_INTERNAL, "unknown error");
    }
}

session & get(eagle3_session * s) {
    require(s != nullptr, EAGLE3_E_ARGUMENT, "session is NULL");
    return *s->impl;
}

const session & get(const eagle3_session * s) {
    return get(const_cast<eagle3_session *>(s));
}

void not_null(const void * p, const char * name) {
    require(p != nullptr, EAGLE3_E_ARGUMENT, std::string(name) + " is NULL");
}

}  // namespace

int32_t eagle3_abi_version(void) {
    return EAGLE3_ABI_VERSION;
}

const char * eagle3_last_error(void) {
    return last_error.c_str();
}

void eagle3_release_threads(void) {
#ifdef EAGLE3_LIBGOMP
    omp_pause_resource_all(
        omp_pause_soft);  // of the calling thread alone, and nothing within a parallel region
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

int32_t eagle3_head_set_layers(eagle3_head * head, const int32_t * layers, int32_t n) {
    return guard([&]() -> int32_t {
        not_null(head, "head");
        not_null(layers, "layers");
        eagle3::head & h = *head->impl;
        require(n == (int32_t) h.layers.size(), EAGLE3_E_ARGUMENT,
            format("the head reads %zu layers, not %d", h.layers.size(), n));
        const int n_layer = llama_model_n_layer(h.target);
        for (int32_t i = 0; i < n; ++i) {
            require(layers[i] >= 0 && layers[i] <= n_layer && (i == 0 || layers[i] > layers[i - 1]),
                EAGLE3_E_ARGUMENT,
                format("layer %d is not one of 0..%d in ascending order", layers[i], n_layer));
        }
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
        out->n_bytes = (int64_t) ggml_backend_buffer_get_size(h.buffer.get());
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

int32_t eagle3_session_open(
    struct llama_context * ctx, eagle3_head * head, int32_t n_slots, eagle3_session ** out) {
    return guard([&]() -> int32_t {
        not_null(ctx, "ctx");
        not_null(out, "out");
        require(n_slots >= 1 && n_slots <= (int32_t) llama_n_seq_max(ctx), EAGLE3_E_ARGUMENT,
            format("n_slots is %d, the context has %u sequences", n_slots, llama_n_seq_max(ctx)));
        *out = new eagle3_session{std::make_unique<session>(ctx, head ? head->impl.get() : nullptr, n_slots)};
        return EAGLE3_OK;
    });
}

void eagle3_session_close(eagle3_session * s) {
    delete s;
}

int32_t eagle3_session_set_capture(eagle3_session * s, int32_t on) {
    return guard([&]() -> int32_t {
        get(s).set_capture(on != 0);
        return EAGLE3_OK;
    });
}

int32_t eagle3_n_past(const eagle3_session * s, int32_t slot) {
    return guard([&]() -> int32_t { return get(s).n_past(slot); });
}

int32_t eagle3_rewind(eagle3_session * s, int32_t slot, int32_t n_past) {
    return guard([&]() -> int32_t {
        get(s).rewind(slot, n_past);
        return EAGLE3_OK;
    });
}

int32_t eagle3_prefill(
    eagle3_session * s, int32_t slot, const int32_t * tokens, int32_t n, int32_t all_logits) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        get(s).prefill(slot, tokens, n, all_logits != 0);
        return EAGLE3_OK;
    });
}

int32_t eagle3_can_tree(eagle3_session * s) {
    return guard([&]() -> int32_t { return get(s).can_tree(); });
}

int32_t eagle3_verified_row(const eagle3_session * s, int32_t slot, int32_t i) {
    return guard([&]() -> int32_t { return get(s).verified_row(slot, i); });
}

int32_t eagle3_plan_set(eagle3_session * s, const struct eagle3_costs * c) {
    return guard([&]() -> int32_t {
        if (c) {
            check(*c);
        }
        get(s).set_plan(c ? *c : costs{});
        return EAGLE3_OK;
    });
}

int32_t eagle3_plan_get(eagle3_session * s, struct eagle3_plan_info * out) {
    return guard([&]() -> int32_t {
        not_null(out, "out");
        const planner & p = get(s).plan();
        require(p.ready(), EAGLE3_E_ARGUMENT, "the planner has no costs: eagle3_plan_set");
        *out = {p.rate(), (float) p.n_slots() / p.plain_seconds(), get(s).slot(0).trust[0], p.asleep()};
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_target(eagle3_session * s, int32_t slot, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_target(slot, n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_output(eagle3_session * s, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_output(n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_measure_head(eagle3_session * s, int32_t slot, int32_t n, float * seconds) {
    return guard([&]() -> int32_t {
        not_null(seconds, "seconds");
        *seconds = get(s).measure_head(slot, n);
        return EAGLE3_OK;
    });
}

int32_t eagle3_sample(eagle3_session * s, struct llama_sampler * sampler, int32_t row) {
    return guard([&]() -> int32_t {
        not_null(sampler, "sampler");
        return get(s).sample(sampler, row);
    });
}

int32_t eagle3_round_draft(eagle3_session * s, const struct eagle3_ask * asks, int32_t n, int32_t * drafted) {
    return guard([&]() -> int32_t {
        not_null(asks, "asks");
        not_null(drafted, "drafted");
        require(n >= 1, EAGLE3_E_ARGUMENT, format("a round of %d slots", n));
        const int32_t total = get(s).draft(std::vector<ask>(asks, asks + n));
        for (int32_t i = 0; i < n; ++i) {
            drafted[i] = (int32_t) get(s).slot(asks[i].slot).draft_tokens.size();
        }
        return total;
    });
}

int32_t eagle3_round_drafted(
    const eagle3_session * s, int32_t i, int32_t * tokens, int32_t * parents, float * probs) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        const std::vector<int> & slots = get(s).round_slots();
        require(get(s).round_stage() != stage::none, EAGLE3_E_ARGUMENT, "no round is drafted");
        require(
            i >= 0 && i < (int32_t) slots.size(), EAGLE3_E_ARGUMENT, format("the round has no ask %d", i));
        const slot_state & slot = get(s).slot(slots[i]);
        const size_t n          = slot.draft_tokens.size();
        std::copy_n(slot.draft_tokens.begin(), n, tokens);
        if (parents) {
            std::copy_n(slot.draft_parents.begin(), n, parents);
        }
        if (probs) {
            std::fill_n(probs, n, 0.0f);
            std::transform(slot.draft_evidence.begin(), slot.draft_evidence.end(), probs,
                [](const evidence_list & e) { return std::max(e[0], 0.0f); });  // the head's
        }
        return (int32_t) n;
    });
}

int32_t eagle3_round_decode(eagle3_session * s) {
    return guard([&]() -> int32_t {
        get(s).decode();
        return EAGLE3_OK;
    });
}

int32_t eagle3_round_verify(
    eagle3_session * s, struct llama_sampler * const * samplers, int32_t * out, int32_t * counts) {
    return guard([&]() -> int32_t {
        not_null(samplers, "samplers");
        not_null(out, "out");
        not_null(counts, "counts");
        std::string failure;
        get(s).verify(samplers, out, counts, failure);
        if (!failure.empty()) {
            fail(EAGLE3_OK, failure.c_str());
        }
        return EAGLE3_OK;
    });
}

int32_t eagle3_round_commit(eagle3_session * s, const int32_t * keep) {
    return guard([&]() -> int32_t {
        not_null(keep, "keep");
        get(s).commit(keep);
        return EAGLE3_OK;
    });
}

int64_t eagle3_state_size(const eagle3_session * s, int32_t slot) {
    return guard([&]() -> int64_t { return get(s).state_size(slot); });
}

int64_t eagle3_state_get(const eagle3_session * s, int32_t slot, uint8_t * out, int64_t cap) {
    return guard([&]() -> int64_t {
        not_null(out, "out");
        const int64_t n = get(s).state_size(slot);
        require(cap >= n, EAGLE3_E_ARGUMENT, "the buffer is too small");
        get(s).state_get(slot, out);
        return n;
    });
}

int32_t eagle3_state_set(eagle3_session * s, int32_t slot, const uint8_t * data, int64_t size) {
    return guard([&]() -> int32_t {
        not_null(data, "data");
        get(s).state_set(slot, data, size);
        return EAGLE3_OK;
    });
}

int32_t eagle3_state_reset(eagle3_session * s, int32_t slot, int32_t n_past) {
    return guard([&]() -> int32_t {
        get(s).reset(slot, n_past);
        return EAGLE3_OK;
    });
}

int32_t eagle3_head_forward(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, float * g, float * state, float * logits) {
    return guard([&]() -> int32_t {
        not_null(tokens, "tokens");
        not_null(features, "features");
        get(s).head_forward(slot, tokens, features, n, g, state, logits);
        return EAGLE3_OK;
    });
}

int64_t eagle3_head_trace(eagle3_session * s, int32_t slot, const int32_t * tokens, const float * features,
    int32_t n, const char * stage, float * out, int64_t cap) {
    return guard([&]() -> int64_t {
        not_null(tokens, "tokens");
        not_null(features, "features");
        not_null(stage, "stage");
        not_null(out, "out");
        const std::vector<float> & values = get(s).head_trace(slot, tokens, features, n, stage);
        require((int64_t) values.size() <= cap, EAGLE3_E_ARGUMENT,
            format(
                "stage %.40s has %zu values, there is room for %lld", stage, values.size(), (long long) cap));
        std::copy(values.begin(), values.end(), out);
        return (int64_t) values.size();
    });
}
