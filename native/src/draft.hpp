// Drafting: asks in, the slots' drafts out.
#pragma once

#include "planner.hpp"
#include "slots.hpp"

#include <vector>

namespace eagle3 {

class drafter {
  public:
    drafter(slots & s, planner & p) : slots_(s), planner_(p) {}

    void check(const std::vector<ask> & asks) const;  // E_ARGUMENT for asks that eagle3_round_draft refuses
    void draft(const std::vector<ask> & asks);        // makes the draft of each ask's slot

    // What the last draft took, until the planner learns how its round went.
    struct spent {
        bool planned = false;
        int steps    = 0;
        float value = 0.0f, seconds = 0.0f;
        float passes_seconds = 0.0f;  // expected of the head's passes
        int64_t start        = 0;     // ggml_time_us()
    };
    const spent & last() const { return spent_; }
    void forget_last() { spent_.planned = false; }  // its time is not counted

  private:
    void check_kind(const ask & a) const;

    void grow_drafts(std::vector<ask> asks);
    bool planner_drafts(const std::vector<ask> & asks);
    void catch_up(const std::vector<ask> & asks);
    void begin_growth(growth & g, const std::vector<ask> & asks);
    void begin_asks(growth & g, const std::vector<ask> & asks);
    float first_pass_seconds(const growth & g, const std::vector<int> & asks) const;
    int room(const ask & a, int n_asks) const;
    ask grown(ask a, int n_asks) const;

    void grow(growth & g);
    std::vector<int> fixed_front(const growth & g) const;
    std::vector<int> planned_front(const growth & g) const;
    std::vector<int> extensible(const growth & g, const std::vector<int> & candidates) const;
    int planned_room(const growth & g) const;
    std::vector<int> candidates(const growth & g, int most) const;

    std::vector<std::vector<int>> choose(const growth & g);
    std::vector<int> chosen_of(const growth & g, int ask) const;
    void take_nodes(const growth & g, int ask, std::vector<int> order);
    void take_given(const ask & a, int n_asks);

    slots & slots_;
    planner & planner_;
    spent spent_;
};

}  // namespace eagle3
