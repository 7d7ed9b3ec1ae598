#include "sampling.hpp"

#include "error.hpp"

#include "llama-ext.h"

#include <ctime>
#include <new>

namespace eagle3 {

namespace {

// A sampler's kind is told by the functions it has.
struct kinds {
    const llama_sampler_i * greedy;
    const llama_sampler_i * empty;  // penalties that are all off

    static const llama_sampler_i * of(llama_sampler * s) {
        const llama_sampler_i * iface = s->iface;
        llama_sampler_free(s);
        return iface;
    }
    kinds()
        : greedy(of(llama_sampler_init_greedy())),
          empty(of(llama_sampler_init_penalties(1, 0, 1.0f, 0.0f, 0.0f))) {}
};

// Says whether a sampler takes the likeliest token of the logits as they are.
bool takes_likeliest(llama_sampler * sampler) {
    static const kinds known;
    if (llama_sampler_chain_get(sampler, -1) == nullptr) {
        return sampler->iface == known.greedy;
    }
    const int n = llama_sampler_chain_n(sampler);
    int i       = 0;
    while (i < n && llama_sampler_chain_get(sampler, i)->iface == known.empty) {
        ++i;
    }
    return i + 1 == n && llama_sampler_chain_get(sampler, i)->iface == known.greedy;
}

// Returns the first of the largest; NaN is compared as the greedy sampler compares it.
int likeliest(const float * x, int n) {
    constexpr int BLOCK = 64;
    int best = 0, i = 1;
    for (; i + BLOCK <= n; i += BLOCK) {
        int larger = 0;
        for (int k = 0; k < BLOCK; ++k) {
            larger |= x[i + k] > x[best];
        }
        for (int k = 0; larger && k < BLOCK; ++k) {
            best = x[i + k] > x[best] ? i + k : best;
        }
    }
    for (; i < n; ++i) {
        best = x[i] > x[best] ? i : best;
    }
    return best;
}

}  // namespace

// The system may keep no clock for a thread: then this is elapsed time.
double sampling_clock::now() {
#ifdef CLOCK_THREAD_CPUTIME_ID
    timespec t;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0) {
        return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
    }
#endif
    return 1e-6 * (double) ggml_time_us();
}

// Returns the code of the exception being handled, and its message.
int32_t caught(std::string & message) {
    try {
        try {
            throw;
        } catch (const error & e) {
            message = e.what();
            return e.status;
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {  // a sampler's, of a grammar say
            message = e.what();
            return EAGLE3_E_INTERNAL;
        }
    } catch (const std::bad_alloc &) {
        message = "out of memory";
        return EAGLE3_E_MEMORY;
    }
}

int sample(llama_context * ctx, llama_sampler * sampler, int row) {
    require(llama_has_logits_ith(ctx, row), EAGLE3_E_ARGUMENT,
        format("the last decode has no logits in row %d", row));
    llama_take_exception();  // one that an earlier call left
    int token;
    if (takes_likeliest(sampler)) {
        const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
        token             = likeliest(llama_get_logits_ith(ctx, row), n_vocab);
        llama_sampler_accept(sampler, token);
    } else {
        token = llama_sampler_sample(sampler, ctx, row);
    }
    rethrow(llama_take_exception());
    return token;
}

}  // namespace eagle3
