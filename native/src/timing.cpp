// What rounds took and brought: how the measured costs are corrected, and when drafting rests.
#include "planner.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace eagle3 {

void planner::saw_piece(int n, float seconds) {
    factor & f        = n == 1 ? at().one : at().many;
    const float ratio = seconds / std::max(costs_.output[n] * at().plain.value * f.value, 1e-9f);
    f.correct(steady(f, ratio), tune_.keep_drift, tune_.least_weight);
    f.weight = ratio < 1.0f - tune_.surprised ? 0.0f : f.weight;  // cheaper than thought: tried again soon
}

// Between drafts a plain round is looked at now and then: what it takes is else only what the load's
// measurement said. A look has three rounds. The first two take some percent longer, because drafts were
// before them; plain decoding is a row of the third.
planner::turn planner::next_turn() {
    mode & m         = at();
    const bool rests = m.asleep > 0;
    m.asleep -= rests;
    const bool goes_on = m.looks > 0;
    m.looks -= goes_on;
    const bool is_far = m.n_plain >= tune_.first_looks && gains(tune_.close_gain);
    if (goes_on || m.n_drafted >= (is_far ? tune_.look : tune_.look_close)) {
        m.n_drafted = 0;  // another slot's draft may leave no round plain
        m.looks     = goes_on ? m.looks : SETTLED;
        return turn::look;
    }
    return rests ? turn::rest : turn::draft;
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

// The same of a plain round. A lone slot has few, and nothing makes one short but the machine: what was
// thought before counts for little then.
float planner::steady_plain(float ratio) {
    factor & f         = at().plain;
    const float middle = steady(f, ratio);
    if (n_slots_ > 1 || ratio >= 1.0f - tune_.surprised) {
        return middle;
    }
    f.weight = std::min(f.weight, tune_.least_weight);
    return std::max(ratio, tune_.least_ratio);
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

// What the caller takes between rounds belongs to each of them, unless it did something else meanwhile.
float planner::callers_seconds(float before_s) {
    mode & m = at();
    if (before_s <= tune_.most_rest * plain_seconds()) {
        const float keep = m.before < 0.0f ? 0.0f : tune_.keep_plain;
        m.before         = m.before * keep + before_s * (1.0f - keep);
        return before_s;
    }
    return std::max(m.before, 0.0f);
}

// Adds a round to what was foreseen, and learns how far such forecasts are from what rounds take. plain_s:
// what the round says of plain decoding, if it does.
void planner::compare(const round & r, float plain_s) {
    constexpr float N_NEAR = 2.0f;  // rounds
    mode & m               = at();
    const float prior      = (float) tune_.min_drafts;
    if (r.expected.seconds > 0.0f) {
        const float took = std::min(r.total_s + r.gathered_s, DISTURBED * r.expected.seconds);
        foreseen_.seconds += r.expected.seconds * m.late.value(prior * plain_seconds());
        foreseen_.plain += usual_seconds() * r.expected.tokens / (float) n_slots_ * m.brought.value(prior);
        m.late.add(took, r.expected.seconds, tune_.keep_rate);
        m.brought.add((float) r.n_tokens, r.expected.tokens, tune_.keep_rate);
    }
    ++m.n_unseen;
    if (plain_s > 0.0f) {
        const float whole = measured_whole(n_slots_), n = (float) std::min(m.n_unseen, tune_.look);
        const float most = MOST_USUAL * whole * m.unseen.value(N_NEAR * whole);
        m.usual.add(n * std::min(plain_s, most), n * whole, std::pow(KEEP_USUAL, n));
        m.n_unseen = 0;
        m.unseen   = {};
    }
    if (r.n_rows != n_slots_) {
        const float of = r.whole ? measured_whole(r.n_rows) : measured(r.n_rows);
        m.unseen.add(std::min(r.layers_s, DISTURBED * of), of, 1.0f);
    }
}

void planner::saw_round(round r) {
    mode & m = at();
    m.begun  = true;
    r.total_s += callers_seconds(r.before_s);
    const bool plain     = r.n_rows == n_slots_;
    const float expected = layers(r.n_rows) + (r.whole ? costs_.output[r.n_rows] * m.plain.value : 0.0f);
    const float raw      = r.layers_s / std::max(expected, 1e-9f);
    // the first ones after a draft take a little longer: only what differs by more says something of the
    // machine
    const int n_since    = std::exchange(m.n_since, plain ? std::min(m.n_since + 1, SETTLED) : 0);
    const bool is_early  = plain && n_since < SETTLED;
    const bool unsettled = is_early && std::fabs(std::log(raw)) < tune_.surprised;
    const float ratio    = unsettled ? raw : plain ? steady_plain(raw) : steady(m.sizes[r.n_rows], raw);
    compare(r, plain && !is_early ? r.total_s - r.draft_s : 0.0f);
    time_passes(r.tried, !plain, r.n_rows);
    const float gain_plain = 1.0f / std::max(m.plain.weight * tune_.keep_plain + 1.0f, tune_.least_weight);
    learn_times(r, plain, unsettled, ratio);
    learn_rest(r, plain, gain_plain);
    plan_look(plain, raw, ratio);
    // what else ran on the machine for a moment is no matter of the draft
    const float seconds = r.total_s - r.layers_s + ratio * expected;
    m.tokens            = m.tokens * tune_.keep_rate + (float) r.n_tokens;
    m.seconds           = m.seconds * tune_.keep_rate + seconds;
    if (r.tried) {
        saw_draft(r, plain, raw, seconds);
        rest_or_wake();
    } else {
        saw_free(r, plain, raw);
    }
}

// The machine's drift is that of plain rounds: of other sizes, it may be what measuring them got wrong.
void planner::learn_times(const round & r, bool plain, bool unsettled, float ratio) {
    mode & m           = at();
    const float before = m.drafted.value;
    if (plain && !unsettled) {
        m.plain.correct(ratio, tune_.keep_plain, tune_.least_weight);
        if (std::fabs(std::log(m.plain.value / m.plain_tried)) > tune_.changed) {
            m.plain_tried = m.plain.value;
            m.hope        = tune_.hope_anew;
        }
    } else if (!plain) {
        factor & size = m.sizes[r.n_rows];
        m.drafted.correct(size.value * ratio, tune_.keep_drift, tune_.least_weight);
        size.value *= before / m.drafted.value;
        size.correct(ratio, tune_.keep_drift, tune_.least_weight);
    }
    if (r.tried && r.passes_s > 0.0f) {
        m.head.correct(steady(m.head, r.draft_s / r.passes_s), tune_.keep_head, tune_.least_weight);
    }
}

// What a round takes beside decode and draft. gain_plain: the part of it that a plain round's counts for.
void planner::learn_rest(const round & r, bool plain, float gain_plain) {
    mode & m         = at();
    const float rest = r.total_s - r.layers_s - r.draft_s;
    if (plain) {
        m.plain_rest += (std::max(rest, 0.0f) - m.plain_rest) * gain_plain;
    } else if (!r.whole) {
        const float most = tune_.most_rest * plain_seconds();
        m.draft_rest = m.draft_rest * tune_.keep_plain +
                       std::clamp(rest - r.output_s - m.plain_rest, -most, most) * (1.0f - tune_.keep_plain);
    }
}

// When the next plain round is due: sooner after a decode that took a time that surprises.
void planner::plan_look(bool plain, float raw, float ratio) {
    mode & m    = at();
    m.n_plain   = std::min(m.n_plain + plain, tune_.first_looks);
    m.n_drafted = plain ? 0 : std::min(m.n_drafted + 1, tune_.look);
    if (std::fabs(std::log(plain ? raw : ratio)) > tune_.surprised && m.asleep == 0) {
        const bool at_once = plain && std::fabs(std::log(ratio)) < tune_.surprised;
        m.n_drafted        = std::min(m.n_drafted + (at_once ? tune_.look : tune_.hurry), tune_.look);
    }
}

void planner::saw_draft(const round & r, bool plain, float raw, float seconds) {
    mode & m          = at();
    const bool cheap  = !plain && raw < 1.0f - tune_.surprised;  // cheaper than thought: worth another
    const bool forced = m.hope < NO_HOPE && !cheap;
    m.hope            = cheap || (plain && m.hope == tune_.hope_anew) ? m.hope : NO_HOPE;
    m.n_idle          = plain || forced ? m.n_idle + 1 : 0;
    if (!r.offered) {  // else what others offered may have brought it, or cost it
        m.seen_tokens = m.seen_tokens * tune_.keep_rate + (float) r.n_tokens;
        m.seen_plain =
            m.seen_plain * tune_.keep_rate + (float) n_slots_ * seconds / std::max(plain_seconds(), 1e-9f);
    }
    // against a round without the head, at today's rate
    const float without = std::max(r.base, (float) n_slots_ - rate() * plain_seconds());
    const float gain    = (r.value - rate() * r.draft_s) - without;
    m.gain              = m.gain * tune_.keep_gain + gain * (1.0f - tune_.keep_gain);
    ++m.n_drafts;
}

// A round without the head. What the others offer is declined for as long as its rows are thought too dear:
// now and then one is tried.
void planner::saw_free(const round & r, bool plain, float raw) {
    mode & m = at();
    if (!plain) {
        m.n_declined = 0;
        m.hope       = raw < 1.0f - tune_.surprised ? m.hope : NO_HOPE;
    } else if (r.offered && ++m.n_declined >= of_text_.declined) {
        m.n_declined = 0;
        m.hope       = std::min(m.hope, tune_.hope);
    }
}

void planner::rest_or_wake() {
    mode & m = at();
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
