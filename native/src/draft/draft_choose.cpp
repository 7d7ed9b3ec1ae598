// This chooses what to draft of what the sources offered.
#include "draft/draft.hpp"

#include "draft/frontier.hpp"

#include <algorithm>

namespace eagle3 {

// Chooses the nodes of each ask to draft: as many as were asked for, or, where the planner chooses, as many
// as pay in all slots together.
std::vector<std::vector<int>> drafter::choose(const draft_tree & g) {
    std::vector<std::vector<int>> chosen(g.asks.size());
    int n_fixed = g.n_given;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        if (g.asks[i].kind != EAGLE3_PLANNED) {
            chosen[i] = chosen_of(g, i);
            n_fixed += (int) chosen[i].size();
        }
    }
    const std::vector<int> planned =
        candidates(g, std::min(planned_room(g), g.most_rows - g.n_asks - n_fixed));
    if (planned.empty()) {
        foresee({}, n_fixed);
        return chosen;
    }
    if (g.asks.size() > 1 && slots_.target.needs_even_rows()) {
        choose_even(g, planned, chosen);
        return chosen;
    }
    std::vector<float> reach;
    for (const int v : planned) {
        reach.push_back(g.nodes[v].reach);
    }
    const planner::choice c = planner_.best(reach, n_fixed);
    spent_.value            = c.value;
    for (int i = 0; i < c.n; ++i) {
        chosen[g.nodes[planned[i]].ask].push_back(planned[i]);
    }
    reach.resize(c.n);
    foresee(reach, n_fixed);
    return chosen;
}

// Does the same for a target whose slots share a pass only as far as they have as many rows.
void drafter::choose_even(
    const draft_tree & g, const std::vector<int> & planned, std::vector<std::vector<int>> & chosen) {
    std::vector<int> n_waiting;
    std::vector<std::vector<int>> nodes(g.asks.size());
    std::vector<std::vector<float>> reach(g.asks.size());
    for (const ask & a : g.asks) {
        n_waiting.push_back((int) slots_.at(a.slot).waiting.size());
    }
    for (const int v : planned) {
        nodes[g.nodes[v].ask].push_back(v);
        reach[g.nodes[v].ask].push_back(g.nodes[v].reach);
    }
    const planner::even_choice c = planner_.best_even(n_waiting, reach, (int) planned.size());
    for (size_t i = 0; i < nodes.size(); ++i) {
        chosen[i].insert(chosen[i].end(), nodes[i].begin(), nodes[i].begin() + c.n[i]);
    }
    spent_.value    = c.value;
    spent_.expected = {c.expected.seconds + spent_.passes_seconds, c.expected.tokens};
}

// Keeps what is expected of the round, for comparison with what it brings.
void drafter::foresee(const std::vector<float> & reach, int n_fixed) {
    if (spent_.planned) {
        spent_.expected = planner_.foresee(reach, n_fixed, spent_.passes_seconds);
    }
}

// Chooses the nodes of an ask that is not the planner's.
std::vector<int> drafter::chosen_of(const draft_tree & g, int i) const {
    const ask & a = g.asks[i];
    std::vector<int> chosen;
    if (a.kind == EAGLE3_CHOICES) {
        chosen = g.by_reach([&](const draft_tree::node & v) { return v.ask == i && v.choice >= 0; });
        std::sort(chosen.begin(), chosen.end(),
            [&](int v, int w) { return g.nodes[v].choice < g.nodes[w].choice; });
        return chosen;
    }
    chosen = g.by_reach([&](const draft_tree::node & v) { return v.ask == i && g.is_likely(v); });
    chosen.resize(std::min((int) chosen.size(), a.n_max));
    if (a.kind == EAGLE3_CHAIN && (int) chosen.size() < a.n_min) {
        chosen.clear();
    }
    return chosen;
}

// Makes these nodes of an ask, the likeliest first, the slot's draft, level by level. A parent's reach is
// never below its child's, so every node's parent is among them.
void drafter::take_nodes(const draft_tree & g, int a, std::vector<int> order) {
    slot_state & s = slots_.at(g.asks[a].slot);
    for (const draft_tree::node & v : g.nodes) {
        if (order.empty() && v.ask == a && v.parent < 0 && g.is_planned(v)) {
            s.draft.undrafted.push_back({v.token, v.evidence});
        }
    }
    std::vector<int> place(g.nodes.size(), -1);
    std::stable_sort(
        order.begin(), order.end(), [&](int i, int j) { return g.nodes[i].depth < g.nodes[j].depth; });
    for (int i = 0; i < (int) order.size(); ++i) {
        const draft_tree::node & v = g.nodes[order[i]];
        place[order[i]]            = i;
        s.draft.tokens.push_back(v.token);
        s.draft.parents.push_back(v.parent < 0 ? -1 : place[v.parent]);
        s.draft.reach.push_back(v.reach);
        s.draft.evidence.push_back(v.evidence);
    }
}

}  // namespace eagle3
