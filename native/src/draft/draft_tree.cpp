#include "draft/draft_tree.hpp"

#include <numeric>

namespace eagle3 {

namespace {

// Returns the choice that is the rank-th child of choice `parent`, or -1. Those beyond n_max are left out.
int choice_of(const ask & a, int parent, int rank) {
    for (int i = 0; i < a.n_max; ++i) {
        if (a.parents[i] == parent && a.ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

// Returns what two guesses that agree are worth, if each would be right by chance one time in four.
float agreement(float h, float t) {
    const auto odds = [](float p) {
        p = std::clamp(p, (float) tree_limits::least_odds, 1.0f - tree_limits::least_odds);
        return p / (1.0f - p);
    };
    const float o = odds(h) * odds(t) / odds(tree_limits::chance);
    return o / (1.0f + o);
}

}  // namespace

std::vector<int> depths(const int32_t * parents, size_t n) {
    std::vector<int> depth;
    depth.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        depth.push_back(parents[i] < 0 ? 0 : depth[parents[i]] + 1);
    }
    return depth;
}

int draft_tree::offer(int source, int a, int parent, int32_t token, float evidence, int rank) {
    const ask & q = asks[a];
    node v        = {token, a, parent, parent < 0 ? 1 : nodes[parent].depth + 1, 0.0f, 0.0f, -1, {}};
    if (q.kind == EAGLE3_CHOICES) {
        v.choice = choice_of(q, parent < 0 ? -1 : nodes[parent].choice, rank);
    }
    // EAGLE-2 goes by the head's own probabilities.
    v.prob  = q.kind == EAGLE3_TREE ? evidence : plan->accept(source, v.depth, evidence, (*trust[a])[source]);
    v.reach = (parent < 0 ? 1.0f : nodes[parent].reach) * v.prob;
    v.evidence.fill(NOT_OFFERED);
    v.evidence[source] = evidence;
    mixed              = mixed || source != PASSES;
    const auto same    = std::find_if(mixed ? nodes.begin() + (parent + 1) : nodes.end(), nodes.end(),
        [&](const node & o) { return o.ask == a && o.parent == parent && o.token == token; });
    const int at       = (int) (same - nodes.begin());
    if (same == nodes.end()) {
        nodes.push_back(v);
    } else {
        same->evidence[source] = std::max(same->evidence[source], evidence);
        if (v.prob > same->prob) {
            same->prob = v.prob;
            update_reach(at);
        }
    }
    below_.resize(asks.size(), 0);
    unsigned & below = parent < 0 ? below_[a] : nodes[parent].below;
    below |= 1u << source;
    if (((below >> PASSES) & 1) && ((below >> TEXT) & 1)) {
        settle(a, parent);
    }
    return at;
}

// Returns the calibrated probability of one source, as if no other had offered anything, or 0 if it did not
// offer the node.
std::vector<int> draft_tree::children_of_others(int ask, int parent) const {
    std::vector<int> children;
    for (int i = parent + 1; mixed && i < (int) nodes.size(); ++i) {
        const node & v = nodes[i];
        if (v.ask == ask && v.parent == parent && v.evidence[PASSES] == NOT_OFFERED) {
            children.push_back(i);
        }
    }
    return children;
}

float draft_tree::accept(const node & v, int source) const {
    const float q = v.evidence[source];
    return q == NOT_OFFERED ? 0.0f : plan->accept(source, v.depth, q, (*trust[v.ask])[source]);
}

// Sets the probabilities of a node's children, of which head and text offered some. What both offer is
// likelier than either says, what the text alone offers is less likely, and what it leaves is the head's.
void draft_tree::settle(int ask, int parent) {
    float most_of_head = 0.0f, agreed = 0.0f, of_text = 0.0f;
    std::vector<int> children;
    for (int i = parent + 1; i < (int) nodes.size(); ++i) {
        if (nodes[i].ask == ask && nodes[i].parent == parent) {
            children.push_back(i);
            const float h = accept(nodes[i], PASSES);
            most_of_head  = std::max(most_of_head, nodes[i].evidence[TEXT] == NOT_OFFERED ? h : 0.0f);
            agreed += nodes[i].evidence[TEXT] == NOT_OFFERED ? 0.0f : h;
        }
    }
    for (const int i : children) {
        node & v      = nodes[i];
        const float t = accept(v, TEXT), h = accept(v, PASSES);
        if (v.evidence[TEXT] == NOT_OFFERED) {
            continue;
        }
        const int from   = v.evidence[PASSES] == NOT_OFFERED ? DISPUTED : BOTH;
        v.evidence[from] = from == BOTH ? agreement(h, t) : t * (1.0f - most_of_head);
        v.prob           = accept(v, from);
        of_text += v.prob;
    }
    const float left =
        std::max(1.0f - of_text, 0.0f) / std::max(1.0f - agreed, (float) tree_limits::least_left);
    for (const int i : children) {
        if (nodes[i].evidence[TEXT] == NOT_OFFERED && nodes[i].evidence[PASSES] != NOT_OFFERED) {
            nodes[i].prob = std::min(accept(nodes[i], PASSES) * left, 1.0f);
        }
        for (int other = OTHER; other < MAX_SOURCES; ++other) {
            nodes[i].prob = std::max(nodes[i].prob, accept(nodes[i], other));
        }
    }
    update_reach(parent + 1);
}

// Computes the reach of this node and of those below it.
void draft_tree::update_reach(int from) {
    for (int i = from; i < (int) nodes.size(); ++i) {
        nodes[i].reach = (nodes[i].parent < 0 ? 1.0f : nodes[nodes[i].parent].reach) * nodes[i].prob;
    }
}

void draft_tree::sort(std::vector<int> & order) const {
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return nodes[a].reach > nodes[b].reach || (nodes[a].reach == nodes[b].reach && a < b);
    });
}

int draft_tree::widest() const {
    int w = 1;
    for (const ask & a : asks) {
        w = std::max(w, a.width);
    }
    return w;
}

std::vector<int> draft_tree::planned() const {
    if (!mixed) {  // the head offers no more siblings than the width
        return by_reach([&](const node & v) { return is_planned(v); });
    }
    const int n = (int) nodes.size();
    std::vector<float> below(n);  // tokens expected of a node and of the best path below it
    for (int i = n - 1; i >= 0; --i) {
        below[i] += nodes[i].reach;
        if (nodes[i].parent >= 0) {
            below[nodes[i].parent] = std::max(below[nodes[i].parent], below[i]);
        }
    }
    std::vector<int> order(n), n_children((size_t) n + asks.size(), 0);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return below[i] > below[j]; });
    std::vector<bool> stays(n, false);
    for (const int i : order) {  // a parent has more below it than its child
        const node & v          = nodes[i];
        const bool parent_stays = v.parent < 0 || stays[v.parent];
        int & n_siblings        = n_children[v.parent < 0 ? n + v.ask : v.parent];
        stays[i]                = is_planned(v) && parent_stays && n_siblings++ < asks[v.ask].width;
    }
    return by_reach([&](const node & v) { return stays[&v - nodes.data()]; });
}

}  // namespace eagle3
