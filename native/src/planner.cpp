#include "planner.hpp"

#include "error.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace eagle3 {

namespace {

constexpr float NO_HOPE = INFINITY;

const float EDGES[] = {0.02f, 0.05f, 0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 0.9f, 0.97f};

int bin_of(float q) {
    return (int) (std::upper_bound(std::begin(EDGES), std::end(EDGES), q) - std::begin(EDGES));
}

}  // namespace

void check(const costs & c) {
    for (int i = 1; i <= MAX_ROWS; ++i) {
        for (const float v : {c.layers[i], c.head[i]}) {
            require(std::isfinite(v) && v > 0.0f, EAGLE3_E_ARGUMENT,
                format("the costs of %d rows are not positive", i));
        }
        for (const float v : {c.output[i], c.cell[i]}) {
            require(std::isfinite(v) && v >= 0.0f, EAGLE3_E_ARGUMENT,
                format("the costs of %d rows are negative or not finite", i));
        }
    }
    for (const float v : {c.first, c.other, c.context}) {
        require(std::isfinite(v) && v >= 0.0f, EAGLE3_E_ARGUMENT, "a cost is negative or not finite");
    }
}

void planner::set(const costs & c) {
    costs_   = c;
    n_slots_ = 1;
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

// Several slots' texts are a mixture that one more hardly changes.
void planner::new_text() {
    mode & m = modes_[1];
    m.asleep = m.nap = 0;
    m.gain           = std::min(m.gain, 0.0f);
    m.n_drafts       = std::min(m.n_drafts, tune_.min_drafts - tune_.probes);
}

// -- what is known ----------------------------------------------------------------------------------------

float planner::layers(int n) const {
    const float measured = costs_.layers[n] + costs_.cell[n] * (context_ - costs_.context);
    return measured * at().plain.value * (n == n_slots_ ? 1.0f : at().drafted.value * at().sizes[n].value);
}

float planner::plain_seconds() const {
    return layers(n_slots_) + costs_.output[n_slots_] * at().plain.value + at().plain_rest;
}

float planner::rate() const {
    return std::max(
        at().tokens / std::max(at().seconds, 1e-9f), (float) n_slots_ / std::max(plain_seconds(), 1e-9f));
}

// A bin with few observations leans on the same one a level above, the first level on the source's own
// estimate.
float planner::accept(int source, int depth, float q, float trust) const {
    const int bin = bin_of(q);
    float p       = q;
    for (int d = 0; d < std::min(depth, N_DEPTH); ++d) {
        const tally & t = calibrations_[source].bins[d][bin];
        p               = (t.hits + tune_.prior * p) / (t.tries + tune_.prior);
    }
    return std::min(p * trust, 1.0f);
}

float planner::mean_accept(int depth, int rank, float trust) const {
    float p = rank == 0 ? tune_.first_guess : tune_.next_guess;
    for (int d = 0; d < std::min(depth, N_DEPTH); ++d) {
        const tally & t = calibrations_[0].ranks[d][rank];
        p               = (t.hits + tune_.prior * p) / (t.tries + tune_.prior);
    }
    return std::min(p * trust, 1.0f);
}

void planner::learn(int source, int depth, int rank, float q, bool accepted, float & trust) {
    const float surprise = (accepted ? 1.0f : 0.0f) - accept(source, depth, q, trust);
    // what was found last weighs more than the tallies can: texts turn
    const float step = depth == 1 && at().nap == tune_.nap_most ? tune_.trust_step_resting : tune_.trust_step;
    trust            = std::clamp(trust * std::exp(step * surprise), tune_.trust_least, tune_.trust_most);

    const int d     = std::min(depth, N_DEPTH) - 1;
    calibration & c = calibrations_[source];
    for (tally * t : {&c.bins[d][bin_of(q)], rank < N_RANK ? &c.ranks[d][rank] : nullptr}) {
        if (t) {
            t->tries = t->tries * tune_.keep_tally + 1.0f;
            t->hits  = t->hits * tune_.keep_tally + (accepted ? 1.0f : 0.0f);
        }
    }
    if (depth == 1) {
        look_for_turn(c, rank, surprise, trust);
    }
}

// Whether a text that drafts did not pay for has turned into one that can be foreseen: then what was learnt
// is of another text. What nobody drafts is rarely learnt from, so trust and the tallies would take for ever.
void planner::look_for_turn(calibration & c, int rank, float surprise, float & trust) {
    mode & m         = at();
    const bool rests = m.nap > 0;
    c.surprise       = rests ? c.surprise * (rank == 0 ? tune_.keep_surprise : 1.0f) + surprise : 0.0f;
    c.excess         = rank == 0 ? c.excess * tune_.keep_excess + surprise : c.excess;
    m.n_idle         = c.surprise > tune_.curious ? 0 : m.n_idle;
    if (c.pardons > 0 && rank == 0) {
        --c.pardons;
        trust = std::max(trust, 1.0f);
    }
    if (c.surprise > tune_.turned || c.excess > tune_.turned_awake) {
        c         = calibration();
        c.pardons = tune_.pardons * n_slots_;
        trust     = std::max(trust, 1.0f);
        m.forget_drafts();
        m.hope = tune_.hope_anew;
    }
}

// -- choices ----------------------------------------------------------------------------------------------

// What was not tried for long, of one row and of several, is taken to cost less, so that it is tried: nothing
// else would show that the measurement was wrong.
int planner::piece(const std::vector<float> & reach, int i) const {
    const int n_rows = (int) reach.size();
    std::array<float, MAX_ROWS + 2> rest{}, seconds{};
    for (int m = 1; m <= n_rows; ++m) {
        const factor & f = m == 1 ? at().one : at().many;
        seconds[m]       = output(m) * (f.weight >= tune_.stale      ? 1.0f
                                           : m == 2 && n_slots_ == 1 ? tune_.try_two
                                                                     : tune_.try_piece);
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
    return best;
}

// Of a piece of the output matrix.
float planner::output(int n) const {
    return costs_.output[n] * at().plain.value * (n == 1 ? at().one : at().many).value;
}

// A row of the output matrix is computed with those before it, or when it is reached, whichever is less.
float planner::row_seconds(int i, float reach) const {
    return layers(i + 1) - layers(i) + std::min(reach * output(1), std::max(output(i + 1) - output(i), 0.0f));
}

void planner::saw_piece(int n, float seconds) {
    factor & f        = n == 1 ? at().one : at().many;
    const float ratio = seconds / std::max(costs_.output[n] * at().plain.value * f.value, 1e-9f);
    f.correct(steady(f, ratio), tune_.keep_drift, tune_.least_weight);
    f.weight = ratio < 1.0f - tune_.surprised ? 0.0f : f.weight;  // cheaper than thought: tried again soon
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

// Of the last level's nodes, likeliest first, how many to go on from: as many as, with the levels that may
// follow, are expected to raise the value most.
int planner::grow_width(const std::vector<float> & reach, int depth, const std::vector<float> & level,
    int n_children, float trust, int n_fixed) const {
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
            const float v = best(all, n_fixed).value - rate() * pass_seconds(w, false) * m;
            if (v > most) {
                most  = v;
                width = w;
            }
        }
    }
    return width;
}

// Between drafts a plain round is looked at now and then: what it takes is else only what the load's
// measurement said.
bool planner::wants_draft() {
    mode & m = at();
    if (m.asleep > 0) {
        --m.asleep;
        return false;
    }
    if (m.n_drafted >=
        (m.n_plain >= tune_.first_looks && gains(tune_.close_gain) ? tune_.look : tune_.look_close)) {
        m.n_drafted = 0;  // another slot's draft may leave no round plain
        return false;
    }
    return true;
}

// Whether rounds that drafted brought this many times the tokens of plain ones in the same time. It decides
// too, for what is expected may be wrong.
bool planner::gains(float least) const {
    return at().seen_tokens >= least * at().seen_plain;
}

// A single round that took long was disturbed; several that did, and the machine has changed, for this size
// at least.
float planner::steady(factor & f, float ratio) const {
    auto & last        = f.last;
    const float middle = std::max(std::min(last[0], last[1]), std::min(std::max(last[0], last[1]), ratio));
    last               = {last[1], ratio};
    return std::clamp(middle, tune_.least_ratio, tune_.most_ratio);
}

void planner::factor::correct(float ratio, float keep, float least_weight) {
    weight = weight * keep + 1.0f;
    value *= 1.0f + (ratio - 1.0f) / std::max(weight, least_weight);
}

// What a round did not show is believed less and less.
void planner::time_passes(bool tried, bool drafted, int n_rows) {
    mode & m = at();
    // what is thought too dear is not drafted, what is thought too cheap is, and corrected: but several slots
    // draft often, so that each such draft costs them more than what it shows is worth
    const float slow = n_slots_ == 1 ? tune_.relax_size : tune_.relax;
    if (drafted) {
        m.plain.fade(tune_.fade_plain);
    } else {
        m.drafted.fade(tune_.fade);
        m.drafted.relax(m.drafted.value < 1.0f ? slow : tune_.relax);
        m.one.relax(tune_.relax);
        m.many.relax(tune_.relax);
        m.draft_rest *= 1.0f - tune_.relax;
    }
    m.one.fade(tune_.fade);
    m.many.fade(tune_.fade);
    if (!tried) {
        m.head.fade(tune_.fade);
    }
    for (int n = 1; n <= MAX_ROWS; ++n) {
        if (!drafted || n != n_rows) {
            m.sizes[n].fade(tune_.fade);
            m.sizes[n].relax(drafted ? tune_.relax_size : m.sizes[n].value < 1.0f ? slow : tune_.relax);
        }
    }
}

void planner::saw_round(const round & r) {
    mode & m             = at();
    const bool plain     = r.n_rows == n_slots_;
    const float expected = layers(r.n_rows) + (r.whole ? costs_.output[r.n_rows] * m.plain.value : 0.0f);
    const float raw      = r.layers_s / std::max(expected, 1e-9f);
    const float ratio    = steady(plain ? m.plain : m.sizes[r.n_rows], raw);
    time_passes(r.tried, !plain, r.n_rows);
    const float gain_plain = 1.0f / std::max(m.plain.weight * tune_.keep_plain + 1.0f, tune_.least_weight);
    const float before     = m.drafted.value;
    // the machine's drift is that of plain rounds: of other sizes, it may be what measuring them got wrong
    if (plain) {
        m.plain.correct(ratio, tune_.keep_plain, tune_.least_weight);
        if (std::fabs(std::log(m.plain.value / m.plain_tried)) > tune_.changed) {
            m.plain_tried = m.plain.value;
            m.hope        = tune_.hope_anew;
        }
    } else {
        factor & size = m.sizes[r.n_rows];
        m.drafted.correct(size.value * ratio, tune_.keep_drift, tune_.least_weight);
        size.value *= before / m.drafted.value;
        size.correct(ratio, tune_.keep_drift, tune_.least_weight);
    }
    if (r.tried && r.passes_s > 0.0f) {
        m.head.correct(steady(m.head, r.draft_s / r.passes_s), tune_.keep_head, tune_.least_weight);
    }
    // what else ran on the machine for a moment is no matter of the draft
    const float seconds = r.total_s - r.layers_s + ratio * expected;
    const float rest    = r.total_s - r.layers_s - r.draft_s;
    if (plain) {
        m.plain_rest += (std::max(rest, 0.0f) - m.plain_rest) * gain_plain;
    } else if (r.tried && !r.whole) {
        const float most = tune_.most_rest * plain_seconds();
        m.draft_rest = m.draft_rest * tune_.keep_plain +
                       std::clamp(rest - r.output_s - m.plain_rest, -most, most) * (1.0f - tune_.keep_plain);
    }
    m.n_plain   = std::min(m.n_plain + plain, tune_.first_looks);
    m.n_drafted = plain ? 0 : std::min(m.n_drafted + 1, tune_.look);
    if (std::fabs(std::log(plain ? raw : ratio)) > tune_.surprised && m.asleep == 0) {
        // look again
        m.plain.weight *= plain ? tune_.doubt : 1.0f;
        m.n_drafted = std::min(
            m.n_drafted + (plain && std::fabs(std::log(ratio)) < tune_.surprised ? tune_.look : tune_.hurry),
            tune_.look);
    }

    m.tokens  = m.tokens * tune_.keep_rate + (float) r.n_tokens;
    m.seconds = m.seconds * tune_.keep_rate + seconds;
    if (!r.tried) {
        return;
    }
    const bool cheap  = !plain && raw < 1.0f - tune_.surprised;  // cheaper than thought: worth another
    const bool forced = m.hope < NO_HOPE && !cheap;
    m.hope            = cheap || (plain && m.hope == tune_.hope_anew) ? m.hope : NO_HOPE;
    m.n_idle          = plain || forced ? m.n_idle + 1 : 0;
    m.seen_tokens     = m.seen_tokens * tune_.keep_rate + (float) r.n_tokens;
    m.seen_plain =
        m.seen_plain * tune_.keep_rate + (float) n_slots_ * seconds / std::max(plain_seconds(), 1e-9f);
    // against a round without a draft, at today's rate
    const float gain =
        (r.value - rate() * (r.draft_s + costs_.other)) - ((float) n_slots_ - rate() * plain_seconds());
    m.gain = m.gain * tune_.keep_gain + gain * (1.0f - tune_.keep_gain);
    ++m.n_drafts;
    if (rests(m)) {
        m.nap      = m.nap ? std::min(2 * m.nap, tune_.nap_most) : tune_.nap_first;
        m.asleep   = m.nap;
        m.hope     = ++m.n_naps % 2 == 0 ? std::min(m.hope, tune_.hope) : m.hope;
        m.gain     = 0.0f;
        m.n_drafts = tune_.min_drafts - tune_.probes;
        m.n_idle   = 0;
        m.seen_tokens *= tune_.keep_awake;
        m.seen_plain *= tune_.keep_awake;
    } else if (m.gain > 0.0f) {
        m.nap = 0;
    }
}

// Whether to draft nothing for a while: if drafts brought too little, or a rest is over and nothing was worth
// drafting since.
bool planner::rests(const mode & m) const {
    if (m.nap == tune_.nap_most && m.n_idle >= (n_slots_ == 1 ? tune_.idle : tune_.idle_of_many) &&
        m.gain <= 0.0f) {
        return true;
    }
    return m.n_drafts >= tune_.min_drafts &&
           (m.gain < -tune_.most_loss || !gains(n_slots_ == 1 ? tune_.least_gain : tune_.least_of_many));
}

}  // namespace eagle3
