// Drafts that are grown level by level, for one slot or for several in the same passes over the head: chains,
// EAGLE-2's dynamic tree of a given size, trees of fixed shape, and the planner's choice. Source: EAGLE-2
// (arXiv 2406.16858), section 4.
#include "session.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

namespace {

constexpr int MAX_WIDTH = 16;
constexpr int OVERDUE   = 16;  // pending features of a slot, more than most rounds with drafts leave

}  // namespace

// Nodes so far, and the head's state at those that were gone on from. Cells of the head's cache after the
// slot's are taken one after the other; the next feed overwrites them.
struct session::growth {
    struct node {
        int32_t token = 0;
        int ask       = 0;
        int parent    = -1;    // node, -1 for the root
        int depth     = 1;     // rows below the root's
        int row       = 0;     // of the last pass: whose state it goes on from
        float prob    = 0.0f;  // the head's, its parent given
        float reach   = 0.0f;  // of the whole way to it
        uint64_t path = 0;     // head cells of the nodes above it
    };
    std::vector<ask> asks;                  // those that draft; n_max is what there is room for
    std::vector<int> n_cells, n_cells_max;  // of each
    std::vector<node> nodes;
    std::vector<float> states, x, probs;
    std::vector<int32_t> ids;
    int first  = 0;  // first node of the last level
    int n_asks = 0;  // of the round, those without a draft too

    bool likelier(int a, int b) const {
        return nodes[a].reach > nodes[b].reach || (nodes[a].reach == nodes[b].reach && a < b);
    }

    // nodes from `from` on for which want(node) holds, likeliest first
    template <typename F> std::vector<int> by_reach(int from, F && want) const {
        std::vector<int> order;
        for (int i = from; i < (int) nodes.size(); ++i) {
            if (want(nodes[i])) {
                order.push_back(i);
            }
        }
        std::sort(order.begin(), order.end(), [&](int a, int b) { return likelier(a, b); });
        return order;
    }

    std::vector<int> of_ask(int a, int from = 0) const {
        return by_reach(from, [&](const node & v) { return v.ask == a; });
    }

    bool is_planned(const node & v) const { return asks[v.ask].kind == ask::PLANNED; }

    int widest() const {
        int w = 1;
        for (const ask & a : asks) {
            w = std::max(w, a.width);
        }
        return w;
    }
};

// Feeds what the target decoded since, one pass for all slots, and makes the roots' children. Asks that find
// no room or nothing new to go by draft nothing.
void session::begin_growth(growth & g, const std::vector<ask> & asks) {
    catch_up(asks);
    g.n_asks = (int) asks.size();
    std::vector<float> x;
    pass p;
    for (ask a : asks) {
        slot_state & s = at(a.slot);
        require(!s.in_round, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
        require(a.n_max >= 0 && a.n_max <= MAX_DRAFT, EAGLE3_E_ARGUMENT,
            format("n_max is %d, expected 0..%d", a.n_max, MAX_DRAFT));
        require(a.depth >= 1 && a.width >= 1 && a.width <= MAX_WIDTH, EAGLE3_E_ARGUMENT,
            format(
                "a tree of depth %d and width %d, expected a width of 1..%d", a.depth, a.width, MAX_WIDTH));
        require(a.token >= 0 && a.token < n_vocab_, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", a.token));
        s.draft_probs.clear();
        s.draft_reach.clear();
        const int room = (most_rows_ - g.n_asks) / (a.kind == ask::PLANNED ? 1 : g.n_asks);
        a.n_max =
            std::min({a.n_max, n_ctx_ - s.n_past - 1, room});  // token itself needs a cell and a row too
        if (a.kind == ask::PLAIN || a.n_max <= 0 || n_pending(s) == 0) {
            continue;
        }
        s.pending_tokens.resize(n_pending(s) - 1);
        s.pending_tokens.push_back(a.token);
        const std::vector<pass_row> rows = feed_rows(s, a.slot, n_pending(s), x);
        p.rows.insert(p.rows.end(), rows.begin(), rows.end());
        p.rows.back().out = true;
        g.asks.push_back(a);
    }
    if (g.asks.empty()) {
        return;
    }
    const int n = (int) g.asks.size(), k = std::min(g.widest(), head_->n_vocab);
    g.states.resize((size_t) n * head_->n_embd);
    g.ids.resize(n * k);
    g.probs.resize(n * k);
    p.x        = x.data();
    p.features = true;
    p.state    = g.states.data();
    p.k        = k;
    p.ids      = g.ids.data();
    p.probs    = g.probs.data();
    runner_->run(p);
    for (int a = 0; a < n; ++a) {
        slot_state & s = at(g.asks[a].slot);
        fed(s, n_pending(s));
        g.n_cells.push_back(0);
        g.n_cells_max.push_back(std::min(64, runner_->n_ctx() - s.n_past));
        add_children(g, a, g.ids.data() + a * k, g.probs.data() + a * k, a, -1, 0);
    }
}

void session::add_children(
    growth & g, int a, const int32_t * ids, const float * probs, int row, int parent, uint64_t path) {
    const ask & q = g.asks[a];
    for (int k = 0; k < std::min(q.width, head_->n_vocab) && std::isfinite(probs[k]); ++k) {
        growth::node child;
        child.token  = head_->d2t[ids[k]];
        child.ask    = a;
        child.parent = parent;
        child.depth  = parent < 0 ? 1 : g.nodes[parent].depth + 1;
        child.row    = row;
        child.prob   = probs[k];
        child.path   = path;
        // EAGLE-2 goes by the head's own word
        const float p =
            q.kind == ask::TREE ? child.prob : planner_.accept(child.depth, child.prob, at(q.slot).trust);
        child.reach = (parent < 0 ? 1.0f : g.nodes[parent].reach) * p;
        g.nodes.push_back(child);
    }
}

// One pass of the head over nodes of the last level: their children make the next.
void session::grow_level(growth & g, std::vector<int> level) {
    const int n = (int) level.size(), n_embd = head_->n_embd, k = std::min(g.widest(), head_->n_vocab);
    std::sort(level.begin(), level.end(), [&](int a, int b) {
        return g.nodes[a].ask != g.nodes[b].ask ? g.nodes[a].ask < g.nodes[b].ask : a < b;
    });
    pass p;
    g.x.resize((size_t) n * n_embd);
    for (int r = 0; r < n; ++r) {
        const growth::node & v = g.nodes[level[r]];
        const ask & a          = g.asks[v.ask];
        const slot_state & s   = at(a.slot);
        const int cell         = g.n_cells[v.ask]++;
        pass_row row;
        row.slot  = a.slot;
        row.token = v.token;
        row.pos   = s.n_past + v.depth - 1;
        row.cell  = s.n_past + cell;
        row.from  = s.head_from;
        row.base  = s.n_past;
        row.path  = v.path | (uint64_t(1) << cell);
        row.out   = true;
        p.rows.push_back(row);
        std::copy_n(g.states.begin() + (size_t) v.row * n_embd, n_embd, g.x.begin() + (size_t) r * n_embd);
    }
    g.states.resize((size_t) n * n_embd);
    g.ids.resize((size_t) n * k);
    g.probs.resize((size_t) n * k);
    p.x     = g.x.data();
    p.state = g.states.data();
    p.k     = k;
    p.ids   = g.ids.data();
    p.probs = g.probs.data();
    runner_->run(p);
    g.first = (int) g.nodes.size();
    for (int r = 0; r < n; ++r) {
        add_children(g, g.nodes[level[r]].ask, g.ids.data() + r * k, g.probs.data() + r * k, r, level[r],
            p.rows[r].path);
    }
}

// Nodes of the last level that drafts of a given size go on from.
std::vector<int> session::fixed_front(const growth & g) const {
    std::vector<int> front;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        const ask & a = g.asks[i];
        if (a.kind == ask::PLANNED) {
            continue;
        }
        std::vector<int> level = g.of_ask(i, g.first);
        level.resize(std::min({(int) level.size(), a.width, g.n_cells_max[i] - g.n_cells[i]}));
        for (const int v : level) {
            const growth::node & w = g.nodes[v];
            if (w.depth < (a.kind == ask::CHAIN ? a.n_max : a.depth) &&
                (a.kind == ask::CHAIN ? w.prob : w.reach) >= a.p_min) {
                front.push_back(v);
            }
        }
    }
    return front;
}

// Nodes of the last level that the planner goes on from: of all slots together, as many as pay.
std::vector<int> session::planned_front(const growth & g) const {
    const auto planned = [&](const growth::node & v) {
        return g.is_planned(v);
    };
    std::vector<float> reach, level_reach;
    int room = 0, n_children = 1, n_fixed = 0;
    float trust = 0.0f;
    for (const growth::node & v : g.nodes) {
        n_fixed += !g.is_planned(v);
    }
    for (const ask & a : g.asks) {
        if (a.kind == ask::PLANNED) {
            room       = std::max(room, a.n_max);
            n_children = std::max(n_children, a.width);
        }
    }
    n_fixed = std::min(n_fixed, most_rows_ - g.n_asks - room);
    for (const int v : g.by_reach(0, planned)) {
        if ((int) reach.size() < room) {
            reach.push_back(g.nodes[v].reach);
        }
    }
    std::vector<int> used(g.asks.size(), 0), level;
    for (const int v : g.by_reach(g.first, planned)) {
        const int a = g.nodes[v].ask;
        if (used[a] < std::min(g.asks[a].width, g.n_cells_max[a] - g.n_cells[a])) {
            ++used[a];
            level.push_back(v);
            level_reach.push_back(g.nodes[v].reach);
            trust += at(g.asks[a].slot).trust;
        }
    }
    if (level.empty() || (int) reach.size() >= room) {
        return {};
    }
    level.resize(planner_.grow_width(reach, g.nodes[level[0]].depth, level_reach, n_children,
        trust / (float) level.size(), std::max(n_fixed, 0)));
    return level;
}

void session::grow(growth & g) {
    for (;;) {
        std::vector<int> front         = fixed_front(g);
        const std::vector<int> planned = planned_front(g);
        front.insert(front.end(), planned.begin(), planned.end());
        if (front.empty()) {
            return;
        }
        grow_level(g, front);
        ++draft_.steps;
    }
}

// These nodes of an ask, level by level, likeliest first. A parent is never less likely than its child: none
// is left without its parent. probs: of each node for a chain, of the whole way to it otherwise; may be null.
int session::take_nodes(
    growth & g, int a, std::vector<int> order, int32_t * tokens, int32_t * parents, float * probs) {
    slot_state & s = at(g.asks[a].slot);
    std::vector<int> place(g.nodes.size(), -1);
    std::stable_sort(
        order.begin(), order.end(), [&](int i, int j) { return g.nodes[i].depth < g.nodes[j].depth; });
    for (int i = 0; i < (int) order.size(); ++i) {
        const growth::node & v = g.nodes[order[i]];
        place[order[i]]        = i;
        tokens[i]              = v.token;
        parents[i]             = v.parent < 0 ? -1 : place[v.parent];
        s.draft_probs.push_back(v.prob);
        s.draft_reach.push_back(v.reach);
        if (probs) {
            probs[i] = g.asks[a].kind == ask::CHAIN ? v.prob : v.reach;
        }
    }
    return (int) order.size();
}

// Whether the planner lets its asks draft in this round; it counts rounds.
bool session::planner_drafts(const std::vector<ask> & asks) {
    float n_past = 0.0f;
    bool any     = false;
    for (const ask & a : asks) {
        n_past += (float) at(a.slot).n_past / (float) asks.size();
        any = any || (a.kind == ask::PLANNED && a.n_max > 0 && n_pending(at(a.slot)) > 0);
    }
    require(planner_.ready(), EAGLE3_E_ARGUMENT, "the planner has no costs: eagle3_plan_set");
    planner_.begin((int) asks.size(), n_past);
    return any && planner_.wants_draft();
}

// Feeds what gathered while there were no drafts, so that the first pass of all slots has few rows: as many
// as are computed alike. The time is not the draft's, which would seem dear.
void session::catch_up(const std::vector<ask> & asks) {
    const int most = std::min(OVERDUE, MAX_ROWS / std::max((int) asks.size(), 1));
    for (const ask & a : asks) {
        if (a.kind != ask::PLAIN && n_pending(at(a.slot)) > most) {
            feed(a.slot);
        }
    }
    draft_.start = ggml_time_us();
}

// Of each ask's nodes, those to draft: as many as were asked for; of the planner's, all slots' together, as
// many as pay.
std::vector<std::vector<int>> session::choose(const growth & g) {
    std::vector<std::vector<int>> chosen(g.asks.size());
    int room = 0, n_fixed = 0;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        const ask & a = g.asks[i];
        if (a.kind == ask::PLANNED) {
            room = std::max(room, a.n_max);
            continue;
        }
        chosen[i] = g.by_reach(0, [&](const growth::node & v) {
            return v.ask == i && (a.kind == ask::CHAIN ? v.prob : v.reach) >= a.p_min;
        });
        chosen[i].resize(std::min((int) chosen[i].size(), a.n_max));
        n_fixed += (int) chosen[i].size();
    }
    const std::vector<int> planned = g.by_reach(0, [&](const growth::node & v) { return g.is_planned(v); });
    if (planned.empty()) {
        return chosen;
    }
    std::vector<float> reach;
    for (int i = 0; i < std::min({(int) planned.size(), room, most_rows_ - g.n_asks - n_fixed}); ++i) {
        reach.push_back(g.nodes[planned[i]].reach);
    }
    const planner::choice c = planner_.best(reach, n_fixed);
    draft_.value            = c.value;
    for (int i = 0; i < c.n; ++i) {
        chosen[g.nodes[planned[i]].ask].push_back(planned[i]);
    }
    return chosen;
}

// Grows and chooses; f(growth, ask, its nodes) for each ask that drafts.
template <typename F> void session::draft_asks(std::vector<ask> asks, F && f) {
    draft_       = {};
    draft_.start = ggml_time_us();
    draft_.planned =
        std::any_of(asks.begin(), asks.end(), [](const ask & a) { return a.kind == ask::PLANNED; });
    if (draft_.planned && !planner_drafts(asks)) {
        for (ask & a : asks) {
            a.kind = a.kind == ask::PLANNED ? (int) ask::PLAIN : a.kind;
        }
    }
    growth g;
    begin_growth(g, asks);
    if (g.asks.empty()) {
        return;
    }
    draft_.steps = 1;
    grow(g);
    const std::vector<std::vector<int>> chosen = choose(g);
    draft_.seconds                             = 1e-6f * (ggml_time_us() - draft_.start);
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        f(g, i, chosen[i]);
    }
}

int session::draft_one(const ask & a, int32_t * tokens, int32_t * parents, float * probs) {
    int n = 0;
    draft_asks({a}, [&](growth & g, int i, const std::vector<int> & nodes) {
        n = take_nodes(g, i, nodes, tokens, parents, probs);
    });
    return n;
}

int session::draft_many(const std::vector<ask> & asks) {
    require(!round_.open, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(!asks.empty() && (int) asks.size() <= most_rows_, EAGLE3_E_ARGUMENT,
        format("a round of %zu slots, expected 1..%d", asks.size(), most_rows_));
    std::vector<bool> seen(slots_.size(), false);
    for (const ask & a : asks) {
        at(a.slot);
        require(!seen[a.slot], EAGLE3_E_ARGUMENT, format("slot %d is in the round twice", a.slot));
        seen[a.slot] = true;
    }
    round_.slots.clear();
    std::vector<std::vector<int32_t>> tokens(slots_.size()), parents(slots_.size());
    int total = 0;
    draft_asks(asks, [&](growth & g, int i, const std::vector<int> & nodes) {
        const ask & a = g.asks[i];
        tokens[a.slot].resize(nodes.size());
        parents[a.slot].resize(nodes.size());
        total += take_nodes(g, i, nodes, tokens[a.slot].data(), parents[a.slot].data(), nullptr);
    });
    std::vector<int> slots;
    for (const ask & a : asks) {
        bool chain = true;  // which any target can check
        for (size_t i = 0; i < parents[a.slot].size(); ++i) {
            chain = chain && parents[a.slot][i] == (int) i - 1;
        }
        begin_round(a.slot, a.token, tokens[a.slot].data(), chain ? nullptr : parents[a.slot].data(),
            (int) tokens[a.slot].size());
        slots.push_back(a.slot);
    }
    round_.slots = slots;
    return total;
}

int session::draft(
    int slot, int32_t token, int n_max, int n_min, float p_min, int32_t * tokens, float * probs) {
    ask a;
    a.slot  = slot;
    a.token = token;
    a.kind  = ask::CHAIN;
    a.n_max = n_max;
    a.p_min = p_min;
    std::vector<int32_t> parents(std::max(n_max, 1));
    const int n = draft_one(a, tokens, parents.data(), probs);
    return n >= n_min ? n : 0;
}

int session::draft_tree(int slot, int32_t token, int n_max, int depth, int width, float p_min,
    int32_t * tokens, int32_t * parents, float * probs) {
    return draft_one({slot, token, ask::TREE, n_max, depth, width, p_min}, tokens, parents, probs);
}

int session::draft_planned(
    int slot, int32_t token, int n_max, int width, int32_t * tokens, int32_t * parents, float * probs) {
    return draft_one({slot, token, ask::PLANNED, n_max, 1, width, 0.0f}, tokens, parents, probs);
}

// A tree of fixed shape: node i is the ranks[i]-th likeliest child of node parents[i].
int session::draft_choices(int slot, int32_t token, int n, const int32_t * parents, const int32_t * ranks,
    int32_t * tokens, float * probs) {
    require(n >= 0 && n <= MAX_DRAFT, EAGLE3_E_ARGUMENT,
        format("a tree of %d nodes, at most %d are allowed", n, MAX_DRAFT));
    std::vector<int> depth(n), width(n + 1, 0);  // width[p + 1]: children that node p needs
    for (int i = 0; i < n; ++i) {
        require(parents[i] >= -1 && parents[i] < i, EAGLE3_E_ARGUMENT,
            format("node %d follows node %d: parents come first", i, parents[i]));
        require(ranks[i] >= 0 && ranks[i] < MAX_WIDTH, EAGLE3_E_ARGUMENT,
            format("node %d has rank %d, expected 0..%d", i, ranks[i], MAX_WIDTH - 1));
        depth[i]              = parents[i] < 0 ? 1 : depth[parents[i]] + 1;
        width[parents[i] + 1] = std::max(width[parents[i] + 1], ranks[i] + 1);
    }
    draft_ = {};
    growth g;
    // as wide as the widest node: a pass has the same number of guesses for every row
    begin_growth(g,
        {{slot, token, ask::CHAIN, n, 1, std::max(1, *std::max_element(width.begin(), width.end())), 0.0f}});
    if (g.asks.empty()) {
        return 0;
    }
    n           = std::min(n, g.asks[0].n_max);  // the first nodes, if there is room for no more
    const int w = std::min(g.asks[0].width, head_->n_vocab);
    if ((int) g.nodes.size() != w) {
        return 0;  // a row that is not finite
    }
    std::vector<int> at_node(n, -1);  // of each choice, its node
    std::vector<int> children(1, 0);  // of each node + 1, its first child; 0 for the root's
    for (int d = 1, done = 0; done < n; ++d) {
        std::vector<int> level;  // nodes to go on from
        for (int i = 0; i < n; ++i) {
            if (depth[i] == d) {
                at_node[i] =
                    children[parents[i] < 0 ? 0 : at_node[parents[i]] + 1] + std::min(ranks[i], w - 1);
                ++done;
                if (width[i + 1] > 0) {
                    level.push_back(at_node[i]);
                }
            }
        }
        if (level.empty()) {
            continue;
        }
        const size_t before = g.nodes.size();
        grow_level(g, level);
        if (g.nodes.size() != before + level.size() * w) {
            return 0;
        }
        std::sort(level.begin(), level.end());
        children.resize(before + 1, -1);
        for (size_t r = 0; r < level.size(); ++r) {
            children[level[r] + 1] = (int) (before + r * w);
        }
    }
    slot_state & s = at(slot);
    for (int i = 0; i < n; ++i) {
        const growth::node & v = g.nodes[at_node[i]];
        tokens[i]              = v.token;
        s.draft_probs.push_back(v.prob);
        s.draft_reach.push_back(v.reach);
        if (probs) {
            probs[i] = v.reach;
        }
    }
    return n;
}

}  // namespace eagle3
