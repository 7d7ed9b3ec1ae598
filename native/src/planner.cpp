#include "planner.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace eagle3 {

namespace {

constexpr float KEEP_TALLY = 0.995f;  // of a bin's counts at each further one: about the last 200
constexpr float KEEP_RATE  = 0.98f;   // of tokens and seconds at each further round: about the last 50
constexpr float KEEP_GAIN  = 0.95f;
constexpr float PRIOR      = 8.0f;  // observations that the prior counts for
constexpr float TRUST_STEP = 0.05f, TRUST_LEAST = 0.1f, TRUST_MOST = 3.0f;
constexpr float KEEP_AWAKE = 0.25f;  // of what drafts brought, over a rest: texts turn
constexpr float LEAST_GAIN = 1.0f,
                LEAST_OF_MANY =
                    1.04f;  // of drafting's measured rate over plain decoding's: of one slot, of several
constexpr float MOST_LOSS = 0.02f;  // expected of drafting, tokens a round, that is no cause to rest: a draft
                                    // not made teaches nothing
constexpr int MIN_DRAFTS  = 12;     // rounds before drafting may be given up
constexpr int NAP_FIRST = 8, NAP_MOST = 64, NAP_OF_MANY = 256,
              PROBES =
                  6;  // rounds; NAP_OF_MANY: of several slots, whose texts are a mixture that turns slowly
constexpr int LOOK_CLOSE = 16, LOOK = 128,
              FIRST_LOOKS =
                  4;  // rounds from one plain round to the next where drafting gains little, and much
constexpr float CLOSE_GAIN  = 1.15f;
constexpr float KEEP_DRIFT  = 0.95f,
                KEEP_PLAIN  = 0.9f;  // at each further round of a size, at each further plain round
constexpr float LEAST_RATIO = 0.5f, MOST_RATIO = 2.0f;  // of the time expected, that is believed
constexpr float MOST_REST = 0.25f;                      // of a plain round, more than what was expected
constexpr int AHEAD       = 4;                          // further nodes that growing looks at

const float EDGES[] = {0.02f, 0.05f, 0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 0.9f, 0.97f};

int bin_of(float q) {
    return (int) (std::upper_bound(std::begin(EDGES), std::end(EDGES), q) - std::begin(EDGES));
}

}  // namespace

void planner::set(const costs & c) {
    costs_   = c;
    n_slots_ = 1;
    modes_.fill(mode());
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
    m.n_drafts       = std::min(m.n_drafts, MIN_DRAFTS - PROBES);
}

// -- what is known ----------------------------------------------------------------------------------------

float planner::layers(int n) const {
    return (costs_.layers[n] + costs_.cell[n] * (context_ - costs_.context)) * at().drift * at().drift_of[n];
}

float planner::plain_seconds() const {
    return layers(n_slots_) + costs_.output[n_slots_] * at().drift + at().plain_rest;
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
        p               = (t.hits + PRIOR * p) / (t.tries + PRIOR);
    }
    return std::min(p * trust, 1.0f);
}

float planner::mean_accept(int depth, int rank, float trust) const {
    float p = rank == 0 ? 0.5f : 0.1f;
    for (int d = 0; d < std::min(depth, N_DEPTH); ++d) {
        const tally & t = calibrations_[0].ranks[d][rank];
        p               = (t.hits + PRIOR * p) / (t.tries + PRIOR);
    }
    return std::min(p * trust, 1.0f);
}

void planner::learn(int source, int depth, int rank, float q, bool accepted, float & trust) {
    // what was found last weighs more than the tallies can: texts turn
    trust = std::clamp(
        trust * std::exp(TRUST_STEP * ((accepted ? 1.0f : 0.0f) - accept(source, depth, q, trust))),
        TRUST_LEAST, TRUST_MOST);

    const int d     = std::min(depth, N_DEPTH) - 1;
    calibration & c = calibrations_[source];
    for (tally * t : {&c.bins[d][bin_of(q)], rank < N_RANK ? &c.ranks[d][rank] : nullptr}) {
        if (t) {
            t->tries = t->tries * KEEP_TALLY + 1.0f;
            t->hits  = t->hits * KEEP_TALLY + (accepted ? 1.0f : 0.0f);
        }
    }
}

// -- choices ----------------------------------------------------------------------------------------------

int planner::piece(const std::vector<float> & reach, int i) const {
    const int n_rows = (int) reach.size();
    std::array<float, MAX_ROWS + 2> rest{};
    int best = 1;
    for (int k = n_rows - 1; k >= i; --k) {
        rest[k] = INFINITY;
        for (int m = 1; k + m <= n_rows; ++m) {
            const float cost = reach[k] * costs_.output[m] + rest[k + m];
            if (cost < rest[k]) {
                rest[k] = cost;
                best    = m;
            }
        }
    }
    return best;
}

// A row of the output matrix is computed with those before it, or when it is reached, whichever is less.
float planner::row_seconds(int i, float reach) const {
    return layers(i + 1) - layers(i) +
           std::min(reach * costs_.output[1], std::max(costs_.output[i + 1] - costs_.output[i], 0.0f)) *
               at().drift;
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
        for (int m = 1; m <= AHEAD && (int) all.size() < MAX_ROWS - 1; ++m) {
            std::vector<float> next;
            for (const float p : front) {
                for (int k = 0; k < std::min(n_children, N_RANK); ++k) {
                    next.push_back(p * mean_accept(depth + m, k, trust));
                }
            }
            all.insert(all.end(), next.begin(), next.end());
            std::sort(all.begin(), all.end(), std::greater<float>());
            all.resize(std::min((int) all.size(), MAX_ROWS - 1));
            std::sort(next.begin(), next.end(), std::greater<float>());
            next.resize(std::min((int) next.size(), w));
            front         = std::move(next);
            const float v = best(all, n_fixed).value - rate() * costs_.head[w] * at().drift * m;
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
    if (m.n_drafted >= (m.n_plain >= FIRST_LOOKS && gains(CLOSE_GAIN) ? LOOK : LOOK_CLOSE)) {
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
float planner::steady(int n_rows, float ratio) {
    std::array<float, 2> & last = at().ratios[n_rows];
    const float middle = std::max(std::min(last[0], last[1]), std::min(std::max(last[0], last[1]), ratio));
    last               = {last[1], ratio};
    return std::clamp(middle, LEAST_RATIO, MOST_RATIO);
}

void planner::saw_round(const round & r) {
    mode & m             = at();
    const bool plain     = r.n_rows == n_slots_;
    const float expected = layers(r.n_rows) + (r.whole ? costs_.output[r.n_rows] * m.drift : 0.0f);
    const float ratio    = steady(r.n_rows, r.layers_s / std::max(expected, 1e-9f));
    // the machine's drift is that of plain rounds: of other sizes, it may be what measuring them got wrong
    (plain ? m.drift : m.drift_of[r.n_rows]) *=
        1.0f + (1.0f - (plain ? KEEP_PLAIN : KEEP_DRIFT)) * (ratio - 1.0f);
    // what else ran on the machine for a moment is no matter of the draft
    const float seconds = r.total_s - r.layers_s + ratio * expected;
    const float rest    = r.total_s - r.layers_s - r.draft_s;
    if (plain) {
        m.plain_rest = m.plain_rest * KEEP_PLAIN + std::max(rest, 0.0f) * (1.0f - KEEP_PLAIN);
    } else if (r.tried && !r.whole) {
        const float most = MOST_REST * plain_seconds();
        m.draft_rest     = m.draft_rest * KEEP_PLAIN +
                           std::clamp(rest - r.output_s - m.plain_rest, -most, most) * (1.0f - KEEP_PLAIN);
    }
    m.n_plain   = std::min(m.n_plain + plain, FIRST_LOOKS);
    m.n_drafted = plain ? 0 : std::min(m.n_drafted + 1, LOOK);

    m.tokens  = m.tokens * KEEP_RATE + (float) r.n_tokens;
    m.seconds = m.seconds * KEEP_RATE + seconds;
    if (!r.tried) {
        return;
    }
    m.seen_tokens = m.seen_tokens * KEEP_RATE + (float) r.n_tokens;
    m.seen_plain  = m.seen_plain * KEEP_RATE + (float) n_slots_ * seconds / std::max(plain_seconds(), 1e-9f);
    // against a round without a draft, at today's rate
    const float gain =
        (r.value - rate() * (r.draft_s + costs_.other)) - ((float) n_slots_ - rate() * plain_seconds());
    m.gain = m.gain * KEEP_GAIN + gain * (1.0f - KEEP_GAIN);
    if (++m.n_drafts >= MIN_DRAFTS &&
        (m.gain < -MOST_LOSS || !gains(n_slots_ == 1 ? LEAST_GAIN : LEAST_OF_MANY))) {
        m.nap      = m.nap ? std::min(2 * m.nap, n_slots_ == 1 ? NAP_MOST : NAP_OF_MANY) : NAP_FIRST;
        m.asleep   = m.nap;
        m.gain     = 0.0f;
        m.n_drafts = MIN_DRAFTS - PROBES;
        m.seen_tokens *= KEEP_AWAKE;
        m.seen_plain *= KEEP_AWAKE;
    } else if (m.gain > 0.0f) {
        m.nap = 0;
    }
}

}  // namespace eagle3
