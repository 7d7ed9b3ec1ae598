// See planner.hpp.
#include "planner/planner.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace eagle3 {

void planner::set(const costs & c) {
    clock_.set(c);
    rest_.reset();
}

void planner::learn(int source, int depth, int rank, float q, bool accepted, float & trust) {
    const calibration::rest now = rest_.rests_longest() ? calibration::rest::longest
                                  : rest_.is_resting()  ? calibration::rest::some
                                                        : calibration::rest::none;
    if (calibration_.learn(source, depth, rank, q, accepted, trust, now, clock_.n_slots())) {
        rest_.text_turned();
    }
}

// Says whether the head was right so rarely that a chain of one token does not pay by far.
bool planner::is_wrong() const {
    const float p = calibration_.mean_accept(1, 0, 1.0f);
    return clock_.n_slots() == 1 && ready() &&
           p < tune_.wrong * clock_.rate() *
                   (pass_seconds(1, true) + clock_.row_seconds(1, p) + clock_.back_seconds(1));
}

void planner::saw_round(round_record r) {
    const cost_clock::reading seen = clock_.saw_round(r);
    rest_.saw_round(r, seen);
}

planner::choice planner::best(const std::vector<float> & reach, int n_fixed) const {
    const int n_slots = clock_.n_slots();
    const float rate  = clock_.rate();
    choice c          = {0, (float) n_slots - rate * clock_.plain_seconds()};
    const int base    = clock_.n_roots() + n_fixed;
    float v           = c.value;
    const float rest  = n_fixed ? 0.0f : clock_.draft_rest();
    float accepted    = 0.0f;
    for (int i = 0; i < (int) reach.size() && base + i < MAX_ROWS; ++i) {
        v += reach[i] - rate * clock_.row_seconds(base + i, reach[i]);
        accepted += reach[i];
        const float more  = std::max(rest + clock_.back_seconds(i + 1, reach[i]), 0.0f);
        const float after = v - rate * (more + clock_.again_seconds(i + 1, accepted, reach[i]));
        if (after > c.value) {
            c = {i + 1, after};
        }
    }
    if (c.n == 0 && !reach.empty() && base < MAX_ROWS &&
        rest_.hopes(reach[0], rate, clock_.row_seconds(base, reach[0]) + clock_.back_seconds(1))) {
        c.n = 1;
    }
    return c;
}

// Tries each number of rows that all slots may have: what waits and what is drafted together. Those with
// fewer candidates need a pass less, and the others' rest one more.
planner::even_choice planner::best_even(
    const std::vector<int> & n_waiting, const std::vector<std::vector<float>> & reach, int most) const {
    const int n_slots = (int) reach.size(), longest = *std::max_element(n_waiting.begin(), n_waiting.end());
    even_choice best = {std::vector<int>(n_slots, 0), -INFINITY, {}};
    for (int rows = 0; rows <= longest + most; ++rows) {
        even_choice c = {{}, 0.0f, {}};
        std::vector<int> all;
        float none_fails = 1.0f, accepted = 0.0f, back = 0.0f;
        int n_drafted = 0;
        for (int i = 0; i < n_slots; ++i) {
            const int n = std::clamp(rows - n_waiting[i], 0, (int) reach[i].size());
            c.n.push_back(n);
            all.push_back(n_waiting[i] + 1 + n);
            n_drafted += n;
            back += n > 0 ? clock_.back_seconds(n, reach[i][n - 1]) : 0.0f;
            for (int k = 0; k < n; ++k) {
                accepted += reach[i][k];
            }
            none_fails *= n > 0 ? reach[i][n - 1] : 1.0f;
        }
        if (n_drafted > most) {
            break;
        }
        c.expected = {clock_.even_seconds(all, n_slots + n_drafted) + back, (float) n_slots + accepted};
        c.value    = c.expected.tokens - clock_.rate() * c.expected.seconds;
        c.value -= n_drafted ? clock_.rate() * clock_.again_seconds(n_drafted, accepted, none_fails) : 0.0f;
        best = c.value > best.value ? c : best;
    }
    return best;
}

// Returns how many of the last level's nodes, likeliest first, to go on from: as many as, with the levels
// that may follow, are expected to raise the value most.
int planner::grow_width(const std::vector<float> & reach, int depth, const std::vector<float> & level,
    int n_children, float trust, int n_fixed, float extra) const {
    int width  = 0;
    float most = best(reach, n_fixed).value;
    for (int w = 1; w <= (int) level.size(); w *= 2) {
        std::vector<float> all = reach, frontier(level.begin(), level.begin() + w);
        for (int m = 1; m <= tune_.ahead && (int) all.size() < MAX_ROWS - 1; ++m) {
            std::vector<float> next;
            for (const float p : frontier) {
                for (int k = 0; k < std::min(n_children, calibration::N_RANK); ++k) {
                    next.push_back(p * calibration_.mean_accept(depth + m, k, trust));
                }
            }
            std::sort(next.begin(), next.end(), std::greater<float>());
            const auto middle = all.insert(all.end(), next.begin(), next.end());
            std::inplace_merge(all.begin(), middle, all.end(), std::greater<float>());
            all.resize(std::min((int) all.size(), MAX_ROWS - 1));
            next.resize(std::min((int) next.size(), w));
            frontier      = std::move(next);
            const float v = best(all, n_fixed).value - clock_.rate() * (pass_seconds(w, false) * m + extra);
            if (v > most) {
                most  = v;
                width = w;
            }
        }
    }
    return width;
}

}  // namespace eagle3
