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

bool grows(const ask & a) {
    return a.kind != EAGLE3_PLAIN && a.kind != EAGLE3_GIVEN;
}

// The choice that is the rank-th child of choice `parent`, or -1. Those beyond n_max are left out.
int choice_of(const ask & a, int parent, int rank) {
    for (int i = 0; i < a.n_max; ++i) {
        if (a.parents[i] == parent && a.ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

bool has_children(const ask & a, int choice) {
    return choice >= 0 && std::find(a.parents, a.parents + a.n_max, choice) != a.parents + a.n_max;
}

void check_choices(const ask & a) {
    for (int i = 0; i < a.n; ++i) {
        require(a.parents[i] >= -1 && a.parents[i] < i, EAGLE3_E_ARGUMENT,
            format("choice %d follows choice %d: parents come first", i, a.parents[i]));
        require(a.ranks[i] >= 0 && a.ranks[i] < MAX_WIDTH, EAGLE3_E_ARGUMENT,
            format("choice %d has rank %d, expected 0..%d", i, a.ranks[i], MAX_WIDTH - 1));
    }
}

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
        int choice    = -1;    // of EAGLE3_CHOICES, which of them it is
        uint64_t path = 0;     // head cells of the nodes above it
    };
    std::vector<ask> asks;                  // those that grow; n_max is what there is room for
    std::vector<int> n_cells, n_cells_max;  // of each
    std::vector<node> nodes;
    std::vector<float> states, x, probs;
    std::vector<int32_t> ids;
    int first   = 0;  // first node of the last level
    int n_asks  = 0;  // of the round, those without a draft too
    int n_given = 0;  // drafts that callers brought

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

    // enough for its ask's p_min, which a chain holds against each token and a tree against the whole way
    bool is_likely(const node & v) const {
        const ask & a = asks[v.ask];
        return (a.kind == EAGLE3_CHAIN ? v.prob : v.reach) >= a.p_min;
    }

    bool is_planned(const node & v) const { return asks[v.ask].kind == EAGLE3_PLANNED; }

    int widest() const {
        int w = 1;
        for (const ask & a : asks) {
            w = std::max(w, a.width);
        }
        return w;
    }
};

// Draft tokens that the ask can get at most: the token itself needs a cell and a row too.
int session::room(const ask & a, int n_asks) const {
    const int rows = (most_rows_ - n_asks) / (a.kind == EAGLE3_PLANNED ? 1 : n_asks);
    return std::max(std::min(n_ctx_ - at(a.slot).n_past - 1, rows), 0);
}

// An ask as growth takes it: chains and choices are trees of a certain depth and width.
ask session::grown(ask a, int n_asks) const {
    if (a.kind == EAGLE3_CHOICES) {
        a.n_max = a.n;
        a.width = 1 + (a.n ? *std::max_element(a.ranks, a.ranks + a.n) : 0);
    } else if (a.kind == EAGLE3_CHAIN) {
        a.width = 1;
        a.depth = MAX_DRAFT;
    }
    a.n_max = std::min(a.n_max, room(a, n_asks));
    a.depth = a.kind == EAGLE3_CHAIN ? a.n_max : a.depth;
    return a;
}

// Feeds what the target decoded since, one pass for all slots, and makes the roots' children. Asks that find
// no room or nothing new to go by draft nothing.
void session::begin_growth(growth & g, const std::vector<ask> & asks) {
    catch_up(asks);
    g.n_asks = (int) asks.size();
    std::vector<float> x;
    pass p;
    for (const ask & q : asks) {
        slot_state & s = at(q.slot);
        s.clear_draft();
        if (q.kind == EAGLE3_GIVEN) {
            g.n_given += std::min(q.n, room(q, g.n_asks));
        }
        const ask a = grown(q, g.n_asks);
        if (!grows(a) || a.n_max <= 0 || n_pending(s) == 0) {
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
        if (q.kind == EAGLE3_CHOICES) {
            child.choice = choice_of(q, parent < 0 ? -1 : g.nodes[parent].choice, k);
        }
        // EAGLE-2 goes by the head's own word
        const float p =
            q.kind == EAGLE3_TREE ? child.prob : planner_.accept(child.depth, child.prob, at(q.slot).trust);
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
        if (a.kind == EAGLE3_PLANNED) {
            continue;
        }
        std::vector<int> level = g.of_ask(i, g.first);
        if (a.kind == EAGLE3_CHOICES) {
            std::copy_if(level.begin(), level.end(), std::back_inserter(front),
                [&](int v) { return has_children(a, g.nodes[v].choice); });
            continue;
        }
        level.resize(std::min({(int) level.size(), a.width, g.n_cells_max[i] - g.n_cells[i]}));
        std::copy_if(level.begin(), level.end(), std::back_inserter(front),
            [&](int v) { return g.nodes[v].depth < a.depth && g.is_likely(g.nodes[v]); });
    }
    return front;
}

// Nodes of the last level that the planner goes on from: of all slots together, as many as pay.
std::vector<int> session::planned_front(const growth & g) const {
    const auto planned = [&](const growth::node & v) {
        return g.is_planned(v);
    };
    std::vector<float> reach, level_reach;
    int room = 0, n_children = 1, n_fixed = g.n_given;
    float trust = 0.0f;
    for (const growth::node & v : g.nodes) {
        n_fixed += !g.is_planned(v);
    }
    for (const ask & a : g.asks) {
        if (a.kind == EAGLE3_PLANNED) {
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

// The slot's draft: these nodes of an ask, level by level, likeliest first. A parent is never less likely
// than its child, so none is left without its parent.
void session::take_nodes(const growth & g, int a, std::vector<int> order) {
    slot_state & s = at(g.asks[a].slot);
    std::vector<int> place(g.nodes.size(), -1);
    std::stable_sort(
        order.begin(), order.end(), [&](int i, int j) { return g.nodes[i].depth < g.nodes[j].depth; });
    for (int i = 0; i < (int) order.size(); ++i) {
        const growth::node & v = g.nodes[order[i]];
        place[order[i]]        = i;
        s.draft_tokens.push_back(v.token);
        s.draft_parents.push_back(v.parent < 0 ? -1 : place[v.parent]);
        s.draft_probs.push_back(v.prob);
        s.draft_reach.push_back(v.reach);
    }
}

// Whether the planner lets its asks draft in this round; it counts rounds.
bool session::planner_drafts(const std::vector<ask> & asks) {
    float n_past = 0.0f;
    bool any     = false;
    for (const ask & a : asks) {
        n_past += (float) at(a.slot).n_past / (float) asks.size();
        any = any || (a.kind == EAGLE3_PLANNED && a.n_max > 0 && n_pending(at(a.slot)) > 0);
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
        if (grows(a) && n_pending(at(a.slot)) > most) {
            feed(a.slot);
        }
    }
    draft_.start = ggml_time_us();
}

// Of each ask's nodes, those to draft: as many as were asked for; of the planner's, all slots' together, as
// many as pay.
std::vector<std::vector<int>> session::choose(const growth & g) {
    std::vector<std::vector<int>> chosen(g.asks.size());
    int room = 0, n_fixed = g.n_given;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        const ask & a = g.asks[i];
        if (a.kind == EAGLE3_PLANNED) {
            room = std::max(room, a.n_max);
            continue;
        }
        if (a.kind == EAGLE3_CHOICES) {
            chosen[i] = g.by_reach(0, [&](const growth::node & v) { return v.ask == i && v.choice >= 0; });
            std::sort(chosen[i].begin(), chosen[i].end(),
                [&](int v, int w) { return g.nodes[v].choice < g.nodes[w].choice; });
        } else {
            chosen[i] = g.by_reach(0, [&](const growth::node & v) { return v.ask == i && g.is_likely(v); });
            chosen[i].resize(std::min((int) chosen[i].size(), a.n_max));
        }
        if (a.kind == EAGLE3_CHAIN && (int) chosen[i].size() < a.n_min) {
            chosen[i].clear();
        }
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

// Grows and chooses: the drafts of all asks that have no draft yet.
void session::grow_drafts(std::vector<ask> asks) {
    draft_       = {};
    draft_.start = ggml_time_us();
    draft_.planned =
        std::any_of(asks.begin(), asks.end(), [](const ask & a) { return a.kind == EAGLE3_PLANNED; });
    if (draft_.planned && !planner_drafts(asks)) {
        for (ask & a : asks) {
            a.kind = a.kind == EAGLE3_PLANNED ? EAGLE3_PLAIN : a.kind;
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
        take_nodes(g, i, chosen[i]);
    }
}

void session::check_asks(const std::vector<ask> & asks) const {
    require(!round_.open, EAGLE3_E_ARGUMENT, "a round is under way: commit it first");
    require(!asks.empty() && (int) asks.size() <= most_rows_, EAGLE3_E_ARGUMENT,
        format("a round of %zu slots, expected 1..%d", asks.size(), most_rows_));
    std::vector<bool> seen(slots_.size(), false);
    for (const ask & a : asks) {
        at(a.slot);
        require(!seen[a.slot], EAGLE3_E_ARGUMENT, format("slot %d is in the round twice", a.slot));
        seen[a.slot] = true;
        require(a.kind >= EAGLE3_PLAIN && a.kind <= EAGLE3_GIVEN, EAGLE3_E_ARGUMENT,
            format("there is no kind %d of draft", a.kind));
        require(a.token >= 0 && a.token < n_vocab_, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", a.token));
        if (a.kind == EAGLE3_CHAIN || a.kind == EAGLE3_TREE || a.kind == EAGLE3_PLANNED) {
            require(a.n_max >= 0 && a.n_max <= MAX_DRAFT, EAGLE3_E_ARGUMENT,
                format("n_max is %d, expected 0..%d", a.n_max, MAX_DRAFT));
            require(std::isfinite(a.p_min), EAGLE3_E_ARGUMENT, "p_min is not finite");
        }
        if (a.kind == EAGLE3_TREE || a.kind == EAGLE3_PLANNED) {
            require((a.depth >= 1 || a.kind == EAGLE3_PLANNED) && a.width >= 1 && a.width <= MAX_WIDTH,
                EAGLE3_E_ARGUMENT,
                format("a tree of depth %d and width %d, expected a width of 1..%d", a.depth, a.width,
                    MAX_WIDTH));
        }
        if (a.kind == EAGLE3_CHOICES || a.kind == EAGLE3_GIVEN) {
            require(a.n >= 0 && a.n <= MAX_DRAFT, EAGLE3_E_ARGUMENT,
                format("a draft of %d tokens, at most %d are allowed", a.n, MAX_DRAFT));
            require(a.n == 0 || (a.kind == EAGLE3_GIVEN ? a.tokens != nullptr : a.parents && a.ranks),
                EAGLE3_E_ARGUMENT, "an array of the ask is NULL");
        }
        if (a.kind == EAGLE3_CHOICES) {
            check_choices(a);
        }
    }
}

int session::draft(const std::vector<ask> & asks) {
    check_asks(asks);
    round_.slots.clear();  // nothing to decode, should a slot fail
    grow_drafts(asks);
    std::vector<int> slots;
    int total = 0;
    for (const ask & a : asks) {
        slot_state & s = at(a.slot);
        if (a.kind == EAGLE3_GIVEN) {
            const int n = std::min(a.n, room(a, (int) asks.size()));
            s.draft_tokens.assign(a.tokens, a.tokens + n);
            for (int i = 0; i < n; ++i) {
                s.draft_parents.push_back(a.parents ? a.parents[i] : i - 1);
            }
        }
        begin_round(s, a.token);
        slots.push_back(a.slot);
        total += (int) s.draft_tokens.size();
    }
    round_.slots = std::move(slots);
    return total;
}

}  // namespace eagle3
