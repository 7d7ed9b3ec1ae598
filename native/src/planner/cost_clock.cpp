// See cost_clock.hpp. What is expected comes first, then what rounds teach.
#include "planner/cost_clock.hpp"

#include "error.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace eagle3 {

void check(const costs & c) {
    const auto in = [](float v, float least, float most) {
        return v >= least && v <= most;  // false for NaN
    };
    for (int i = 1; i <= MAX_ROWS; ++i) {
        for (const float v : {c.layers[i], c.head[i]}) {
            require(in(v, cost_limits::least_cost, cost_limits::most_cost), EAGLE3_E_ARGUMENT,
                format("a cost of %d rows is %g s, expected %g..%g", i, v, cost_limits::least_cost,
                    cost_limits::most_cost));
        }
        for (const float v : {c.output[i], c.cell[i]}) {
            require(in(v, 0.0f, cost_limits::most_cost), EAGLE3_E_ARGUMENT,
                format("a cost of %d rows is %g s, expected 0..%g", i, v, cost_limits::most_cost));
        }
    }
    require(in(c.first, 0.0f, cost_limits::most_cost), EAGLE3_E_ARGUMENT,
        format("the cost of the first pass is %g s, expected 0..%g", c.first, cost_limits::most_cost));
    require(in(c.back, 0.0f, cost_limits::most_cost), EAGLE3_E_ARGUMENT,
        format("the cost of a checkpoint is %g s, expected 0..%g", c.back, cost_limits::most_cost));
    require(in(c.context, 0.0f, cost_limits::most_context), EAGLE3_E_ARGUMENT,
        format(
            "the costs were measured at %g positions, expected 0..%g", c.context, cost_limits::most_context));
}

void cost_clock::set(const costs & c) {
    costs_    = c;
    foreseen_ = {};
    modes_.fill({});
    for (mode & m : modes_) {
        m.n_since = tune_.settled;
    }
    begin(1, c.context);
}

void cost_clock::begin(int n_slots, float n_past, int n_waiting, int n_free) {
    n_slots_   = n_slots;
    context_   = n_past;
    n_waiting_ = std::min(n_waiting, MAX_ROWS - n_slots);
    n_free_    = n_free;
    if (at().seconds == 0.0f) {
        at().tokens  = (float) n_slots;
        at().seconds = plain_seconds();
    }
}

// -- what is expected -------------------------------------------------------------------------------------

// Returns what the layers take with n rows, in the costs that were set.
float cost_clock::measured(int n) const {
    const float here = costs_.layers[n] + costs_.cell[n] * (context_ - costs_.context);
    return std::max(here, cost_limits::least_share * costs_.layers[n]);
}

// Returns the same with the output matrix for all of them.
float cost_clock::measured_whole(int n) const {
    return measured(n) + costs_.output[n];
}

float cost_clock::layers(int n) const {
    return measured(n) * at().plain.value * (n == n_slots_ ? 1.0f : at().drafted.value * at().sizes[n].value);
}

float cost_clock::plain_seconds() const {
    return layers(n_slots_) + costs_.output[n_slots_] * at().plain.value + at().plain_rest;
}

// Returns what all looks say. Rounds with drafts say nothing of it: a machine whose memory is busy may have
// the more time for arithmetic.
float cost_clock::usual_seconds() const {
    const float whole = measured_whole(n_slots_);
    return whole * at().usual.value(tune_.n_usual * whole);
}

float cost_clock::rate() const {
    return std::max(
        at().tokens / std::max(at().seconds, 1e-9f), (float) n_slots_ / std::max(plain_seconds(), 1e-9f));
}

// Returns the pieces that take least for the rows from i on. Two rows at once that were not tried for long
// are taken to cost a part of what is thought, so that they are tried: nothing else would show that the
// measurement was wrong.
cost_clock::pieces_of cost_clock::pieces(const std::vector<float> & reach, int i, float try_two) const {
    const int n_rows = (int) reach.size();
    std::array<float, MAX_ROWS + 2> rest{}, seconds{};
    for (int m = 1; m <= n_rows; ++m) {
        const cost_factor & f = m == 1 ? at().one : at().many;
        const bool tried      = m != 2 || n_slots_ > 1 || f.weight >= tune_.stale;
        seconds[m]            = output(m) * (tried ? 1.0f : try_two);
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

// Returns what a piece of n rows of the output matrix takes.
float cost_clock::output(int n) const {
    return costs_.output[n] * at().plain.value * (n == 1 ? at().one : at().many).value;
}

// A row of the output matrix is computed with those before it, or when it is reached, whichever is less.
float cost_clock::row_seconds(int i, float reach) const {
    const int j = std::max(i - n_waiting_, 1);  // rows of the output matrix
    return layers(i + 1) - layers(i) + std::min(reach * output(1), std::max(output(j + 1) - output(j), 0.0f));
}

float cost_clock::again_seconds(int n, float accepted, float all) const {
    if (n <= n_free_) {
        return 0.0f;
    }
    const int rows = std::min(n_roots() + (int) std::lround(accepted) + n_slots_, MAX_ROWS);
    return (1.0f - all) * std::max(layers(rows) - layers(n_slots_), 0.0f);
}

float cost_clock::even_seconds(std::vector<int> rows, int n_output) const {
    std::sort(rows.begin(), rows.end());
    float seconds = at().plain_rest + output(std::min(n_output, MAX_ROWS)) +
                    (n_output > n_slots_ ? std::max(at().draft_rest, 0.0f) : 0.0f);
    int done      = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] > done) {
            seconds += layers(std::min((int) (rows.size() - i) * (rows[i] - done), MAX_ROWS));
            done = rows[i];
        }
    }
    return seconds;
}

expectation cost_clock::foresee(const std::vector<float> & reach, int n_fixed, float passes_s) const {
    const int n   = std::min(n_roots() + n_fixed + (int) reach.size(), MAX_ROWS);
    float seconds = layers(n) + at().plain_rest + passes_s, tokens = (float) n_slots_;
    if (n > n_roots()) {
        std::vector<float> rows(n_slots_ + n_fixed, 1.0f);
        rows.insert(rows.end(), reach.begin(), reach.end());
        rows.resize(n - n_waiting_);
        seconds += pieces(rows, 0, 1.0f).seconds + at().draft_rest +
                   back_seconds(n - n_roots(), reach.empty() ? 0.0f : reach.back());
    } else {
        seconds += costs_.output[n_slots_] * at().plain.value;
    }
    for (const float p : reach) {
        tokens += p;
    }
    return {seconds, tokens};
}

// -- what rounds teach ------------------------------------------------------------------------------------

void cost_clock::saw_piece(int n, float seconds) {
    cost_factor & f   = n == 1 ? at().one : at().many;
    const float ratio = seconds / std::max(costs_.output[n] * at().plain.value * f.value, 1e-9f);
    f.correct(steady(f, ratio), tune_.keep_drift, tune_.least_weight);
    f.weight = ratio < 1.0f - tune_.surprised ? 0.0f : f.weight;  // cheaper than thought: tried again soon
}

// A single round that took long was disturbed; several that did, and the machine has changed, for this size
// at least.
float cost_clock::steady(cost_factor & f, float ratio) const {
    auto & last        = f.last;
    const float middle = std::max(std::min(last[0], last[1]), std::min(std::max(last[0], last[1]), ratio));
    last               = {last[1], ratio};
    return std::clamp(middle, tune_.least_ratio, tune_.most_ratio);
}

// Does the same for a plain round. A lone slot has few, and nothing makes one short but the machine: what was
// thought before counts for little then.
float cost_clock::steady_plain(float ratio) {
    cost_factor & f    = at().plain;
    const float middle = steady(f, ratio);
    if (n_slots_ > 1 || ratio >= 1.0f - tune_.surprised) {
        return middle;
    }
    f.weight = std::min(f.weight, tune_.least_weight);
    return std::max(ratio, tune_.least_ratio);
}

void cost_factor::correct(float ratio, float keep, float least_weight) {
    weight = weight * keep + 1.0f;
    value *= 1.0f + (ratio - 1.0f) / std::max(weight, least_weight);
}

// What a round did not show is believed less and less.
void cost_clock::time_passes(bool tried, bool drafted, int n_rows) {
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
        m.rest_weight *= tune_.fade;
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
float cost_clock::callers_seconds(float before_s) {
    mode & m = at();
    if (before_s <= tune_.most_rest * plain_seconds()) {
        const float keep = m.before < 0.0f ? 0.0f : tune_.keep_plain;
        m.before         = m.before * keep + before_s * (1.0f - keep);
        return before_s;
    }
    return std::max(m.before, 0.0f);
}

// Adds a round to what was foreseen, and learns how far such forecasts are from what rounds take. plain_s is
// what the round says of plain decoding, if it does.
void cost_clock::compare(const round_record & r, float plain_s) {
    mode & m          = at();
    const float prior = (float) tune_.min_drafts;
    if (r.expected.seconds > 0.0f) {
        const float took    = std::min(r.total_s + r.gathered_s, tune_.disturbed * r.expected.seconds);
        const float seconds = r.expected.seconds * m.late.value(prior * plain_seconds());
        const float plain   = usual_seconds() * r.expected.tokens / (float) n_slots_ * m.brought.value(prior);
        const bool is_plain = plain_s > 0.0f && !r.tried;
        foreseen_.seconds += seconds;
        foreseen_.plain += is_plain ? seconds : plain;  // the same, whatever the machine does now
        m.late.add(took, r.expected.seconds, tune_.keep_rate);
        m.brought.add((float) r.n_tokens, r.expected.tokens, tune_.keep_rate);
    }
    ++m.n_unseen;
    if (plain_s > 0.0f) {
        const float whole = measured_whole(n_slots_), n = (float) std::min(m.n_unseen, tune_.look);
        const float most = tune_.most_usual * whole * m.unseen.value(tune_.n_near * whole);
        m.usual.add(n * std::min(plain_s, most), n * whole, std::pow(tune_.keep_usual, n));
        m.n_unseen = 0;
        m.unseen   = {};
    }
    if (r.n_rows != n_slots_) {
        const float of = r.whole ? measured_whole(r.n_rows) : measured(r.n_rows);
        m.unseen.add(std::min(r.layers_s, tune_.disturbed * of), of, 1.0f);
    }
}

cost_clock::reading cost_clock::saw_round(round_record & r) {
    mode & m = at();
    r.total_s += callers_seconds(r.before_s);
    const bool plain     = r.n_rows == n_slots_;
    const float expected = layers(r.n_rows) + (r.whole ? costs_.output[r.n_rows] * m.plain.value : 0.0f);
    const float raw      = r.layers_s / std::max(expected, 1e-9f);
    // the first ones after a draft take a little longer: only what differs by more says something of the
    // machine
    const int n_since    = std::exchange(m.n_since, plain ? std::min(m.n_since + 1, tune_.settled) : 0);
    const bool is_early  = plain && n_since < tune_.settled;
    const bool unsettled = is_early && std::fabs(std::log(raw)) < tune_.surprised;
    const float ratio    = unsettled ? raw : plain ? steady_plain(raw) : steady(m.sizes[r.n_rows], raw);
    compare(r, plain && !is_early ? r.total_s - r.draft_s : 0.0f);
    time_passes(r.tried, !plain, r.n_rows);
    const float gain_plain = 1.0f / std::max(m.plain.weight * tune_.keep_plain + 1.0f, tune_.least_weight);
    learn_times(r, plain, unsettled, ratio);
    learn_rest(r, plain, gain_plain);
    // what else ran on the machine for a moment is no matter of the draft
    const float seconds = r.total_s - r.layers_s + ratio * expected;
    m.tokens            = m.tokens * tune_.keep_rate + (float) r.n_tokens;
    m.seconds           = m.seconds * tune_.keep_rate + seconds;
    return {plain, raw, ratio, seconds, plain && !unsettled && is_another()};
}

// The machine's drift is that of plain rounds: of other sizes, it may be what measuring them got wrong.
void cost_clock::learn_times(const round_record & r, bool plain, bool unsettled, float ratio) {
    mode & m           = at();
    const float before = m.drafted.value;
    if (plain && !unsettled) {
        m.plain.correct(ratio, tune_.keep_plain, tune_.least_weight);
    } else if (!plain) {
        cost_factor & size = m.sizes[r.n_rows];
        m.drafted.correct(size.value * ratio, tune_.keep_drift, tune_.least_weight);
        size.value *= before / m.drafted.value;
        size.correct(ratio, tune_.keep_drift, tune_.least_weight);
    }
    if (r.tried && r.passes_s > 0.0f) {
        m.head.correct(steady(m.head, r.draft_s / r.passes_s), tune_.keep_plain, tune_.least_weight);
    }
}

bool cost_clock::is_another() {
    mode & m         = at();
    const bool moved = std::fabs(std::log(m.plain.value / m.plain_tried)) > tune_.changed;
    m.plain_tried    = moved ? m.plain.value : m.plain_tried;
    return moved;
}

// Learns what a round takes beside decode and draft. gain_plain is the part of it that a plain round's counts
// for.
void cost_clock::learn_rest(const round_record & r, bool plain, float gain_plain) {
    mode & m         = at();
    const float rest = r.total_s - r.layers_s - r.draft_s;
    if (plain) {
        m.plain_rest += (std::max(rest, 0.0f) - m.plain_rest) * gain_plain;
    } else if (!r.whole && r.n_rows > n_roots()) {
        const float most = tune_.most_rest * plain_seconds();
        const float back = 0.5f * (float) r.n_copies * costs_.back * m.plain.value;
        const float seen = std::clamp(rest - back - r.output_s - m.plain_rest, -most, most);
        m.rest_weight    = m.rest_weight * tune_.keep_plain + 1.0f;
        m.draft_rest += (seen - m.draft_rest) / std::max(m.rest_weight, tune_.least_weight);
    }
}

}  // namespace eagle3
