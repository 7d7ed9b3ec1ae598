// This says what rounds take: the costs that a load measured, corrected by what decodes, passes and pieces of
// the output matrix took since.
#pragma once

#include "eagle3.h"
#include "planner/tuning.hpp"

#include <array>
#include <cmath>
#include <vector>

namespace eagle3 {

constexpr int MAX_ROWS = EAGLE3_MAX_ROWS;

using costs = eagle3_costs;
// Throws E_ARGUMENT for costs that eagle3_plan_set refuses.
void check(const costs & c);

// This is what a round is expected to take and to bring.
struct expectation {
    float seconds = 0.0f, tokens = 0.0f;
};

// These are the seconds that rounds were expected to take, and that plain decoding takes for the tokens
// expected of them.
struct forecast {
    double seconds = 0.0, plain = 0.0;
};

// This is one round, as the planner is told of it.
struct round_record {
    int n_rows     = 0;
    bool tried     = false;  // the head ran
    bool offered   = false;  // other sources offered something
    bool whole     = false;  // the decode computed the output matrix too
    float layers_s = 0.0f, draft_s = 0.0f, total_s = 0.0f;
    float before_s   = 0.0f;       // since the planner was told of the last round
    float gathered_s = 0.0f;       // work that had gathered, which is in none of these
    float passes_s   = 0.0f;       // expected of the head's passes
    int n_tokens     = 0;          // that it brought
    int n_copies     = 0;          // checkpoints taken or restored
    float value      = 0.0f;       // its draft's, from planner::best()
    float base       = -INFINITY;  // the same without the head
    float output_s   = 0.0f;       // for the pieces of the output matrix, unless whole
    expectation expected;
};

// This is the time that something took, relative to the time that was measured for it. It does not happen in
// each round: the longer it has not been seen, the more the next time counts.
struct cost_factor {
    float value = 1.0f, weight = 0.0f;
    std::array<float, 2> last = {1.0f, 1.0f};  // ratios of the last two times
    void correct(float ratio, float keep, float least_weight);
    void fade(float keep) { weight *= keep; }  // in a round without it
    void relax(float rate) { value = 1.0f + (value - 1.0f) * (1.0f - rate); }
};

// What is remembered belongs to rounds of as many slots: begin() says of how many the next rounds are.
class cost_clock {
  public:
    explicit cost_clock(const tuning & t) : tune_(t) {}

    void set(const costs & c);
    bool ready() const { return costs_.layers[1] > 0.0f; }
    // The rounds that follow hold this many slots, with this many positions before each on average. n_waiting
    // rows of the next one bring the target's memory up. It can take back n_free draft tokens; of a longer
    // draft that is not accepted as a whole, the kept rows wait for the round after.
    void begin(int n_slots, float n_past, int n_waiting = 0, int n_free = MAX_ROWS);
    int n_slots() const { return n_slots_; }

    // Returns what a decode of n rows took when it was measured; whole: with the output matrix for all of
    // them.
    float measured_seconds(int n, bool whole) const { return whole ? measured_whole(n) : measured(n); }

    // -- what is expected --
    float rate() const;           // tokens per second, of all slots
    float plain_seconds() const;  // that a round without drafts takes
    float usual_seconds() const;  // the same on average over many rounds
    // Returns the rows of the next round that are there without any draft.
    int n_roots() const { return n_slots_ + n_waiting_; }
    // Returns what one row more takes, behind i rows, if it is reached with this probability.
    float row_seconds(int i, float reach) const;
    // Returns what a slot's draft of n tokens takes beside its rows because a checkpoint takes it back,
    // unless all are accepted, which has this probability: then it is taken, and not restored.
    float back_seconds(int n, float all = 0.0f) const {
        return n > n_free_ ? (1.0f - 0.5f * all) * costs_.back * at().plain.value : 0.0f;
    }
    // Returns what the round after takes longer because of a draft of n tokens, of which some are expected to
    // be accepted, and all with a probability.
    float again_seconds(int n, float accepted, float all) const;
    // Returns what a round takes whose slots have these numbers of rows, if a pass has as many of each slot.
    // n_output rows of the output matrix are computed.
    float even_seconds(std::vector<int> rows, int n_output) const;
    // Returns what a round with a draft takes beside its decode, its passes and the output matrix.
    float draft_rest() const { return at().draft_rest; }
    // Returns what a pass over the head with n rows takes; first: the first one of a draft.
    float pass_seconds(int n, bool first) const {
        return (costs_.head[n] + (first ? costs_.first : 0.0f)) * at().plain.value * at().head.value;
    }
    // Returns what is expected of a whole round: n_fixed nodes are drafted beside those whose reach is given.
    expectation foresee(const std::vector<float> & reach, int n_fixed, float passes_s) const;
    // Returns how many rows of the output matrix to compute at once, from row i on of those whose reach is
    // given.
    int piece(const std::vector<float> & reach, int i) const { return pieces(reach, i, tune_.try_two).n; }
    // Returns the forecast of all rounds since set().
    forecast foreseen() const { return foreseen_; }

    // -- what was seen --
    void saw_piece(int n, float seconds);  // a piece of the output matrix took so long

    // This is what a round's decode said of the machine.
    struct reading {
        bool plain;       // the round had no draft
        float raw;        // seconds of its layers, relative to what was expected
        float ratio;      // the same without what disturbed a single round
        float seconds;    // for the round, without the same
        bool is_another;  // whether the machine has become another one since this was said last
    };
    reading saw_round(round_record & r);

  private:
    struct average {  // what was seen, and what was expected, decaying
        float seen = 0.0f, expected = 0.0f;
        float value(float prior) const { return (seen + prior) / (expected + prior); }
        void add(float s, float e, float keep) {
            seen     = seen * keep + s;
            expected = expected * keep + e;
        }
    };

    // This is what rounds with so many slots took.
    struct mode {
        cost_factor plain;    // plain rounds, whose size is another in each mode: the machine's drift
        cost_factor drafted;  // rounds with drafts, beyond that
        std::array<cost_factor, MAX_ROWS + 1> sizes;  // each size of these, beyond both
        cost_factor one, many;                // pieces of the output matrix, one row and more, beyond plain
        cost_factor head;                     // the drafter's passes, beyond plain
        float tokens = 0.0f, seconds = 0.0f;  // decaying
        float plain_rest  = 0.0f;             // what a plain round takes beside its decode, seconds, decaying
        float draft_rest  = 0.0f;  // the same of one with a draft, beyond plain_rest and the output matrix
        float rest_weight = 0.0f;  // weight of the rounds that it comes from, decaying
        float before = -1.0f;  // what the caller takes between rounds, seconds, decaying; negative if unknown
        average late, brought;  // seconds and tokens of all rounds, against their forecasts
        average unseen;  // seconds of layers in rounds with drafts since the last look, against the costs set
        // These are the seconds of plain rounds, against the same. Each counts for the rounds since the one
        // before: a disturbance brings looks, so that more of them fall into it.
        average usual;
        int n_unseen      = 0;     // rounds since the last look
        int n_since       = 0;     // plain rounds since the last draft, up to tuning::settled
        float plain_tried = 1.0f;  // the drift when the machine was last called another one
    };
    mode & at() { return modes_[n_slots_]; }
    const mode & at() const { return modes_[n_slots_]; }

    struct pieces_of {
        int n;          // rows of the first one
        float seconds;  // expected of all
    };
    pieces_of pieces(const std::vector<float> & reach, int i, float try_two) const;
    float measured(int n) const;
    float measured_whole(int n) const;
    float layers(int n) const;
    float output(int n) const;
    float steady(cost_factor & f, float ratio) const;
    float steady_plain(float ratio);
    float callers_seconds(float before_s);
    bool is_another();
    void compare(const round_record & r, float plain_s);
    void time_passes(bool tried, bool drafted, int n_rows);
    void learn_times(const round_record & r, bool plain, bool unsettled, float ratio);
    void learn_rest(const round_record & r, bool plain, float gain_plain);

    const tuning & tune_;
    costs costs_{};
    forecast foreseen_;
    float context_ = 0.0f;  // positions before the rows at hand
    int n_slots_   = 1;
    int n_waiting_ = 0, n_free_ = MAX_ROWS;
    std::array<mode, MAX_ROWS + 1> modes_{};
};

}  // namespace eagle3
