#include "planner.hpp"

#include "error.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace eagle3 {

namespace {

constexpr float LEAST_COST = 1e-9f, MOST_COST = 1e4f;  // seconds: what sums and quotients are safe with
constexpr float MOST_CONTEXT = 1e9f;

// Of a decode with fewer positions than its measure had: nothing makes it this much cheaper.
constexpr float LEAST_SHARE = 0.1f;

}  // namespace

void check(const costs & c) {
    const auto in = [](float v, float least, float most) {
        return v >= least && v <= most;  // false for NaN
    };
    for (int i = 1; i <= MAX_ROWS; ++i) {
        for (const float v : {c.layers[i], c.head[i]}) {
            require(in(v, LEAST_COST, MOST_COST), EAGLE3_E_ARGUMENT,
                format("a cost of %d rows is %g s, expected %g..%g", i, v, LEAST_COST, MOST_COST));
        }
        for (const float v : {c.output[i], c.cell[i]}) {
            require(in(v, 0.0f, MOST_COST), EAGLE3_E_ARGUMENT,
                format("a cost of %d rows is %g s, expected 0..%g", i, v, MOST_COST));
        }
    }
    require(in(c.first, 0.0f, MOST_COST), EAGLE3_E_ARGUMENT,
        format("the cost of the first pass is %g s, expected 0..%g", c.first, MOST_COST));
    require(in(c.context, 0.0f, MOST_CONTEXT), EAGLE3_E_ARGUMENT,
        format("the costs were measured at %g positions, expected 0..%g", c.context, MOST_CONTEXT));
}

void planner::set(const costs & c) {
    costs_    = c;
    foreseen_ = {};
    n_slots_  = 1;
    mode fresh;
    fresh.hope = tune_.hope_anew;
    modes_.fill(fresh);
    begin(1, c.context);
}

void planner::begin(int n_slots, float n_past) {
    n_slots_ = n_slots;
    context_ = n_past;
    if (at().seconds == 0.0f) {
        at().tokens  = (float) n_slots;
        at().seconds = plain_seconds();
    }
}

// Several slots' texts are a mixture that one more hardly changes. Where drafts did not pay for many texts,
// the next one is given up sooner: part of the rest stays. A prompt of several pieces begins one text.
void planner::new_text() {
    mode & m   = modes_[1];
    m.asleep   = 0;
    m.nap      = m.begun ? (int) (tune_.keep_nap * (float) m.nap) : m.nap;
    m.begun    = false;
    m.gain     = std::min(m.gain, 0.0f);
    m.n_drafts = std::min(m.n_drafts, tune_.min_drafts - tune_.probes);
}

// -- what is known ----------------------------------------------------------------------------------------

// Of the layers, with n rows, in the costs that were set.
float planner::measured(int n) const {
    const float here = costs_.layers[n] + costs_.cell[n] * (context_ - costs_.context);
    return std::max(here, LEAST_SHARE * costs_.layers[n]);
}

// With the output matrix for all of them.
float planner::measured_whole(int n) const {
    return measured(n) + costs_.output[n];
}

float planner::layers(int n) const {
    return measured(n) * at().plain.value * (n == n_slots_ ? 1.0f : at().drafted.value * at().sizes[n].value);
}

float planner::plain_seconds() const {
    return layers(n_slots_) + costs_.output[n_slots_] * at().plain.value + at().plain_rest;
}

// What all looks say. Rounds with drafts say nothing of it: a machine whose memory is busy may have the more
// time for arithmetic.
float planner::usual_seconds() const {
    const float whole = measured_whole(n_slots_);
    return whole * at().usual.value(N_USUAL * whole);
}

float planner::rate() const {
    return std::max(
        at().tokens / std::max(at().seconds, 1e-9f), (float) n_slots_ / std::max(plain_seconds(), 1e-9f));
}

// -- choices ----------------------------------------------------------------------------------------------

// The pieces that take least for the rows from i on. What was not tried for long, of one row and of several,
// is taken to cost a part of what is thought, so that it is tried: nothing else would show that the
// measurement was wrong.
planner::pieces_of planner::pieces(
    const std::vector<float> & reach, int i, float try_two, float try_piece) const {
    const int n_rows = (int) reach.size();
    std::array<float, MAX_ROWS + 2> rest{}, seconds{};
    for (int m = 1; m <= n_rows; ++m) {
        const factor & f = m == 1 ? at().one : at().many;
        seconds[m]       = output(m) * (f.weight >= tune_.stale      ? 1.0f
                                           : m == 2 && n_slots_ == 1 ? try_two
                                                                     : try_piece);
    }
    int best = 1;
    for (int k = n_rows - 1; k >= i; --k) {
        rest[k] = INFINITY;
        for (int m = 1; k + m <= n_rows; ++m) {
            const float cost = reach[k] * seconds[m] + rest[k + m];
            if (cost < rest[k]) {
                rest[k] = cost;
                best    = m;
            }
        }
    }
    return {best, rest[i]};
}

// Of a piece of the output matrix.
float planner::output(int n) const {
    return costs_.output[n] * at().plain.value * (n == 1 ? at().one : at().many).value;
}

// A row of the output matrix is computed with those before it, or when it is reached, whichever is less.
float planner::row_seconds(int i, float reach) const {
    return layers(i + 1) - layers(i) + std::min(reach * output(1), std::max(output(i + 1) - output(i), 0.0f));
}

planner::choice planner::best(const std::vector<float> & reach, int n_fixed) const {
    choice c       = {0, (float) n_slots_ - rate() * plain_seconds()};
    const int base = n_slots_ + n_fixed;
    float v        = c.value - (n_fixed ? 0.0f : rate() * std::max(at().draft_rest, 0.0f));
    for (int i = 0; i < (int) reach.size() && base + i < MAX_ROWS; ++i) {
        v += reach[i] - rate() * row_seconds(base + i, reach[i]);
        if (v > c.value) {
            c = {i + 1, v};
        }
    }
    if (c.n == 0 && at().hope < NO_HOPE && !reach.empty() && base < MAX_ROWS &&
        reach[0] > at().hope * rate() * row_seconds(base, reach[0])) {
        c.n = 1;
    }
    return c;
}

planner::expectation planner::foresee(const std::vector<float> & reach, int n_fixed, float passes_s) const {
    const int n   = std::min(n_slots_ + n_fixed + (int) reach.size(), MAX_ROWS);
    float seconds = plain_seconds() + passes_s, tokens = (float) n_slots_;
    if (n > n_slots_) {
        std::vector<float> rows(n_slots_ + n_fixed, 1.0f);
        rows.insert(rows.end(), reach.begin(), reach.end());
        rows.resize(n);
        seconds += layers(n) - layers(n_slots_) - costs_.output[n_slots_] * at().plain.value +
                   pieces(rows, 0, 1.0f, 1.0f).seconds + at().draft_rest;
    }
    for (const float p : reach) {
        tokens += p;
    }
    return {seconds, tokens};
}

// Of the last level's nodes, likeliest first, how many to go on from: as many as, with the levels that may
// follow, are expected to raise the value most.
int planner::grow_width(const std::vector<float> & reach, int depth, const std::vector<float> & level,
    int n_children, float trust, int n_fixed, float extra) const {
    int width  = 0;
    float most = best(reach, n_fixed).value;
    for (int w = 1; w <= (int) level.size(); w *= 2) {
        std::vector<float> all = reach, front(level.begin(), level.begin() + w);
        for (int m = 1; m <= tune_.ahead && (int) all.size() < MAX_ROWS - 1; ++m) {
            std::vector<float> next;
            for (const float p : front) {
                for (int k = 0; k < std::min(n_children, N_RANK); ++k) {
                    next.push_back(p * mean_accept(depth + m, k, trust));
                }
            }
            std::sort(next.begin(), next.end(), std::greater<float>());
            const auto middle = all.insert(all.end(), next.begin(), next.end());
            std::inplace_merge(all.begin(), middle, all.end(), std::greater<float>());
            all.resize(std::min((int) all.size(), MAX_ROWS - 1));
            next.resize(std::min((int) next.size(), w));
            front         = std::move(next);
            const float v = best(all, n_fixed).value - rate() * (pass_seconds(w, false) * m + extra);
            if (v > most) {
                most  = v;
                width = w;
            }
        }
    }
    return width;
}

}  // namespace eagle3
