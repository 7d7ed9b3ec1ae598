// How the head drafts: a first pass over what the target decoded since the last draft, and passes over levels
// of nodes behind it. On a device the first pass looks ahead, so that most levels need no pass, and no wait.
#include "head/head_source.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

// Runs a pass whose n_out rows each find k children, and so do the rows of each step ahead.
void head_source::run(pass & p, int n_out, int k, guesses & found) {
    k_             = std::min(k, h_.n_vocab);
    const size_t n = (n_out + p.ahead.size()) * k_;
    found.ids.resize(n);
    found.probs.resize(n);
    found.chosen.resize(p.ahead.size());
    p.k      = k_;
    p.chosen = found.chosen.data();
    p.ids    = found.ids.data();
    p.probs  = found.probs.data();
    runner_.run(p);
}

// Returns how far the first pass should look ahead: as far as a chain or a tree of a given size goes, and
// where the planner chooses, as many levels as the last draft had use for. On the CPU a step that is not
// needed costs more than a wait.
head_source::horizon head_source::look(const draft_tree & g, const std::vector<int> & asks) const {
    horizon h;
    const ask & one = g.asks[asks[0]];
    // All are of one size, which is what a pass finds, of one slot after the other.
    bool trees = one.width == g.widest() && one.width <= h_.n_vocab;
    for (int i = 0; i < (int) asks.size(); ++i) {
        const ask & q      = g.asks[asks[i]];
        const bool is_tree = q.kind == EAGLE3_TREE || q.kind == EAGLE3_PLANNED;
        trees              = trees && is_tree && q.width == one.width && q.slot == one.slot + i;
    }
    h.width  = trees ? one.width : 1;
    int most = runner_.most_ahead();
    for (const int a : asks) {
        const ask & q    = g.asks[a];
        const int levels = q.kind == EAGLE3_PLANNED ? n_used_ + 1
                           : q.kind == EAGLE3_CHAIN ? q.n_max
                           : trees                  ? q.depth
                                                    : 1;
        h.steps          = std::max(h.steps, std::min(levels, q.n_max) - 1);
        most             = std::min(most, (n_cells_max_[a] - 1) / h.width);
    }
    h.steps = std::max(std::min(h.steps, most), 0);
    return h;
}

// Adds the steps ahead to the first pass.
void head_source::look_ahead(const draft_tree & g, const std::vector<int> & asks, pass & p) const {
    p.width = ahead_.width;
    for (int step = 0; step < ahead_.steps; ++step) {
        for (const int a : asks) {
            for (int i = 0; i < ahead_.width; ++i) {
                pass_row row;
                const int cell = step * ahead_.width + i;
                row.slot       = g.asks[a].slot;
                row.pos        = g.n_past[a] + step;
                row.cell       = g.n_past[a] + cell;
                row.from       = slots_[row.slot].from;
                row.base       = g.n_past[a];
                row.out        = true;
                row.state      = state_row(row.slot, cell);
                p.ahead.push_back(row);
            }
        }
    }
}

// Returns the number of the i-th row of a step ahead, from 1 on, of the ask with this place in the first
// pass.
int head_source::ahead_row(int step, int place, int i) const {
    return n_first_ + ((step - 1) * n_first_ + place) * ahead_.width + i;
}

// Feeds what the target decoded since the last draft, in one pass for all slots, which makes the roots'
// children.
void head_source::begin(draft_tree & g, const std::vector<int> & asks) {
    n_cells_.assign(g.asks.size(), 0);
    n_cells_max_.assign(g.asks.size(), 0);
    n_known_.assign(g.asks.size(), 0);
    marks_.clear();
    x_.clear();
    pass p;
    for (const int a : asks) {
        seen & s = slots_[g.asks[a].slot];
        s.tokens.resize(n_pending(s) - 1);
        s.tokens.push_back(g.asks[a].token);
        const std::vector<pass_row> rows =
            pass::chain(g.asks[a].slot, s.tokens.data(), s.pending_pos, s.from, n_pending(s), 0);
        p.rows.insert(p.rows.end(), rows.begin(), rows.end());
        p.rows.back().out   = true;
        p.rows.back().state = root_state(g.asks[a].slot);
        start_from(p, s, 0, n_pending(s));
        x_.insert(x_.end(), s.features.begin(), s.features.end());
        n_cells_max_[a] = std::min(MAX_CELLS, runner_.n_ctx() - g.n_past[a]);
    }
    p.x      = x_.data();
    n_first_ = (int) asks.size();
    ahead_   = look(g, asks);
    n_used_  = 0;
    look_ahead(g, asks, p);
    run(p, n_first_, g.widest(), first_);
    for (int r = 0; r < n_first_; ++r) {
        const int a = asks[r], slot = g.asks[a].slot;
        fed(slots_[slot], n_pending(slots_[slot]));
        n_known_[a] = ahead_.steps * ahead_.width;
        n_cells_[a] = n_known_[a];
        offer_known(g, a, r, -1, {root_state(slot), 0, UNKNOWN});
    }
}

// Offers the children that a row found. Returns them, the likeliest first.
std::vector<int> head_source::offer_children(
    draft_tree & g, int a, const guesses & found, int row, int parent, mark below) {
    const size_t first = (size_t) row * k_;
    std::vector<int> children;
    for (int k = 0; k < std::min(g.asks[a].width, k_) && std::isfinite(found.probs[first + k]); ++k) {
        const int node = g.offer(id, a, parent, h_.d2t[found.ids[first + k]], found.probs[first + k], k);
        marks_.resize(g.nodes.size());
        marks_[node] = below;
        g.level.push_back(node);
        children.push_back(node);
    }
    for (const int i : g.children_of_others(a, parent)) {
        marks_.resize(g.nodes.size());
        marks_[i] = below;
        g.level.push_back(i);
    }
    return children;
}

// Offers the children that a row of the first pass found, or a row ahead, and notes whose children the rows
// of the step behind it found.
void head_source::offer_known(draft_tree & g, int a, int row, int parent, mark below) {
    const std::vector<int> children = offer_children(g, a, first_, row, parent, below);
    const int w = ahead_.width, step = row < n_first_ ? 0 : 1 + (row - n_first_) / (n_first_ * w);
    const int place = row < n_first_ ? row : (row - n_first_) / w % n_first_;
    const int own   = row < n_first_ ? 0 : (row - n_first_) % w;  // among the rows of its ask
    for (int i = 0; step < ahead_.steps && i < w; ++i) {
        const int next = ahead_row(step + 1, place, i), id = first_.chosen[next - n_first_];
        if (id / k_ == own && id % k_ < (int) children.size()) {
            marks_[children[id % k_]].known = next;
        }
    }
}

int head_source::n_extensible(int ask) const {
    return n_cells_max_[ask] - n_cells_[ask] + n_known_[ask];
}

// Returns the row of a pass that extends this node.
pass_row head_source::row_of(const draft_tree & g, int node) {
    const draft_tree::node & v = g.nodes[node];
    const int cell             = n_cells_[v.ask]++;
    pass_row row;
    row.slot  = g.asks[v.ask].slot;
    row.token = v.token;
    row.pos   = g.n_past[v.ask] + v.depth - 1;
    row.cell  = g.n_past[v.ask] + cell;
    row.from  = slots_[row.slot].from;
    row.base  = g.n_past[v.ask];
    row.path  = marks_[node].path | (uint64_t(1) << cell);
    row.out   = true;
    row.x     = marks_[node].state;
    row.state = state_row(row.slot, cell);
    return row;
}

// Offers the children that a row ahead has found of this node. Returns false if there is no such row.
bool head_source::was_ahead(draft_tree & g, int node) {
    const mark m = marks_[node];
    if (m.known == UNKNOWN) {
        return false;
    }
    const int a = g.nodes[node].ask, w = ahead_.width, after = m.known - n_first_;
    const int cell = after / (n_first_ * w) * w + after % w;
    --n_known_[a];
    offer_known(
        g, a, m.known, node, {state_row(g.asks[a].slot, cell), m.path | (uint64_t(1) << cell), UNKNOWN});
    return true;
}

void head_source::extend(draft_tree & g, const std::vector<int> & nodes) {
    std::vector<int> level;
    for (const int v : nodes) {
        n_used_ = std::max(n_used_, g.nodes[v].depth);
        if (!was_ahead(g, v)) {
            level.push_back(v);
        }
    }
    std::sort(level.begin(), level.end(), [&](int a, int b) {
        return g.nodes[a].ask != g.nodes[b].ask ? g.nodes[a].ask < g.nodes[b].ask : a < b;
    });
    pass p;
    p.from = source_of_x::states;
    std::vector<int> extended;
    for (const int v : level) {
        const int a = g.nodes[v].ask;
        if (n_cells_[a] < n_cells_max_[a]) {  // steps ahead that nothing came of may have taken the cells
            p.rows.push_back(row_of(g, v));
            extended.push_back(v);
        }
    }
    if (extended.empty()) {
        return;
    }
    run(p, (int) extended.size(), g.widest(), later_);
    for (int r = 0; r < (int) extended.size(); ++r) {
        const pass_row & row = p.rows[r];
        offer_children(g, g.nodes[extended[r]].ask, later_, r, extended[r], {row.state, row.path, UNKNOWN});
    }
}

}  // namespace eagle3
