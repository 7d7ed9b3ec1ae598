// Verification samples along the draft, and computes the rows of the output matrix that it needs.
#include "session/round.hpp"

#include "target/deferral.hpp"
#include "sampling/sampling.hpp"

#include <algorithm>

namespace eagle3 {

void round::begin_paths() {
    for (const int slot : of_) {
        slot_round & r = slots_.at(slot).round;
        r.path.reserve(r.tokens.size());
        r.path.assign(1, 0);
        r.sampling_s = 0.0f;
        r.failure    = EAGLE3_OK;
    }
}

// Says whether the reach of every draft token is known: a draft that a caller brought says nothing.
bool round::knows_reach() const {
    return std::all_of(of_.begin(), of_.end(), [&](int slot) {
        const slot_state & s = slots_.at(slot);
        return s.draft.reach.size() + 1 == s.round.tokens.size();
    });
}

// Computes the reach of each row, given the path that each slot's verification has taken so far.
void round::reach_now() {
    reach_.assign(slot_of_.size(), 0.0f);
    for (const int slot : of_) {
        const slot_state & s = slots_.at(slot);
        const int now        = s.round.path.back();
        const auto reach     = [&](int row) {
            return row == 0 ? 1.0f : row - 1 < (int) s.draft.reach.size() ? s.draft.reach[row - 1] : 1.0f;
        };
        std::vector<bool> below(s.round.tokens.size(), false);
        for (int row = now; row < (int) s.round.tokens.size() && s.round.under_way; ++row) {
            below[row] = row == now || (s.round.parents[row] >= now && below[s.round.parents[row]]);
            if (below[row]) {
                reach_[s.round.at[row]] = reach(row) / std::max(reach(now), 1e-6f);
            }
        }
    }
}

// Computes the logits of a row of the batch unless they are there, and with them those of the rows after it
// that are likely enough to be reached.
void round::need_logits(int row) {
    if (llama_logits_stay_ith(slots_.ctx, row)) {
        read_ahead(row);
    }
    if (llama_has_logits_ith(slots_.ctx, row)) {
        return;
    }
    reach_now();
    const int n         = planner_.piece(reach_, row);
    const int64_t start = ggml_time_us();
    compute_logits(slots_.ctx, row, n);
    const float seconds = 1e-6f * (ggml_time_us() - start);
    planner_.saw_piece(n, seconds);
    output_seconds_ += seconds;
}

// Reads the logits of a row from the device, and with them those of the rows after it that are likely
// reached: a row takes about as long as a wait.
void round::read_ahead(int row) {
    reach_now();
    int n = 1;
    while (row + n < (int) reach_.size() && reach_[row + n] >= 0.5f) {
        ++n;
    }
    llama_read_logits(slots_.ctx, row, n);
}

// Samples a row, which the device may have decided already.
int round::sample_at(int row, llama_sampler * sampler, float & seconds) {
    int token;
    {
        const sampling_clock clock(seconds);
        if (sample_found(slots_.ctx, sampler, row, token)) {
            return token;
        }
    }
    need_logits(row);
    const sampling_clock clock(seconds);
    return sample(slots_.ctx, sampler, row);
}

// Samples at the end of the slot's path. If a draft token agrees, the path continues with it, and the result
// is 1; else it is 0.
int round::sample_row(slot_round & r, llama_sampler * sampler, int32_t & token) {
    const int row = r.path.back(), n_rows = (int) r.tokens.size();
    token     = sample_at(r.at[row], sampler, r.sampling_s);
    r.sampled = row == 0 ? token : r.sampled;
    int next  = row + 1;
    while (next < n_rows && !(r.parents[next] == row && r.tokens[next] == token)) {
        ++next;
    }
    if (next == n_rows || llama_vocab_is_eog(llama_model_get_vocab(llama_get_model(slots_.ctx)), token)) {
        return 0;
    }
    r.path.push_back(next);
    return 1;
}

int round::failure_of(int i) const {
    require(sampled_ && i >= 0 && i < (int) of_.size(), EAGLE3_E_ARGUMENT,
        format("the last decode is no verified round with an ask %d", i));
    return slots_.at(of_[i]).round.failure;
}

int round::verified_row(int slot, int i) const {
    const slot_round & r = slots_.at(slot).round;
    require(sampled_ && std::find(of_.begin(), of_.end(), slot) != of_.end(), EAGLE3_E_ARGUMENT,
        format("slot %d sampled no rows of the last decode", slot));
    require(i >= 0 && i < (int) r.path.size(), EAGLE3_E_ARGUMENT,
        format("the last round sampled %zu rows, not %d", r.path.size(), i + 1));
    return r.at[r.path[i]];
}

}  // namespace eagle3
