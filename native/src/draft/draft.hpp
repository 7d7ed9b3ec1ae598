// Drafting takes asks and makes the slots' drafts.
#pragma once

#include "planner/planner.hpp"
#include "session/slots.hpp"

#include <cmath>
#include <vector>

namespace eagle3 {

class drafter {
  public:
    drafter(slots & s, planner & p) : slots_(s), planner_(p) {}

    void check(const std::vector<ask> & asks) const;  // E_ARGUMENT for asks that eagle3_round_draft refuses
    void draft(const std::vector<ask> & asks);        // makes the draft of each ask's slot

    // This is what the last draft took, until the planner learns how its round went.
    struct spent {
        bool planned = false;
        int steps    = 0;
        bool offered = false;  // a source without passes offered something
        float value = 0.0f, seconds = 0.0f;
        float base           = -INFINITY;  // value without the head, where it is known
        float passes_seconds = 0.0f;       // expected of the head's passes
        int64_t began = 0, start = 0;      // ggml_time_us(); start: without work that had gathered
        planner::expectation expected;
    };
    const spent & last() const { return spent_; }
    void forget_last() { spent_.planned = false; }  // its time is not counted

  private:
    void check_kind(const ask & a) const;

    void grow_drafts(std::vector<ask> asks);
    int n_waiting(const std::vector<ask> & asks) const;
    planner::turn turn_of(const std::vector<ask> & asks);
    bool drafts_for(const source & from, const ask & a) const;
    void offer_for_free(draft_tree & g);
    std::vector<int> pass_asks(const draft_tree & g, planner::turn now) const;
    bool runs_passes(const draft_tree & g, planner::turn now);
    void catch_up(const draft_tree & g);
    void begin_passes(draft_tree & g, planner::turn now);
    void follow(draft_tree & g);
    void begin_asks(draft_tree & g, const std::vector<ask> & asks);
    float first_pass_seconds(const draft_tree & g, const std::vector<int> & asks) const;
    int room(const ask & a, int n_asks) const;
    ask grown(ask a, int n_asks) const;

    void grow(draft_tree & g);
    std::vector<int> fixed_frontier(const draft_tree & g) const;

    std::vector<std::vector<int>> choose(const draft_tree & g);
    void choose_even(
        const draft_tree & g, const std::vector<int> & planned, std::vector<std::vector<int>> & chosen);
    void foresee(const std::vector<float> & reach, int n_fixed);
    std::vector<int> chosen_of(const draft_tree & g, int ask) const;
    void take_nodes(const draft_tree & g, int ask, std::vector<int> order);
    void take_given(const ask & a, int n_asks);

    slots & slots_;
    planner & planner_;
    spent spent_;
};

}  // namespace eagle3
