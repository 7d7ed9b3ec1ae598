// What the planner goes by: times of the parts of a round, measured on this machine.
#include "session.hpp"

#include "deferral.hpp"

namespace eagle3 {

float session::measure_target(int slot, int n) {
    slot_state & s = at(slot);
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(n >= 1 && n <= MAX_ROWS, EAGLE3_E_ARGUMENT, format("%d rows, expected 1..%d", n, MAX_ROWS));
    std::vector<int32_t> tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back((100 + 37 * i) % n_vocab_);  // any text costs the same
    }
    const deferral deferred(ctx_, true);
    const int64_t start = ggml_time_us();
    run_batch(slot, tokens.data(), n, true);
    llama_synchronize(ctx_);
    const float seconds = 1e-6f * (ggml_time_us() - start);
    require(llama_memory_seq_rm(memory_, slot, s.n_past, -1), EAGLE3_E_UNSUPPORTED,
        "the target cannot drop part of a sequence");
    return seconds;
}

float session::measure_output(int n) {
    const int64_t start = ggml_time_us();
    compute_logits(ctx_, 0, n);
    return 1e-6f * (ggml_time_us() - start);
}

float session::measure_head(int slot, int n) {
    const slot_state & s = at(slot);
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    require(n >= 1 && n <= MAX_ROWS && s.n_past + n <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("%d rows, expected 1..%d", n, MAX_ROWS));
    const std::vector<int32_t> tokens(n, 1);
    std::vector<int32_t> ids(n);
    std::vector<float> x((size_t) n * head_->n_embd, 0.1f), probs(n);
    pass p;
    p.rows              = pass::chain(slot, tokens.data(), s.n_past, s.head_from, n, n);
    p.x                 = x.data();
    p.k                 = 1;
    p.ids               = ids.data();
    p.probs             = probs.data();
    const int64_t start = ggml_time_us();
    runner_->run(p);
    return 1e-6f * (ggml_time_us() - start);
}

}  // namespace eagle3
