// Which nodes of a growing draft get children.
#include "draft.hpp"

#include <algorithm>

namespace eagle3 {

namespace {

bool has_children(const ask & a, int choice) {
    return choice >= 0 && std::find(a.parents, a.parents + a.n_max, choice) != a.parents + a.n_max;
}

}  // namespace

// Nodes of the last level that drafts of a given size extend.
std::vector<int> drafter::fixed_front(const growth & g) const {
    std::vector<int> front;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        const ask & a = g.asks[i];
        if (a.kind == EAGLE3_PLANNED) {
            continue;
        }
        std::vector<int> level = g.level_by_reach([&](const growth::node & v) { return v.ask == i; });
        if (a.kind == EAGLE3_CHOICES) {
            std::copy_if(level.begin(), level.end(), std::back_inserter(front),
                [&](int v) { return has_children(a, g.nodes[v].choice); });
            continue;
        }
        level.resize(std::min({(int) level.size(), a.width, slots_.head()->n_extensible(i)}));
        std::copy_if(level.begin(), level.end(), std::back_inserter(front),
            [&](int v) { return g.nodes[v].depth < a.depth && g.is_likely(g.nodes[v]); });
    }
    return front;
}

// The most nodes that the planner may draft in all slots together.
int drafter::planned_room(const growth & g) const {
    int room = 0;
    for (const ask & a : g.asks) {
        room = a.kind == EAGLE3_PLANNED ? std::max(room, a.n_max) : room;
    }
    return room;
}

// What the planner may draft, the likeliest first: of each ask no more nodes than its own n_max, which its
// room has cut, and `most` of all. A parent comes before its children, so it is there with each of them.
std::vector<int> drafter::candidates(const growth & g, int most) const {
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

// Nodes of the last level that the planner may extend, the likeliest first. A child of one that is no
// candidate would be none either, and one on level n needs n nodes.
std::vector<int> drafter::extensible(const growth & g, const std::vector<int> & candidates) const {
    std::vector<bool> is_candidate(g.nodes.size(), false);
    std::vector<int> n_of(g.asks.size(), 0), level;
    for (const int v : candidates) {
        is_candidate[v] = true;
        ++n_of[g.nodes[v].ask];
    }
    std::vector<int> used(g.asks.size(), 0);
    for (const int v : g.level_by_reach([&](const growth::node & v) { return g.is_planned(v); })) {
        const int a    = g.nodes[v].ask;
        const ask & q  = g.asks[a];
        const bool out = n_of[a] >= q.n_max && !is_candidate[v];
        if (!out && g.nodes[v].depth < q.n_max &&
            used[a] < std::min(q.width, slots_.head()->n_extensible(a))) {
            ++used[a];
            level.push_back(v);
        }
    }
    return level;
}

// Nodes of the last level that the planner extends: of all slots together, as many as pay.
std::vector<int> drafter::planned_front(const growth & g) const {
    std::vector<float> reach, level_reach;
    const int room = planned_room(g);
    int n_children = 1, n_fixed = g.n_given;
    float trust = 0.0f;
    for (const growth::node & v : g.nodes) {
        n_fixed += !g.is_planned(v);
    }
    for (const ask & a : g.asks) {
        n_children = a.kind == EAGLE3_PLANNED ? std::max(n_children, a.width) : n_children;
    }
    n_fixed                      = std::min(n_fixed, slots_.most_rows - g.n_asks - room);
    const std::vector<int> nodes = candidates(g, room);
    for (const int v : nodes) {
        reach.push_back(g.nodes[v].reach);
    }
    std::vector<int> level = extensible(g, nodes);
    if (level.empty() || (int) reach.size() >= room) {
        return {};
    }
    for (const int v : level) {
        level_reach.push_back(g.nodes[v].reach);
        trust += (*g.trust[g.nodes[v].ask])[slots_.head()->id];
    }
    level.resize(planner_.grow_width(reach, g.nodes[level[0]].depth, level_reach, n_children,
        trust / (float) level.size(), std::max(n_fixed, 0)));
    return level;
}

// The head extends what it offered, as long as that pays.
void drafter::grow(growth & g) {
    while (true) {
        std::vector<int> front         = fixed_front(g);
        const std::vector<int> planned = planned_front(g);
        front.insert(front.end(), planned.begin(), planned.end());
        if (front.empty()) {
            return;
        }
        g.level.clear();
        spent_.passes_seconds += planner_.pass_seconds(std::min((int) front.size(), MAX_ROWS), false);
        slots_.head()->extend(g, front);
        follow(g);
        ++spent_.steps;
    }
}

}  // namespace eagle3
