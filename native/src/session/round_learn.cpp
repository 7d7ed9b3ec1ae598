// This teaches the planner what a round shows.
#include "session/round.hpp"

#include <algorithm>
#include <array>

namespace eagle3 {

// Teaches the planner which of the draft tokens that verification reached were accepted, for each source that
// offered them. What drafts were worth before a prompt is of another text.
void round::learn(slot_state & s) {
    if (s.round.of_prompt) {
        planner_.new_text();
        s.trust.fill(1.0f);
        return;
    }
    const int n_rows             = (int) s.round.tokens.size();
    const std::vector<int> depth = depths(s.round.parents.data(), n_rows);
    std::vector<std::array<int, N_RECORDS>> children(n_rows);
    for (int row = 1; row < n_rows && n_rows - 1 == (int) s.draft.evidence.size(); ++row) {
        const int parent    = s.round.parents[row];
        const auto at_path  = std::find(s.round.path.begin(), s.round.path.end(), parent);
        const bool reached  = at_path != s.round.path.end();
        const bool accepted = reached && at_path + 1 != s.round.path.end() && at_path[1] == row;
        for (int from = 0; from < N_RECORDS; ++from) {
            const float q = s.draft.evidence[row - 1][from];
            if (q == NOT_OFFERED) {
                continue;
            }
            const int rank = children[parent][from]++;
            if (reached) {
                planner_.learn(from, depth[row], rank, q, accepted, s.trust[from]);
            }
        }
    }
    learn_undrafted(s);
}

// Teaches the planner which of the first tokens that were offered and not drafted the target sampled.
void round::learn_undrafted(slot_state & s) {
    std::array<int, N_RECORDS> ranks{};
    for (const slot_draft::first_token & v : s.draft.undrafted) {
        for (int from = 0; from < N_RECORDS && s.round.sampled >= 0; ++from) {
            if (v.evidence[from] != NOT_OFFERED) {
                planner_.learn(
                    from, 1, ranks[from]++, v.evidence[from], v.token == s.round.sampled, s.trust[from]);
            }
        }
    }
}

// Tells the planner how long the round took and how many tokens it brought.
void round::tell_planner(int n_tokens) {
    if (!drafter_.last().planned) {
        return;
    }
    planner::round r;
    r.n_rows     = (int) slot_of_.size();
    r.tried      = drafter_.last().steps > 0;
    r.layers_s   = layers_seconds_;
    r.whole      = whole_;
    r.draft_s    = drafter_.last().seconds;
    r.total_s    = 1e-6f * (ggml_time_us() - drafter_.last().start);
    r.gathered_s = 1e-6f * (drafter_.last().start - drafter_.last().began);
    r.before_s   = told_ ? 1e-6f * (drafter_.last().began - told_) : INFINITY;
    r.n_tokens   = n_tokens;
    r.n_copies   = n_copies_;
    r.value      = drafter_.last().value;
    r.base       = drafter_.last().base;
    r.offered    = drafter_.last().offered;
    r.output_s   = output_seconds_;
    r.passes_s   = drafter_.last().passes_seconds;
    r.expected   = drafter_.last().expected;
    planner_.saw_round(r);
    told_ = ggml_time_us();
}

}  // namespace eagle3
