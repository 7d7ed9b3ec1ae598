// Drafts that are grown level by level: EAGLE-2's dynamic tree of a given size, and the planner's choice.
// Source: EAGLE-2 (arXiv 2406.16858), section 4.
#include "session.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

namespace {

constexpr int MAX_WIDTH = 16;

} // namespace

// Nodes so far, and the head's state at those that were gone on from. Cells of the head's cache after the slot's are
// taken one after the other; the next feed overwrites them.
struct session::growth {
    struct node {
        int32_t token  = 0;
        int     parent = -1;     // node, -1 for the root
        int     depth  = 1;      // rows below the root's
        int     row    = 0;      // of the last pass: whose state it goes on from
        float   prob   = 0.0f;   // the head's, its parent given
        float   reach  = 0.0f;   // of the whole way to it
        uint64_t path  = 0;      // head cells of the nodes above it
    };
    std::vector<node>   nodes;
    std::vector<float>   states, x, probs;
    std::vector<int32_t> ids;
    int first = 0, n_cells = 0, n_cells_max = 0;  // first node of the last level

    bool likelier(int a, int b) const { return nodes[a].reach > nodes[b].reach || (nodes[a].reach == nodes[b].reach && a < b); }

    std::vector<int> by_reach(int from) const {
        std::vector<int> order;
        for (int i = from; i < (int) nodes.size(); ++i) {
            order.push_back(i);
        }
        std::sort(order.begin(), order.end(), [&](int a, int b) { return likelier(a, b); });
        return order;
    }
};

// The root's children, from the pass that begin_draft ran.
void session::grow_root(growth & g, int slot, bool calibrated) {
    g.states.assign(state_.begin(), state_.begin() + head_->n_embd);
    g.n_cells_max = std::min(64, runner_->n_ctx() - at(slot).n_past);
    add_children(g, ids_.data(), probs_.data(), 0, -1, 0, (int) ids_.size(), calibrated);
}

void session::add_children(growth & g, const int32_t * ids, const float * probs, int row, int parent, uint64_t path, int width, bool calibrated) {
    for (int k = 0; k < width && std::isfinite(probs[k]); ++k) {
        growth::node child;
        child.token  = head_->d2t[ids[k]];
        child.parent = parent;
        child.depth  = parent < 0 ? 1 : g.nodes[parent].depth + 1;
        child.row    = row;
        child.prob   = probs[k];
        child.path   = path;
        child.reach  = (parent < 0 ? 1.0f : g.nodes[parent].reach) * (calibrated ? planner_.accept(child.depth, child.prob) : child.prob);
        g.nodes.push_back(child);
    }
}

// One pass of the head over nodes of the last level: their children make the next.
void session::grow_level(growth & g, int slot, std::vector<int> level, int width, bool calibrated) {
    const slot_state & s = at(slot);
    const int n = (int) level.size(), n_embd = head_->n_embd, k = std::min(width, head_->n_vocab);
    std::sort(level.begin(), level.end());
    std::vector<int32_t>  tokens(n), depths(n), cells(n);
    std::vector<uint64_t> paths(n);
    g.x.resize((size_t) n * n_embd);
    for (int r = 0; r < n; ++r) {
        const growth::node & v = g.nodes[level[r]];
        tokens[r] = v.token;
        depths[r] = v.depth - 1;
        cells[r]  = g.n_cells + r;
        paths[r]  = v.path | (uint64_t(1) << cells[r]);
        std::copy_n(g.states.begin() + (size_t) v.row * n_embd, n_embd, g.x.begin() + (size_t) r * n_embd);
    }
    g.n_cells += n;
    g.states.resize((size_t) n * n_embd);
    g.ids.resize((size_t) n * k);
    g.probs.resize((size_t) n * k);
    pass p;
    p.slot    = slot;
    p.pos     = s.n_past;
    p.from    = s.head_from;
    p.n       = p.n_out = n;
    p.tokens  = tokens.data();
    p.x       = g.x.data();
    p.depth   = depths.data();
    p.cell    = cells.data();
    p.path    = paths.data();
    p.n_cells = g.n_cells;
    p.state   = g.states.data();
    p.k       = k;
    p.ids     = g.ids.data();
    p.probs   = g.probs.data();
    runner_->run(p);
    g.first = (int) g.nodes.size();
    for (int r = 0; r < n; ++r) {
        add_children(g, g.ids.data() + r * k, g.probs.data() + r * k, r, level[r], paths[r], k, calibrated);
    }
}

// The n likeliest nodes, level by level, likeliest first. A parent is never less likely than its child: none is left
// without its parent.
int session::take_nodes(growth & g, int slot, int n, int32_t * tokens, int32_t * parents, float * probs) {
    slot_state & s = at(slot);
    std::vector<int> order = g.by_reach(0), place(g.nodes.size(), -1);
    order.resize(std::min((int) order.size(), n));
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return g.nodes[a].depth < g.nodes[b].depth; });
    s.draft_probs.clear();
    s.draft_reach.clear();
    for (int i = 0; i < (int) order.size(); ++i) {
        const growth::node & v = g.nodes[order[i]];
        place[order[i]] = i;
        tokens[i]  = v.token;
        parents[i] = v.parent < 0 ? -1 : place[v.parent];
        s.draft_probs.push_back(v.prob);
        s.draft_reach.push_back(v.reach);
        if (probs) {
            probs[i] = v.reach;
        }
    }
    return (int) order.size();
}

int session::draft_tree(int slot, int32_t token, int n_max, int depth, int width, float p_min, int32_t * tokens, int32_t * parents, float * probs) {
    require(depth >= 1 && width >= 1 && width <= MAX_WIDTH, EAGLE3_E_ARGUMENT,
            format("a tree of depth %d and width %d, expected a width of 1..%d", depth, width, MAX_WIDTH));
    n_max = begin_draft(slot, token, n_max, width);
    if (n_max <= 0) {
        return 0;
    }
    growth g;
    grow_root(g, slot, false);
    for (int d = 1; d < depth; ++d) {
        std::vector<int> level = g.by_reach(g.first);
        level.resize(std::min({(int) level.size(), width, g.n_cells_max - g.n_cells}));
        while (!level.empty() && g.nodes[level.back()].reach < p_min) {
            level.pop_back();
        }
        if (level.empty()) {
            break;
        }
        grow_level(g, slot, level, width, false);
    }
    int n = 0;
    for (const auto & v : g.nodes) {
        n += v.reach >= p_min;
    }
    return take_nodes(g, slot, std::min(n, n_max), tokens, parents, probs);
}

// A tree of fixed shape: node i is the ranks[i]-th likeliest child of node parents[i].
int session::draft_choices(int slot, int32_t token, int n, const int32_t * parents, const int32_t * ranks, int32_t * tokens, float * probs) {
    require(n >= 0 && n <= MAX_DRAFT, EAGLE3_E_ARGUMENT, format("a tree of %d nodes, at most %d are allowed", n, MAX_DRAFT));
    std::vector<int> depth(n), width(n + 1, 0);  // width[p + 1]: children that node p needs
    for (int i = 0; i < n; ++i) {
        require(parents[i] >= -1 && parents[i] < i, EAGLE3_E_ARGUMENT, format("node %d follows node %d: parents come first", i, parents[i]));
        require(ranks[i] >= 0 && ranks[i] < MAX_WIDTH, EAGLE3_E_ARGUMENT, format("node %d has rank %d, expected 0..%d", i, ranks[i], MAX_WIDTH - 1));
        depth[i] = parents[i] < 0 ? 1 : depth[parents[i]] + 1;
        width[parents[i] + 1] = std::max(width[parents[i] + 1], ranks[i] + 1);
    }
    n = std::min(n, begin_draft(slot, token, n, width[0]));  // the first nodes, if there is room for no more
    if (n <= 0) {
        return 0;
    }
    growth g;
    grow_root(g, slot, true);
    std::vector<int> at(n, -1);       // of each choice, its node
    std::vector<int> children(1, 0);  // of each node + 1, its first child; 0 for the root's
    for (int d = 1, done = 0; done < n; ++d) {
        std::vector<int> level;       // nodes to go on from
        int w = 0;
        for (int i = 0; i < n; ++i) {
            if (depth[i] != d) {
                continue;
            }
            at[i] = children[parents[i] < 0 ? 0 : at[parents[i]] + 1] + ranks[i];
            ++done;
            if (width[i + 1] > 0) {
                level.push_back(at[i]);
                w = std::max(w, width[i + 1]);
            }
        }
        if (level.empty()) {
            continue;
        }
        const size_t before = g.nodes.size();
        w = std::min(w, head_->n_vocab);
        grow_level(g, slot, level, w, true);
        if (g.nodes.size() != before + level.size() * w) {
            return 0;  // a row that is not finite
        }
        std::sort(level.begin(), level.end());
        children.resize(before + 1, -1);
        for (size_t r = 0; r < level.size(); ++r) {
            children[level[r] + 1] = (int) (before + r * w);
        }
    }
    slot_state & s = this->at(slot);
    for (int i = 0; i < n; ++i) {
        const growth::node & v = g.nodes[at[i]];
        tokens[i] = v.token;
        s.draft_probs.push_back(v.prob);
        s.draft_reach.push_back(v.reach);
        if (probs) {
            probs[i] = v.reach;
        }
    }
    return n;
}

int session::draft_planned(int slot, int32_t token, int n_max, int width, int32_t * tokens, int32_t * parents, float * probs) {
    slot_state & s = at(slot);
    require(planner_.ready(), EAGLE3_E_ARGUMENT, "the planner has no costs: eagle3_plan_set");
    require(width >= 1 && width <= MAX_WIDTH, EAGLE3_E_ARGUMENT, format("width is %d, expected 1..%d", width, MAX_WIDTH));
    require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    s.planned     = true;
    s.draft_steps = 0;
    s.round_start = ggml_time_us();
    s.draft_probs.clear();
    s.draft_reach.clear();
    if (n_max <= 0 || n_pending(s) == 0 || !planner_.wants_draft()) {
        return 0;
    }
    n_max = begin_draft(slot, token, n_max, width);
    if (n_max <= 0) {
        return 0;
    }
    growth g;
    grow_root(g, slot, true);
    s.draft_steps = 1;
    std::vector<float> reach;
    for (;;) {
        const std::vector<int> order = g.by_reach(0);
        reach.clear();
        for (int i = 0; i < (int) order.size() && i < n_max; ++i) {
            reach.push_back(g.nodes[order[i]].reach);
        }
        std::vector<int> level = g.by_reach(g.first);
        if (level.empty() || (int) reach.size() >= n_max || g.n_cells >= g.n_cells_max) {
            break;
        }
        level.resize(std::min({(int) level.size(), width, g.n_cells_max - g.n_cells}));
        std::vector<float> level_reach;
        for (const int i : level) {
            level_reach.push_back(g.nodes[i].reach);
        }
        level.resize(planner_.grow_width(reach, g.nodes[level[0]].depth, level_reach, width));
        if (level.empty()) {
            break;
        }
        grow_level(g, slot, level, width, true);
        ++s.draft_steps;
    }
    const planner::choice c = planner_.best(reach);
    s.draft_value   = c.value;
    s.draft_seconds = 1e-6f * (ggml_time_us() - s.round_start);
    return take_nodes(g, slot, c.n, tokens, parents, probs);
}

} // namespace eagle3
