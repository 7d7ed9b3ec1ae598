// These are rounds of one slot, one after the other, for as long as nothing is drafted.
#include "session/round.hpp"

#include <algorithm>

namespace eagle3 {

namespace {

// Returns the seconds since it was asked last.
class stopwatch {
  public:
    float seconds() {
        const int64_t last = last_;
        last_              = ggml_time_us();
        return 1e-6f * (last_ - last);
    }

  private:
    int64_t last_ = ggml_time_us();
};

// Returns the ask with a draft of no more tokens than are left of the text, less the one that the target
// samples after them. A draft that the caller brings is its own matter.
ask cut(ask a, int max_tokens) {
    const int most = max_tokens - 1;
    if (a.kind == EAGLE3_GIVEN || a.kind == EAGLE3_PROMPT) {
        return a;
    }
    if (most < 1) {
        a.kind = EAGLE3_PLAIN;
    }
    if (a.kind == EAGLE3_PLANNED && a.depth >= 0) {
        a.depth = a.depth > 0 ? std::min(a.depth, most) : most;
    }
    a.n_max = std::min(a.n_max, most);
    a.n     = std::min(a.n, most);
    return a;
}

}  // namespace

void round::plain_rounds(ask a, llama_sampler * sampler, eagle3_run & out) {
    out.n_tokens = out.drafted = 0;
    out.draft_s = out.target_s = out.verify_s = 0.0f;
    require(sampler != nullptr, EAGLE3_E_ARGUMENT, "a sampler is NULL");
    const int most      = std::min(out.n, (int) EAGLE3_MAX_ROWS);
    const int64_t start = ggml_time_us();
    stopwatch watch;
    for (bool more = true; more;) {
        out.drafted = draft({out.max_tokens > 0 ? cut(a, out.max_tokens - out.n_tokens) : a});
        out.draft_s += watch.seconds();
        if (out.drafted > 0) {
            return;
        }
        decode();
        out.target_s += watch.seconds();
        a.token = sample_plain(sampler);
        out.verify_s += watch.seconds();
        const int32_t keep = 1;
        commit(&keep);
        watch.seconds();
        out.tokens[out.n_tokens++] = a.token;
        const float took           = 1e-6f * (ggml_time_us() - start);
        more = out.n_tokens < most && took * (1.0f + 1.0f / out.n_tokens) <= out.seconds &&
               !llama_vocab_is_eog(llama_model_get_vocab(llama_get_model(slots_.ctx)), a.token);
    }
}

// Samples the row of a round without a draft. If that fails, the round ends, and the row does not stay.
int32_t round::sample_plain(llama_sampler * sampler) {
    int32_t token = 0, count = 0;
    std::string failure;
    try {
        verify(&sampler, &token, &count, failure);
        require(count > 0, (eagle3_status) count, failure);
    } catch (...) {
        const int32_t none = 0;
        commit(&none);
        throw;
    }
    return token;
}

}  // namespace eagle3
