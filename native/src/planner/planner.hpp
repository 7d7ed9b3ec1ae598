// The planner chooses what to draft by measured cost: how far a chain or a tree is grown, how much of it the
// target checks, and whether to draft at all. Its parts say what rounds take (cost_clock), what the sources'
// estimates are worth (calibration), and when nothing is drafted (rest_policy).
#pragma once

#include "planner/calibration.hpp"
#include "planner/cost_clock.hpp"
#include "planner/rest_policy.hpp"

#include <vector>

namespace eagle3 {

// The value of a draft of n nodes is the tokens it is expected to bring less what its time would bring
// elsewhere:
//
//     1 + sum of reach[i] - rate * (layers[n + 1] + expected output)
//
// reach[i] is the probability that verification gets to node i, rate the long run's tokens per second. What
// raises the value raises the rate, and a rate that no draft can raise is the highest there is (renewal
// reward).
//
// A round may hold several slots: their roots are rows that are there anyway, their nodes compete for the
// rest. What a round takes and brings is remembered for each number of slots.
class planner {
  public:
    explicit planner(const tuning & t = {}, const text_tuning & text = {}) : tune_(t), of_text_(text) {}
    planner(const planner &)             = delete;  // its parts refer to each other
    planner & operator=(const planner &) = delete;

    using turn        = rest_policy::turn;
    using expectation = eagle3::expectation;
    using forecast    = eagle3::forecast;
    using round       = round_record;

    void set(const costs & c);
    bool ready() const { return clock_.ready(); }

    // See cost_clock::begin, rest_policy::new_text and rest_policy::next_turn.
    void begin(int n_slots, float n_past, int n_waiting = 0, int n_free = MAX_ROWS) {
        clock_.begin(n_slots, n_past, n_waiting, n_free);
    }
    void new_text() { rest_.new_text(is_wrong()); }
    turn next_turn() { return rest_.next_turn(); }

    // See calibration::accept.
    float accept(int source, int depth, float q, float trust) const {
        return calibration_.accept(source, depth, q, trust);
    }
    // Is told of all draft tokens that verification reached, and of first ones that were offered and not
    // drafted: where no draft pays, these are all that there is to learn from. See calibration::learn.
    void learn(int source, int depth, int rank, float q, bool accepted, float & trust);

    // Returns how many nodes to draft of those sorted by reach, and what that is worth. n_fixed counts other
    // nodes that are drafted anyway.
    struct choice {
        int n;
        float value;
    };
    choice best(const std::vector<float> & reach, int n_fixed = 0) const;
    // Does the same where slots share a pass only as far as they have as many rows. n_waiting rows of each
    // slot are there anyway; reach holds its chain. Returns how many of its nodes each slot drafts.
    struct even_choice {
        std::vector<int> n;
        float value;
        expectation expected;  // without passes of the head
    };
    even_choice best_even(
        const std::vector<int> & n_waiting, const std::vector<std::vector<float>> & reach, int most) const;
    // Returns how many of a level's nodes the head should extend. extra is the seconds that the first pass
    // takes beyond the others.
    int grow_width(const std::vector<float> & reach, int depth, const std::vector<float> & level,
        int n_children, float trust, int n_fixed = 0, float extra = 0.0f) const;
    // See cost_clock.
    int piece(const std::vector<float> & reach, int i) const { return clock_.piece(reach, i); }
    void saw_piece(int n, float seconds) { clock_.saw_piece(n, seconds); }
    float pass_seconds(int n, bool first) const { return clock_.pass_seconds(n, first); }
    expectation foresee(const std::vector<float> & reach, int n_fixed, float passes_s) const {
        return clock_.foresee(reach, n_fixed, passes_s);
    }
    float measured_seconds(int n, bool whole) const { return clock_.measured_seconds(n, whole); }
    forecast foreseen() const { return clock_.foreseen(); }

    void saw_round(round_record r);

    float rate() const { return clock_.rate(); }
    float plain_seconds() const { return clock_.plain_seconds(); }
    float usual_seconds() const { return clock_.usual_seconds(); }
    int n_slots() const { return clock_.n_slots(); }
    int asleep() const { return rest_.asleep(); }
    const text_tuning & of_text() const { return of_text_; }

  private:
    bool is_wrong() const;

    const tuning tune_;
    const text_tuning of_text_;
    cost_clock clock_{tune_};
    calibration calibration_{tune_, of_text_};
    rest_policy rest_{tune_, of_text_, clock_};
};

}  // namespace eagle3
