#include "sampling/sampling.hpp"

#include "error.hpp"
#include "sampling/grammar_mask.hpp"
#include "sampling/largest.hpp"
#include "sampling/sampler_kinds.hpp"
#include "sampling/thoughts.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <ctime>
#include <new>
#include <vector>

namespace eagle3 {

namespace {

// Says whether a sampler takes the likeliest token of the logits as they are.
bool takes_likeliest(llama_sampler * sampler) {
    const sampler_kinds & known = sampler_kinds::known();
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

int n_vocab_of(const llama_context * ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
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

// This is how many of the largest logits samplers with top-k go on from: its usual 40, and N_LOWERED tokens
// that penalties lower may be among them.
constexpr int N_FOUND = 128, N_LOWERED = 64;
static_assert(N_FOUND <= LLAMA_MAX_LARGEST);

// Returns k if the sampler goes on from the k largest logits, after others that can only have lowered some of
// them; else 0. The first `cut` of the chain are these others.
int kept_by(llama_sampler * sampler, int & cut) {
    for (cut = 0; link(sampler, cut) != nullptr; ++cut) {
        const int k = lets_through(sampler, cut);
        if (k >= 0) {
            return k;
        }
    }
    return 0;
}

bool larger(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit;
}

// Says whether the sampler keeps the same tokens of these, in the same order, as of the whole row. No other
// token of the row has a larger logit than the least of these. Equal logits could be ordered in two ways.
bool decide(std::vector<llama_token_data> found, llama_sampler * sampler) {
    int cut;
    const int k = kept_by(sampler, cut);
    if (k == 0 || k >= (int) found.size()) {
        return false;
    }
    const float others = std::max_element(found.begin(), found.end(), larger)->logit;  // at most so large
    llama_token_data_array all = {found.data(), found.size(), -1, false};
    for (int i = 0; i < cut; ++i) {
        llama_sampler_apply(link(sampler, i), &all);
    }
    if (std::any_of(found.begin(), found.end(), is_nan)) {
        return false;
    }
    std::sort(found.begin(), found.end(), larger);
    const auto follows = [](const llama_token_data & a, const llama_token_data & b) {
        return !larger(a, b);
    };
    return found[k - 1].logit > others &&
           std::adjacent_find(found.begin(), found.begin() + k + 1, follows) == found.begin() + k + 1;
}

// Samples from the largest logits of a row, in any order. Returns LLAMA_TOKEN_NULL, and the sampler is as
// before, where they do not decide. Nothing accepts the token yet.
int take_from(std::vector<llama_token_data> found, llama_sampler * sampler) {
    if (found.empty() || !decide(found, sampler)) {
        return LLAMA_TOKEN_NULL;
    }
    llama_token_data_array all = {found.data(), found.size(), -1, false};
    llama_sampler_apply(sampler, &all);
    return selected_of(all);
}

// Does the same, of a whole row: a list of all candidates takes longer to make and to sort than the row to
// read.
int take_from(const float * logits, int n_vocab, llama_sampler * sampler) {
    int cut;
    const int k = kept_by(sampler, cut);
    if (k == 0 || k >= N_FOUND) {
        return LLAMA_TOKEN_NULL;
    }
    bool lowers = false;
    for (int i = 0; i < cut; ++i) {
        lowers = lowers || link(sampler, i)->iface != sampler_kinds::known().empty;
    }
    return take_from(first_of(logits, n_vocab, k + 1 + (lowers ? N_LOWERED : 0)), sampler);
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
    int token;
    if (takes_likeliest(sampler)) {
        token = likeliest(llama_get_logits_ith(ctx, row), n_vocab_of(ctx));
        llama_sampler_accept(sampler, token);
    } else if (grammar_mask mask(sampler); mask.is_lazy()) {
        token = mask.sample(llama_get_logits_ith(ctx, row), n_vocab_of(ctx));
        llama_sampler_accept(sampler, token);
    } else if ((token = take_from(llama_get_logits_ith(ctx, row), n_vocab_of(ctx), sampler)) !=
               LLAMA_TOKEN_NULL) {
        llama_sampler_accept(sampler, token);
    } else {
        token = llama_sampler_sample(sampler, ctx, row);
    }
    return token;
}

bool sample_found(llama_context * ctx, llama_sampler * sampler, int row, int & token) {
    if (!llama_logits_stay_ith(ctx, row)) {
        return false;
    }
    int best = LLAMA_TOKEN_NULL;
    if (takes_likeliest(sampler)) {
        best = llama_get_likeliest_ith(ctx, row);
    } else {
        std::vector<llama_token_data> found(LLAMA_MAX_LARGEST);
        found.resize(llama_get_largest_ith(ctx, row, found.data()));
        grammar_mask mask(sampler);
        best = mask.is_lazy() ? mask.take_from(found) : take_from(found, sampler);
    }
    if (best == LLAMA_TOKEN_NULL) {
        return false;
    }
    llama_sampler_accept(sampler, best);
    token = best;
    return true;
}

int n_largest_for(llama_sampler * sampler) {
    int cut;
    const grammar_mask mask(sampler);
    const int k = mask.only_lowers() ? mask.k() : kept_by(sampler, cut);
    return takes_likeliest(sampler) ? 1 : k > 0 && k < N_FOUND ? N_FOUND : 0;
}

}  // namespace eagle3
