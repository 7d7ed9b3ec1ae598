// These are rounds of one slot, one after the other, for as long as nothing is drafted.
#include "round.hpp"

#include <algorithm>

namespace eagle3 {

namespace {

// Adds the seconds since it was asked last.
class stopwatch {
  public:
    void add_to(float & sum) {
        const int64_t now = ggml_time_us();
        sum += 1e-6f * (now - last_);
        last_ = now;
    }

  private:
    int64_t last_ = ggml_time_us();
};

// Says that one token less is to come. A depth of all that a draft can have is no limit.
void shorten(ask & a) {
    if (a.kind == EAGLE3_PLANNED && a.depth > 0 && a.depth < MAX_DRAFT && --a.depth == 0) {
        a.n_max = 0;
    }
}

}  // namespace

void round::plain_rounds(ask a, llama_sampler * sampler, eagle3_run & run) {
    run.n_tokens = run.drafted = 0;
    run.draft_s = run.target_s = run.verify_s = run.other_s = 0.0f;
    require(sampler != nullptr, EAGLE3_E_ARGUMENT, "a sampler is NULL");
    const int most      = std::min(run.n, (int) EAGLE3_MAX_ROWS);
    const int64_t start = ggml_time_us();
    stopwatch watch;
    for (bool more = true; more;) {
        run.drafted = draft({a});
        watch.add_to(run.draft_s);
        if (run.drafted > 0) {
            return;
        }
        decode();
        watch.add_to(run.target_s);
        a.token = sample_plain(sampler);
        watch.add_to(run.verify_s);
        const int32_t keep = 1;
        commit(&keep);
        watch.add_to(run.other_s);
        run.tokens[run.n_tokens++] = a.token;
        shorten(a);
        const float took = 1e-6f * (ggml_time_us() - start);
        more             = run.n_tokens < most && took * (1.0f + 1.0f / run.n_tokens) <= run.seconds &&
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
