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
constexpr float TRUST_STEP_RESTING = 0.2f;   // while drafts rest, a token in ten rounds has to teach it
constexpr float KEEP_AWAKE         = 0.25f;  // of what drafts brought, over a rest: texts turn
// of drafting's measured rate over plain decoding's: of one slot, of several
constexpr float LEAST_GAIN = 1.0f, LEAST_OF_MANY = 1.04f;
// expected of drafting, tokens a round, that is no cause to rest: a draft not made teaches nothing
constexpr float MOST_LOSS = 0.02f;
constexpr int MIN_DRAFTS  = 12;  // rounds before drafting may be given up
// rounds of a rest, which doubles, and rounds awake after it. 200 rounds have to hold three rests.
constexpr int NAP_FIRST = 8, NAP_MOST = 64, PROBES = 6;
constexpr int IDLE         = 2,
              IDLE_OF_MANY = 1;  // rounds awake that draft nothing and end it: of one slot, of several
// rounds from one plain round to the next where drafting gains little, and much
constexpr int LOOK_CLOSE = 16, LOOK = 128, FIRST_LOOKS = 4;
constexpr float CLOSE_GAIN = 1.15f;
// weight of what was seen of a factor, at each further time: of decodes with drafts, of plain ones, of passes
constexpr float KEEP_DRIFT = 0.95f, KEEP_PLAIN = 0.9f, KEEP_HEAD = 0.8f;
constexpr float FADE = 0.98f, FADE_PLAIN = 0.995f;  // the same at each round without it
// Of a factor, each round, back to 1: without drafts, of another size than is drafted. Slower, and a load is
// remembered for too long; faster, and costs that were measured wrong are forgotten before the next draft.
constexpr float RELAX = 1.0f / 96.0f, RELAX_SIZE = 1.0f / 600.0f;
// A weight so low that pieces are tried, as if they cost so much less: those of two rows, which lose least if
// they do not, and others.
constexpr float STALE = 0.5f, TRY_TWO = 0.3f, TRY = 0.7f;
// Of a row's cost, what a draft must bring at least to try whether the row costs less, after a rest.
// Where the machine or the text has become another, HOPE_ANEW is enough.
constexpr float HOPE = 0.4f, NO_HOPE = INFINITY;
constexpr float CHANGED   = 0.3f;  // a drift of plain rounds that makes it another machine
constexpr float SURPRISED = 0.2f;  // a decode's time that differs so much from the expected calls for a look
constexpr int HURRY       = 8;     // rounds by which that look comes nearer
// Hits of first tokens above what was expected of them, in a window of 7 while drafts rest and of 20 else,
// that show that the text has turned: more than two deviations, for the price is some drafts, and nearly
// four.
constexpr float KEEP_SURPRISE = 0.85f, TURNED = 2.0f;
constexpr float KEEP_EXCESS = 0.95f, TURNED_AWAKE = 6.0f;
constexpr float CURIOUS     = 0.8f;  // as many hits are cause to stay awake for another round
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
    const float surprise = (accepted ? 1.0f : 0.0f) - accept(source, depth, q, trust);
    // what was found last weighs more than the tallies can: texts turn
    const float step = depth == 1 && at().nap == NAP_MOST ? TRUST_STEP_RESTING : TRUST_STEP;
    trust            = std::clamp(trust * std::exp(step * surprise), TRUST_LEAST, TRUST_MOST);

    const int d     = std::min(depth, N_DEPTH) - 1;
    calibration & c = calibrations_[source];
    for (tally * t : {&c.bins[d][bin_of(q)], rank < N_RANK ? &c.ranks[d][rank] : nullptr}) {
        if (t) {
            t->tries = t->tries * KEEP_TALLY + 1.0f;
            t->hits  = t->hits * KEEP_TALLY + (accepted ? 1.0f : 0.0f);
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
    c.surprise       = rests ? c.surprise * (rank == 0 ? KEEP_SURPRISE : 1.0f) + surprise : 0.0f;
    c.excess         = rank == 0 ? c.excess * KEEP_EXCESS + surprise : c.excess;
    m.n_idle         = c.surprise > CURIOUS ? 0 : m.n_idle;
    if (c.pardons > 0 && rank == 0) {
        --c.pardons;
        trust = std::max(trust, 1.0f);
    }
    if (c.surprise > TURNED || c.excess > TURNED_AWAKE) {
        c         = calibration();
        c.pardons = 2 * n_slots_;
        trust     = std::max(trust, 1.0f);
        m.forget_drafts();
        m.hope = HOPE_ANEW;
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
        seconds[m]       = output(m) * (f.weight >= STALE ? 1.0f : m == 2 && n_slots_ == 1 ? TRY_TWO : TRY);
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
    f.correct(f.steady(ratio), KEEP_DRIFT);
    f.weight = ratio < 1.0f - SURPRISED ? 0.0f : f.weight;  // cheaper than thought: tried again soon
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
        for (int m = 1; m <= AHEAD && (int) all.size() < MAX_ROWS - 1; ++m) {
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
float planner::factor::steady(float ratio) {
    const float middle = std::max(std::min(last[0], last[1]), std::min(std::max(last[0], last[1]), ratio));
    last               = {last[1], ratio};
    return std::clamp(middle, LEAST_RATIO, MOST_RATIO);
}

void planner::factor::correct(float ratio, float keep) {
    weight = weight * keep + 1.0f;
    value *= 1.0f + (ratio - 1.0f) / std::max(weight, 2.0f);
}

// What a round did not show is believed less and less.
void planner::time_passes(bool tried, bool drafted, int n_rows) {
    mode & m = at();
    // what is thought too dear is not drafted, what is thought too cheap is, and corrected: but several slots
    // draft often, so that each such draft costs them more than what it shows is worth
    const float slow = n_slots_ == 1 ? RELAX_SIZE : RELAX;
    if (drafted) {
        m.plain.fade(FADE_PLAIN);
    } else {
        m.drafted.fade(FADE);
        m.drafted.relax(m.drafted.value < 1.0f ? slow : RELAX);
        m.one.relax(RELAX);
        m.many.relax(RELAX);
        m.draft_rest *= 1.0f - RELAX;
    }
    m.one.fade(FADE);
    m.many.fade(FADE);
    if (!tried) {
        m.head.fade(FADE);
    }
    for (int n = 1; n <= MAX_ROWS; ++n) {
        if (!drafted || n != n_rows) {
            m.sizes[n].fade(FADE);
            m.sizes[n].relax(drafted ? RELAX_SIZE : m.sizes[n].value < 1.0f ? slow : RELAX);
        }
    }
}

void planner::saw_round(const round & r) {
    mode & m             = at();
    const bool plain     = r.n_rows == n_slots_;
    const float expected = layers(r.n_rows) + (r.whole ? costs_.output[r.n_rows] * m.plain.value : 0.0f);
    const float raw      = r.layers_s / std::max(expected, 1e-9f);
    const float ratio    = (plain ? m.plain : m.sizes[r.n_rows]).steady(raw);
    time_passes(r.tried, !plain, r.n_rows);
    const float gain_plain = 1.0f / std::max(m.plain.weight * KEEP_PLAIN + 1.0f, 2.0f);
    const float before     = m.drafted.value;
    // the machine's drift is that of plain rounds: of other sizes, it may be what measuring them got wrong
    if (plain) {
        m.plain.correct(ratio, KEEP_PLAIN);
        if (std::fabs(std::log(m.plain.value / m.plain_tried)) > CHANGED) {
            m.plain_tried = m.plain.value;
            m.hope        = HOPE_ANEW;
        }
    } else {
        factor & size = m.sizes[r.n_rows];
        m.drafted.correct(size.value * ratio, KEEP_DRIFT);
        size.value *= before / m.drafted.value;
        size.correct(ratio, KEEP_DRIFT);
    }
    if (r.tried && r.passes_s > 0.0f) {
        m.head.correct(m.head.steady(r.draft_s / r.passes_s), KEEP_HEAD);
    }
    // what else ran on the machine for a moment is no matter of the draft
    const float seconds = r.total_s - r.layers_s + ratio * expected;
    const float rest    = r.total_s - r.layers_s - r.draft_s;
    if (plain) {
        m.plain_rest += (std::max(rest, 0.0f) - m.plain_rest) * gain_plain;
    } else if (r.tried && !r.whole) {
        const float most = MOST_REST * plain_seconds();
        m.draft_rest     = m.draft_rest * KEEP_PLAIN +
                           std::clamp(rest - r.output_s - m.plain_rest, -most, most) * (1.0f - KEEP_PLAIN);
    }
    m.n_plain   = std::min(m.n_plain + plain, FIRST_LOOKS);
    m.n_drafted = plain ? 0 : std::min(m.n_drafted + 1, LOOK);
    if (std::fabs(std::log(plain ? raw : ratio)) > SURPRISED && m.asleep == 0) {
        // look again
        m.plain.weight *= plain ? 0.5f : 1.0f;
        m.n_drafted =
            std::min(m.n_drafted + (plain && std::fabs(std::log(ratio)) < SURPRISED ? LOOK : HURRY), LOOK);
    }

    m.tokens  = m.tokens * KEEP_RATE + (float) r.n_tokens;
    m.seconds = m.seconds * KEEP_RATE + seconds;
    if (!r.tried) {
        return;
    }
    const bool cheap  = !plain && raw < 1.0f - SURPRISED;  // cheaper than thought: worth another
    const bool forced = m.hope < NO_HOPE && !cheap;
    m.hope            = cheap || (plain && m.hope == HOPE_ANEW) ? m.hope : NO_HOPE;
    m.n_idle          = plain || forced ? m.n_idle + 1 : 0;
    m.seen_tokens     = m.seen_tokens * KEEP_RATE + (float) r.n_tokens;
    m.seen_plain = m.seen_plain * KEEP_RATE + (float) n_slots_ * seconds / std::max(plain_seconds(), 1e-9f);
    // against a round without a draft, at today's rate
    const float gain =
        (r.value - rate() * (r.draft_s + costs_.other)) - ((float) n_slots_ - rate() * plain_seconds());
    m.gain = m.gain * KEEP_GAIN + gain * (1.0f - KEEP_GAIN);
    ++m.n_drafts;
    if (rests(m)) {
        m.nap      = m.nap ? std::min(2 * m.nap, NAP_MOST) : NAP_FIRST;
        m.asleep   = m.nap;
        m.hope     = ++m.n_naps % 2 == 0 ? std::min(m.hope, HOPE) : m.hope;
        m.gain     = 0.0f;
        m.n_drafts = MIN_DRAFTS - PROBES;
        m.n_idle   = 0;
        m.seen_tokens *= KEEP_AWAKE;
        m.seen_plain *= KEEP_AWAKE;
    } else if (m.gain > 0.0f) {
        m.nap = 0;
    }
}

// Whether to draft nothing for a while: if drafts brought too little, or a rest is over and nothing was worth
// drafting since.
bool planner::rests(const mode & m) const {
    if (m.nap == NAP_MOST && m.n_idle >= (n_slots_ == 1 ? IDLE : IDLE_OF_MANY) && m.gain <= 0.0f) {
        return true;
    }
    return m.n_drafts >= MIN_DRAFTS &&
           (m.gain < -MOST_LOSS || !gains(n_slots_ == 1 ? LEAST_GAIN : LEAST_OF_MANY));
}

}  // namespace eagle3
