// See rest_policy.hpp.
#include "planner/rest_policy.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace eagle3 {

void rest_policy::reset() {
    mode fresh;
    fresh.hope = tune_.hope_anew;
    modes_.fill(fresh);
}

// Several slots' texts are a mixture that one more hardly changes. Where drafts did not pay for many texts,
// the next one is given up sooner: part of the rest stays. A prompt of several chunks begins one text.
void rest_policy::new_text(bool wrong) {
    mode & m   = modes_[1];
    m.asleep   = 0;
    m.nap      = !m.begun ? m.nap : wrong ? tune_.nap_most : (int) (tune_.keep_nap * (float) m.nap);
    m.begun    = false;
    m.gain     = std::min(m.gain, 0.0f);
    m.n_drafts = std::min(m.n_drafts, tune_.min_drafts - tune_.probes);
}

// Between drafts a plain round is looked at now and then: what it takes is else only what the load's
// measurement said. A look has three rounds. The first two take some percent longer, because drafts were
// before them; plain decoding is a row of the third.
rest_policy::turn rest_policy::next_turn() {
    mode & m         = at();
    const bool rests = m.asleep > 0;
    m.asleep -= rests;
    const bool goes_on = m.looks > 0;
    m.looks -= goes_on;
    const bool is_far = m.n_plain >= tune_.first_looks;
    if (goes_on || m.n_drafted >= (is_far ? tune_.look : tune_.look_close)) {
        m.n_drafted = 0;  // another slot's draft may leave no round plain
        m.looks     = goes_on ? m.looks : tune_.settled;
        return turn::look;
    }
    return rests ? turn::rest : turn::draft;
}

// Says whether rounds that drafted brought enough tokens beside plain ones in the same time. It decides too,
// for what is expected may be wrong.
bool rest_policy::gains() const {
    return at().seen_tokens >= tune_.least_gain * at().seen_plain;
}

void rest_policy::saw_round(const round_record & r, const cost_clock::reading & seen) {
    mode & m                 = at();
    m.begun                  = true;
    m.hope                   = seen.is_another ? tune_.hope_anew : m.hope;
    const bool behind_a_miss = std::exchange(m.has_missed, false);
    plan_look(seen.plain, seen.raw, seen.ratio);
    if (r.tried) {
        saw_draft(r, seen);
        rest_or_wake();
    } else {
        if (behind_a_miss && !seen.plain && r.n_rows == clock_.n_roots()) {
            add_missed(lost(seen));  // rows that the draft before made wait
        }
        saw_free(r, seen.plain, seen.raw);
    }
}

void rest_policy::text_turned() {
    mode & m = at();
    m.gain = m.seen_tokens = m.seen_plain = 0.0f;
    m.n_drafts = m.nap = 0;
    m.missed           = 0.0f;
    m.hope             = tune_.hope_anew;
}

// Sets when the next plain round is due: sooner after a decode that took a time that surprises.
void rest_policy::plan_look(bool plain, float raw, float ratio) {
    mode & m    = at();
    m.n_plain   = std::min(m.n_plain + plain, tune_.first_looks);
    m.n_drafted = plain ? 0 : std::min(m.n_drafted + 1, tune_.look);
    if (std::fabs(std::log(plain ? raw : ratio)) > tune_.surprised && m.asleep == 0) {
        const bool at_once = plain && std::fabs(std::log(ratio)) < tune_.surprised;
        m.n_drafted        = std::min(m.n_drafted + (at_once ? tune_.look : tune_.hurry), tune_.look);
    }
}

void rest_policy::saw_draft(const round_record & r, const cost_clock::reading & seen) {
    mode & m = at();
    const bool cheap =
        !seen.plain && seen.raw < 1.0f - tune_.surprised;  // cheaper than thought: worth another
    m.hope = cheap || (seen.plain && m.hope == tune_.hope_anew) ? m.hope : NO_HOPE;
    if (!r.offered) {  // else what others offered may have brought it, or cost it
        m.seen_tokens = m.seen_tokens * tune_.keep_rate + (float) r.n_tokens;
        m.seen_plain  = m.seen_plain * tune_.keep_rate +
                        (float) clock_.n_slots() * seen.seconds / std::max(clock_.plain_seconds(), 1e-9f);
    }
    // The gain is that over a round without the head, at today's rate.
    const float without = std::max(r.base, (float) clock_.n_slots() - clock_.rate() * clock_.plain_seconds());
    const float gain    = (r.value - clock_.rate() * r.draft_s) - without;
    m.gain              = m.gain * tune_.keep_gain + gain * (1.0f - tune_.keep_gain);
    ++m.n_drafts;
    if (!seen.plain && clock_.n_slots() == 1) {
        m.has_missed = r.n_tokens == 1;
        if (m.has_missed) {
            add_missed(lost(seen));
        } else {
            m.missed = 0.0f;
        }
    }
}

// During a rest no more is added than the rest has left.
void rest_policy::add_missed(float tokens) {
    mode & m = at();
    m.missed += tokens;
    if (m.asleep > 0) {
        m.missed = std::min(m.missed, tune_.keep_missed * tune_.most_missed);
    }
}

// Returns what a round that brought one token took beyond a plain one, in tokens.
float rest_policy::lost(const cost_clock::reading & seen) const {
    return std::clamp(seen.seconds / std::max(clock_.plain_seconds(), 1e-9f) - 1.0f, 0.0f, 1.0f);
}

// Sees a round without the head. What the others offer is declined for as long as its rows are thought too
// dear: now and then one is tried.
void rest_policy::saw_free(const round_record & r, bool plain, float raw) {
    mode & m = at();
    if (!plain) {
        m.n_declined = 0;
        m.hope       = raw < 1.0f - tune_.surprised ? m.hope : NO_HOPE;
    } else if (r.offered && ++m.n_declined >= of_text_.declined) {
        m.n_declined = 0;
        m.hope       = std::min(m.hope, tune_.hope);
    }
}

void rest_policy::rest_or_wake() {
    mode & m = at();
    if (rests(m)) {
        m.nap      = m.nap ? std::min(2 * m.nap, tune_.nap_most) : tune_.nap_first;
        m.asleep   = m.nap;
        m.hope     = ++m.n_naps % 2 == 0 ? std::min(m.hope, tune_.hope) : m.hope;
        m.gain     = 0.0f;
        m.n_drafts = tune_.min_drafts - tune_.probes;
        m.missed   = std::min(m.missed, tune_.keep_missed * tune_.most_missed);
        m.seen_tokens *= tune_.keep_awake;
        m.seen_plain *= tune_.keep_awake;
    } else if (m.gain > 0.0f) {
        m.nap = 0;
    }
}

// Says whether to draft nothing for a while, because drafts brought too little.
bool rest_policy::rests(const mode & m) const {
    return (m.n_drafts >= tune_.min_drafts || m.missed >= tune_.most_missed) &&
           (m.gain < -tune_.most_loss || !gains());
}

}  // namespace eagle3
