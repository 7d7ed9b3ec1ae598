// See calibration.hpp.
#include "planner/calibration.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

namespace {

int bin_of(float q) {
    const auto & edges = tally_limits::edges;
    return (int) (std::upper_bound(std::begin(edges), std::end(edges), q) - std::begin(edges));
}

}  // namespace

// Returns what a source's own estimate is worth, by all of its first tokens: less where they were right more
// rarely than it said. A text that nothing foresees would else have to show that to each bin, and a head that
// is sure and wrong would draft for long: a bin leans on its estimate.
float calibration::estimate(int source, float q) const {
    const record & c = records_[source];
    if (source >= MAX_SOURCES || c.first.tries == 0.0f) {
        return q;
    }
    if (source == PASSES) {  // rarely sure: a part of its probability, as trust is
        return q * std::min((c.first.hits + tune_.shared) / (c.expected + tune_.shared), 1.0f);
    }
    const float n = of_text_.shared, seen = (c.first.hits + n) / (c.first.tries - c.first.hits + n),
                said = (c.expected + n) / (c.first.tries - c.expected + n);
    const float odds = std::clamp(seen / said, 1.0f / of_text_.most_shared, 1.0f);
    return q * odds / (q * odds + (1.0f - q));
}

// A bin with few observations leans on the same one a level above, and the first level leans on the source's
// estimate.
float calibration::accept(int source, int depth, float q, float trust) const {
    const int bin = bin_of(q);
    float p       = estimate(source, q);
    for (int d = 0; d < std::min(depth, N_DEPTH); ++d) {
        const tally & t = records_[source].bins[d][bin];
        p               = (t.hits + tune_.prior * p) / (t.tries + tune_.prior);
    }
    // a head's guesses are rarely sure; the text's often are, and stay below 1
    return source == PASSES ? std::min(p * trust, 1.0f) : p * trust / (1.0f - p + p * trust);
}

float calibration::mean_accept(int depth, int rank, float trust) const {
    float p = rank == 0 ? tune_.first_guess : tune_.next_guess;
    for (int d = 0; d < std::min(depth, N_DEPTH); ++d) {
        const tally & t = records_[PASSES].ranks[d][rank];
        p               = (t.hits + tune_.prior * p) / (t.tries + tune_.prior);
    }
    return std::min(p * trust, 1.0f);
}

bool calibration::learn(
    int source, int depth, int rank, float q, bool accepted, float & trust, rest now, int n_slots) {
    const float surprise = (accepted ? 1.0f : 0.0f) - accept(source, depth, q, trust);
    // what was found last weighs more than the tallies can: texts turn
    const bool resting = source == PASSES && depth == 1 && now == rest::longest;
    const float step   = source != PASSES ? of_text_.trust_step
                         : resting        ? tune_.trust_step_resting
                                          : tune_.trust_step;
    trust *= std::exp(step * surprise);  // bounded: what is hardly trusted hardly surprises, nor what is sure

    const int d         = std::min(depth, N_DEPTH) - 1;
    record & c          = records_[source];
    const bool is_first = depth == 1;
    for (tally * t :
        {&c.bins[d][bin_of(q)], rank < N_RANK ? &c.ranks[d][rank] : nullptr, is_first ? &c.first : nullptr}) {
        if (t) {
            t->tries = t->tries * tune_.keep_tally + 1.0f;
            t->hits  = t->hits * tune_.keep_tally + (accepted ? 1.0f : 0.0f);
        }
    }
    c.expected = is_first ? c.expected * tune_.keep_tally + q : c.expected;
    return source == PASSES && is_first && has_turned(c, rank, surprise, trust, now != rest::none, n_slots);
}

// Finds out whether a text that drafts did not pay for has turned into one that can be foreseen: then what
// was learnt is of another text. What nobody drafts is rarely learnt from, so trust and the tallies would
// take for ever.
bool calibration::has_turned(record & c, int rank, float surprise, float & trust, bool rests, int n_slots) {
    c.surprise = rests ? c.surprise * (rank == 0 ? tune_.keep_surprise : 1.0f) + surprise : 0.0f;
    c.excess   = rank == 0 ? c.excess * tune_.keep_excess + surprise : c.excess;
    if (c.pardons > 0 && rank == 0) {
        --c.pardons;
        trust = std::max(trust, 1.0f);
    }
    if (c.surprise > tune_.turned || c.excess > tune_.turned_awake) {
        c         = record();
        c.pardons = tune_.pardons * n_slots;
        trust     = std::max(trust, 1.0f);
        return true;
    }
    return false;
}

}  // namespace eagle3
