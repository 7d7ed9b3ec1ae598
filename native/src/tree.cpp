// Drafts: chains, EAGLE-2's dynamic trees of a given size, trees of fixed shape, and the planner's choice
// among what all sources offer. The head's are grown level by level, for all slots in the same passes.
// Source: EAGLE-2 (arXiv 2406.16858), section 4.
#include "session.hpp"

#include <algorithm>
#include <cmath>

namespace eagle3 {

namespace {

constexpr int MAX_WIDTH = EAGLE3_MAX_WIDTH;
constexpr int OVERDUE   = 16;  // pending features of a slot, more than most rounds with drafts leave

bool grows(const ask & a) {
    return a.kind != EAGLE3_PLAIN && a.kind != EAGLE3_GIVEN;
}

bool has_children(const ask & a, int choice) {
    return choice >= 0 && std::find(a.parents, a.parents + a.n_max, choice) != a.parents + a.n_max;
}

// Nodes come level by level: so the first of them, as many as there is room for, are a tree too.
void check_parents(const ask & a) {
    std::vector<int> depth(1, 0);
    for (int i = 0; i < a.n; ++i) {
        const int32_t parent = a.parents[i];
        require(parent >= -1 && parent < i, EAGLE3_E_ARGUMENT,
            format("node %d of a draft follows node %d: parents come first", i, parent));
        require(depth[parent + 1] + 1 >= depth[i], EAGLE3_E_ARGUMENT,
            format("node %d of a draft is on a higher level than node %d: levels come in order", i, i - 1));
        depth.push_back(depth[parent + 1] + 1);
    }
}

void check_ranks(const ask & a) {
    for (int i = 0; i < a.n; ++i) {
        require(a.ranks[i] >= 0 && a.ranks[i] < MAX_WIDTH, EAGLE3_E_ARGUMENT,
            format("choice %d has rank %d, expected 0..%d", i, a.ranks[i], MAX_WIDTH - 1));
    }
}

}  // namespace

// The most draft tokens that there is room for. The ask's own token needs a cell and a row, too.
int session::room(const ask & a, int n_asks) const {
    const int rows = (most_rows_ - n_asks) / (a.kind == EAGLE3_PLANNED ? 1 : n_asks);
    return std::max(std::min(n_ctx_ - at(a.slot).n_past - 1, rows), 0);
}

// The ask as growth takes it: chains and choices are trees of a certain depth and width.
ask session::grown(ask a, int n_asks) const {
    if (a.kind == EAGLE3_CHOICES) {
        a.n_max = a.n;
        a.width = 1 + (a.n ? *std::max_element(a.ranks, a.ranks + a.n) : 0);
    } else if (a.kind == EAGLE3_CHAIN) {
        a.width = 1;
        a.depth = MAX_DRAFT;
    }
    a.n_max = std::min(a.n_max, room(a, n_asks));
    a.depth = a.kind == EAGLE3_CHAIN ? a.n_max : std::min(a.depth, a.n_max);  // a path of n levels is n nodes
    return a;
}

// Whether a source has anything to offer for a slot.
bool session::ready(int slot) const {
    return std::any_of(
        sources_.begin(), sources_.end(), [&](const auto & from) { return from->ready(slot); });
}

// Collects what the sources offer at first: the head the first level of its trees, the others all that they
// have. An ask drafts nothing if there is no room for it or no source is ready.
void session::begin_growth(growth & g, const std::vector<ask> & asks) {
    catch_up(asks);
    g.plan   = &planner_;
    g.n_asks = (int) asks.size();
    for (const ask & q : asks) {
        slot_state & s = at(q.slot);
        s.clear_draft();
        if (q.kind == EAGLE3_GIVEN) {
            g.n_given += std::min(q.n, room(q, g.n_asks));
        }
        const ask a       = grown(q, g.n_asks);
        const bool offers = a.kind == EAGLE3_PLANNED ? ready(a.slot) : head_ && head_->ready(a.slot);
        if (grows(a) && a.n_max > 0 && offers) {
            g.asks.push_back(a);
            g.n_past.push_back(s.n_past);
            g.trust.push_back(&s.trust);
        }
    }
    for (const auto & from : sources_) {
        std::vector<int> open;
        for (int a = 0; a < (int) g.asks.size(); ++a) {
            if (from->ready(g.asks[a].slot) && (from->takes_passes() || g.asks[a].kind == EAGLE3_PLANNED)) {
                open.push_back(a);
            }
        }
        if (!open.empty()) {
            draft_.passes_seconds += from->takes_passes() ? first_pass_seconds(g, open) : 0.0f;
            from->begin(g, open);
        }
    }
}

// What the planner expects of the head's first pass, for these asks.
float session::first_pass_seconds(const growth & g, const std::vector<int> & asks) const {
    int n = 0;
    for (const int a : asks) {
        n += head_->n_pending(g.asks[a].slot);
    }
    return planner_.pass_seconds(std::min(n, MAX_ROWS), true);
}

// Nodes of the last level that drafts of a given size extend.
std::vector<int> session::fixed_front(const growth & g) const {
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
        level.resize(std::min({(int) level.size(), a.width, head_->n_extensible(i)}));
        std::copy_if(level.begin(), level.end(), std::back_inserter(front),
            [&](int v) { return g.nodes[v].depth < a.depth && g.is_likely(g.nodes[v]); });
    }
    return front;
}

// The most nodes that the planner may draft in all slots together.
int session::planned_room(const growth & g) const {
    int room = 0;
    for (const ask & a : g.asks) {
        room = a.kind == EAGLE3_PLANNED ? std::max(room, a.n_max) : room;
    }
    return room;
}

// What the planner may draft, the likeliest first: of each ask no more nodes than its own n_max, which its
// room has cut, and `most` of all. A parent comes before its children, so it is there with each of them.
std::vector<int> session::candidates(const growth & g, int most) const {
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
std::vector<int> session::extensible(const growth & g, const std::vector<int> & candidates) const {
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
        if (!out && g.nodes[v].depth < q.n_max && used[a] < std::min(q.width, head_->n_extensible(a))) {
            ++used[a];
            level.push_back(v);
        }
    }
    return level;
}

// Nodes of the last level that the planner extends: of all slots together, as many as pay.
std::vector<int> session::planned_front(const growth & g) const {
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
    n_fixed                      = std::min(n_fixed, most_rows_ - g.n_asks - room);
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
        trust += (*g.trust[g.nodes[v].ask])[head_->id];
    }
    level.resize(planner_.grow_width(reach, g.nodes[level[0]].depth, level_reach, n_children,
        trust / (float) level.size(), std::max(n_fixed, 0)));
    return level;
}

// The head extends what it offered, as long as that pays.
void session::grow(growth & g) {
    while (head_) {
        std::vector<int> front         = fixed_front(g);
        const std::vector<int> planned = planned_front(g);
        front.insert(front.end(), planned.begin(), planned.end());
        if (front.empty()) {
            return;
        }
        g.level.clear();
        draft_.passes_seconds += planner_.pass_seconds(std::min((int) front.size(), MAX_ROWS), false);
        head_->extend(g, front);
        ++draft_.steps;
    }
}

// Makes these nodes of an ask, the likeliest first, the slot's draft, level by level. A parent's reach is
// never below its child's, so every node's parent is among them.
void session::take_nodes(const growth & g, int a, std::vector<int> order) {
    slot_state & s = at(g.asks[a].slot);
    for (const growth::node & v : g.nodes) {
        if (order.empty() && v.ask == a && v.parent < 0 && g.is_planned(v)) {
            s.undrafted.push_back({v.token, v.evidence});
        }
    }
    std::vector<int> place(g.nodes.size(), -1);
    std::stable_sort(
        order.begin(), order.end(), [&](int i, int j) { return g.nodes[i].depth < g.nodes[j].depth; });
    for (int i = 0; i < (int) order.size(); ++i) {
        const growth::node & v = g.nodes[order[i]];
        place[order[i]]        = i;
        s.draft_tokens.push_back(v.token);
        s.draft_parents.push_back(v.parent < 0 ? -1 : place[v.parent]);
        s.draft_reach.push_back(v.reach);
        s.draft_evidence.push_back(v.evidence);
    }
}

// Whether the planner drafts in this round. To be called once a round: the planner counts them.
bool session::planner_drafts(const std::vector<ask> & asks) {
    float n_past = 0.0f;
    bool any     = false;
    for (const ask & a : asks) {
        n_past += (float) at(a.slot).n_past / (float) asks.size();
        any = any || (a.kind == EAGLE3_PLANNED && a.n_max > 0 && ready(a.slot));
    }
    planner_.begin((int) asks.size(), n_past);
    return any && planner_.wants_draft();
}

// Does the work that gathered while there were no drafts, so that the first pass of all slots has at most
// MAX_ROWS rows. Its time does not count as the draft's: the planner would take drafts for expensive.
void session::catch_up(const std::vector<ask> & asks) {
    const int most = std::min(OVERDUE, MAX_ROWS / std::max((int) asks.size(), 1));
    for (const ask & a : asks) {
        for (const auto & from : sources_) {
            if (grows(a)) {
                from->catch_up(a.slot, most);
            }
        }
    }
    draft_.start = ggml_time_us();
}

// Of each ask's nodes, those to draft: as many as were asked for, or, of the planner's, as many as pay in all
// slots together.
std::vector<std::vector<int>> session::choose(const growth & g) {
    std::vector<std::vector<int>> chosen(g.asks.size());
    int n_fixed = g.n_given;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        const ask & a = g.asks[i];
        if (a.kind == EAGLE3_PLANNED) {
            continue;
        }
        if (a.kind == EAGLE3_CHOICES) {
            chosen[i] = g.by_reach([&](const growth::node & v) { return v.ask == i && v.choice >= 0; });
            std::sort(chosen[i].begin(), chosen[i].end(),
                [&](int v, int w) { return g.nodes[v].choice < g.nodes[w].choice; });
        } else {
            chosen[i] = g.by_reach([&](const growth::node & v) { return v.ask == i && g.is_likely(v); });
            chosen[i].resize(std::min((int) chosen[i].size(), a.n_max));
        }
        if (a.kind == EAGLE3_CHAIN && (int) chosen[i].size() < a.n_min) {
            chosen[i].clear();
        }
        n_fixed += (int) chosen[i].size();
    }
    const std::vector<int> planned =
        candidates(g, std::min(planned_room(g), most_rows_ - g.n_asks - n_fixed));
    if (planned.empty()) {
        return chosen;
    }
    std::vector<float> reach;
    for (const int v : planned) {
        reach.push_back(g.nodes[v].reach);
    }
    const planner::choice c = planner_.best(reach, n_fixed);
    draft_.value            = c.value;
    for (int i = 0; i < c.n; ++i) {
        chosen[g.nodes[planned[i]].ask].push_back(planned[i]);
    }
    return chosen;
}

// Makes the drafts of all asks but those that callers brought.
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
    check_rests();
    require(!asks.empty() && (int) asks.size() <= most_rows_, EAGLE3_E_ARGUMENT,
        format("a round of %zu slots, expected 1..%d", asks.size(), most_rows_));
    std::vector<bool> seen(slots_.size(), false);
    for (const ask & a : asks) {
        const slot_state & s = at(a.slot);
        require(!seen[a.slot], EAGLE3_E_ARGUMENT, format("slot %d is in the round twice", a.slot));
        seen[a.slot] = true;
        require(s.n_past < n_ctx_, EAGLE3_E_ARGUMENT,
            format("slot %d is full: no token fits after its %d positions", a.slot, s.n_past));
        require(a.token >= 0 && a.token < n_vocab_, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", a.token));
        check_kind(a);
    }
}

// The fields that the ask's kind names.
void session::check_kind(const ask & a) const {
    require(a.kind >= EAGLE3_PLAIN && a.kind <= EAGLE3_GIVEN, EAGLE3_E_ARGUMENT,
        format("there is no kind %d of draft", a.kind));
    const bool tree = a.kind == EAGLE3_TREE, planned = a.kind == EAGLE3_PLANNED,
               given = a.kind == EAGLE3_GIVEN;
    require(!planned || planner_.ready(), EAGLE3_E_ARGUMENT, "the planner has no costs: eagle3_plan_set");
    require(!(a.kind == EAGLE3_CHAIN || tree || planned) || (a.n_max >= 0 && a.n_max <= MAX_DRAFT),
        EAGLE3_E_ARGUMENT, format("n_max is %d, expected 0..%d", a.n_max, MAX_DRAFT));
    require(!(a.kind == EAGLE3_CHAIN || tree) || std::isfinite(a.p_min), EAGLE3_E_ARGUMENT,
        "p_min is not finite");
    require(!tree || a.depth >= 1, EAGLE3_E_ARGUMENT, format("a tree of depth %d", a.depth));
    require(!(tree || planned) || (a.width >= 1 && a.width <= MAX_WIDTH), EAGLE3_E_ARGUMENT,
        format("a tree of width %d, expected 1..%d", a.width, MAX_WIDTH));
    if (a.kind != EAGLE3_CHOICES && !given) {
        return;
    }
    require(a.n >= 0 && a.n <= MAX_DRAFT, EAGLE3_E_ARGUMENT,
        format("a draft of %d tokens, at most %d are allowed", a.n, MAX_DRAFT));
    require(a.n == 0 || (given ? a.tokens != nullptr : a.parents && a.ranks), EAGLE3_E_ARGUMENT,
        "an array of the ask is NULL");
    if (a.parents) {
        check_parents(a);
    }
    given ? check_tokens(a.tokens, a.n) : check_ranks(a);
}

int session::draft(const std::vector<ask> & asks) {
    check_asks(asks);
    round_.at      = stage::none;  // nothing to decode, should a slot fail
    round_.sampled = false;
    round_.slots.clear();
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
    round_.at    = stage::drafted;
    return total;
}

}  // namespace eagle3
