// What the planner goes by: times of the parts of a round, measured on this machine.
#include "session.hpp"

#include "deferral.hpp"

namespace eagle3 {

float session::measure_target(int slot, int n) {
    const slot_state & s = at(slot);
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
    require(drop_from(slot, s.n_past), EAGLE3_E_UNSUPPORTED,
        format("the target cannot drop part of a sequence: slot %d is empty now", slot));
    return seconds;
}

float session::measure_output(int n) {
    const int64_t start = ggml_time_us();
    compute_logits(ctx_, 0, n);
    return 1e-6f * (ggml_time_us() - start);
}

float session::measure_head(int slot, int n) {
    const slot_state & s = at(slot);
    head_source & head   = need_head();
    require(n >= 1 && n <= MAX_ROWS && s.n_past + n <= n_ctx_, EAGLE3_E_ARGUMENT,
        format("%d rows, expected 1..%d", n, MAX_ROWS));
    return head.measure(slot, s.n_past, n);
}

}  // namespace eagle3
