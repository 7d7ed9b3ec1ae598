// This says which nodes of a growing draft get children, and whether the head drafts at all.
#pragma once

#include "draft/draft_tree.hpp"

#include <functional>
#include <vector>

namespace eagle3 {

using count_of_ask = std::function<int(int)>;

// Returns the most nodes that the planner may draft in all slots together.
int planned_room(const draft_tree & g);

// Returns what the planner may draft, the likeliest first: of each ask no more nodes than its own n_max,
// which its room has cut, and `most` of all. A parent comes before its children, so it is there with each of
// them.
std::vector<int> candidates(const draft_tree & g, int most);

// Says whether the head's first pass is expected to pay for these asks, beside what was offered. seconds is
// the time that it takes, base what a draft of the offered alone is worth.
bool passes_pay(const draft_tree & g, const std::vector<int> & asks, float seconds, float & base);

// Returns the nodes of the last level that the planner extends: of all slots together, as many as pay.
// most_rows is what a round has; n_extensible(ask) are the nodes that the head can still extend.
std::vector<int> planned_frontier(const draft_tree & g, int most_rows, const count_of_ask & n_extensible);

}  // namespace eagle3
