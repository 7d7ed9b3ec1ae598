#include "draft/frontier.hpp"

#include <algorithm>
#include <functional>
#include <iterator>

namespace eagle3 {

int planned_room(const draft_tree & g) {
    int room = 0;
    for (const ask & a : g.asks) {
        room = a.kind == EAGLE3_PLANNED ? std::max(room, a.n_max) : room;
    }
    return room;
}

std::vector<int> candidates(const draft_tree & g, int most) {
    std::vector<int> order, n_of(g.asks.size(), 0);
    for (const int v : g.planned()) {
        const int a = g.nodes[v].ask;
        if ((int) order.size() < most && n_of[a] < g.asks[a].n_max) {
            ++n_of[a];
            order.push_back(v);
        }
    }
    return order;
}

namespace {

std::vector<float> reach_of(const draft_tree & g, const std::vector<int> & nodes) {
    std::vector<float> reach;
    for (const int v : nodes) {
        reach.push_back(g.nodes[v].reach);
    }
    return reach;
}

int most_children(const draft_tree & g) {
    int n = 1;
    for (const ask & a : g.asks) {
        n = a.kind == EAGLE3_PLANNED ? std::max(n, a.width) : n;
    }
    return n;
}

// Returns the nodes of the last level that the planner may extend, the likeliest first. A child of one that
// is no candidate would be none either, and one on level n needs n nodes.
std::vector<int> extensible(
    const draft_tree & g, const std::vector<int> & candidates, const count_of_ask & n_extensible) {
    std::vector<bool> is_candidate(g.nodes.size(), false);
    std::vector<int> n_of(g.asks.size(), 0), level;
    for (const int v : candidates) {
        is_candidate[v] = true;
        ++n_of[g.nodes[v].ask];
    }
    std::vector<int> used(g.asks.size(), 0);
    for (const int v : g.level_by_reach([&](const draft_tree::node & v) { return g.is_planned(v); })) {
        const int a    = g.nodes[v].ask;
        const ask & q  = g.asks[a];
        const bool out = n_of[a] >= q.n_max && !is_candidate[v];
        if (!out && g.goes_on(g.nodes[v]) && used[a] < std::min(q.width, n_extensible(a))) {
            ++used[a];
            level.push_back(v);
        }
    }
    return level;
}

}  // namespace

// What the head may add is what the first tokens that were offered leave.
bool passes_pay(const draft_tree & g, const std::vector<int> & asks, float seconds, float & base) {
    const std::vector<int> nodes   = candidates(g, planned_room(g));
    const std::vector<float> reach = reach_of(g, nodes);
    std::vector<float> left(g.asks.size(), 0.0f), frontier;
    float trust = 0.0f;
    for (const int a : asks) {
        left[a] = 1.0f;
        trust += (*g.trust[a])[PASSES] / (float) asks.size();
    }
    for (const int v : nodes) {
        left[g.nodes[v].ask] -= g.nodes[v].depth == 1 ? g.plan->of_text().sure * g.nodes[v].prob : 0.0f;
    }
    std::copy_if(left.begin(), left.end(), std::back_inserter(frontier), [](float p) { return p > 0.0f; });
    std::sort(frontier.begin(), frontier.end(), std::greater<float>());
    base              = g.plan->best(reach, g.n_given).value;
    const float extra = std::max(seconds - g.plan->pass_seconds(1, false), 0.0f);
    return g.plan->grow_width(reach, 0, frontier, most_children(g), trust, g.n_given, extra) > 0;
}

std::vector<int> planned_frontier(const draft_tree & g, int most_rows, const count_of_ask & n_extensible) {
    const int room = planned_room(g);
    int n_fixed    = g.n_given;
    for (const draft_tree::node & v : g.nodes) {
        n_fixed += !g.is_planned(v);
    }
    n_fixed                      = std::min(n_fixed, most_rows - g.n_asks - room);
    const std::vector<int> nodes = candidates(g, room);
    std::vector<int> level       = extensible(g, nodes, n_extensible);
    if (level.empty() || (int) nodes.size() >= room) {
        return {};
    }
    float trust = 0.0f;
    for (const int v : level) {
        trust += (*g.trust[g.nodes[v].ask])[PASSES];
    }
    level.resize(g.plan->grow_width(reach_of(g, nodes), g.nodes[level[0]].depth, reach_of(g, level),
        most_children(g), trust / (float) level.size(), std::max(n_fixed, 0)));
    return level;
}

}  // namespace eagle3
