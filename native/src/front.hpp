// Which nodes of a growing draft get children, and whether the head drafts at all.
#pragma once

#include "growth.hpp"

#include <functional>
#include <vector>

namespace eagle3 {

using count_of_ask = std::function<int(int)>;

// The most nodes that the planner may draft in all slots together.
int planned_room(const growth & g);

// What the planner may draft, the likeliest first: of each ask no more nodes than its own n_max, which its
// room has cut, and `most` of all. A parent comes before its children, so it is there with each of them.
std::vector<int> candidates(const growth & g, int most);

// Whether the head's first pass is expected to pay, for these asks, beside what was offered. seconds: that it
// takes. base: what a draft of that alone is worth.
bool head_pays(const growth & g, const std::vector<int> & asks, float seconds, float & base);

// Nodes of the last level that the planner extends: of all slots together, as many as pay. most_rows: of a
// round. n_extensible: of an ask, nodes that the head can still extend.
std::vector<int> planned_front(const growth & g, int most_rows, const count_of_ask & n_extensible);

}  // namespace eagle3
