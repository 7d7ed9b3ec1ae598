// This makes drafts: chains, EAGLE-2's dynamic trees of a given size, trees of fixed shape, and the planner's
// choice among what all sources offer. The head's are grown level by level, for all slots in the same passes.
// The source is EAGLE-2 (arXiv 2406.16858), section 4.
#include "draft/draft.hpp"

#include "draft/frontier.hpp"

#include <algorithm>

namespace eagle3 {

namespace {

bool grows(const ask & a) {
    return a.kind != EAGLE3_PLAIN && a.kind != EAGLE3_GIVEN && a.kind != EAGLE3_PROMPT;
}

bool has_children(const ask & a, int choice) {
    return choice >= 0 && std::find(a.parents, a.parents + a.n_max, choice) != a.parents + a.n_max;
}

}  // namespace

void drafter::draft(const std::vector<ask> & asks) {
    for (const ask & a : asks) {
        if (slots_.grammar()) {
            slots_.grammar()->look(a.slot, a.kind == EAGLE3_PLANNED ? a.sampler : nullptr);
        }
    }
    grow_drafts(asks);
    for (const ask & a : asks) {
        if (a.kind == EAGLE3_GIVEN) {
            take_given(a, (int) asks.size());
        }
    }
}

void drafter::take_given(const ask & a, int n_asks) {
    slot_draft & d = slots_.at(a.slot).draft;
    const int n    = std::min(a.n, room(a, n_asks));
    d.tokens.assign(a.tokens, a.tokens + n);
    for (int i = 0; i < n; ++i) {
        d.parents.push_back(a.parents ? a.parents[i] : i - 1);
    }
}

// Makes the drafts of all asks but those that callers brought.
void drafter::grow_drafts(std::vector<ask> asks) {
    spent_       = {};
    spent_.began = spent_.start = ggml_time_us();
    spent_.planned =
        std::any_of(asks.begin(), asks.end(), [](const ask & a) { return a.kind == EAGLE3_PLANNED; });
    const planner::turn now = spent_.planned ? turn_of(asks) : planner::turn::draft;
    for (ask & a : asks) {
        a.kind = a.kind == EAGLE3_PLANNED && now == planner::turn::look ? EAGLE3_PLAIN : a.kind;
    }
    draft_tree g;
    begin_asks(g, asks);
    if (g.asks.empty()) {
        foresee({}, 0);
        return;
    }
    offer_for_free(g);
    if (runs_passes(g, now)) {
        catch_up(g);
        begin_passes(g, now);
        grow(g);
    }
    const std::vector<std::vector<int>> chosen = choose(g);
    spent_.seconds                             = 1e-6f * (ggml_time_us() - spent_.start);
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        take_nodes(g, i, chosen[i]);
    }
}

// Counts the tokens that wait in front of the round.
int drafter::n_waiting(const std::vector<ask> & asks) const {
    int n = 0;
    for (const ask & a : asks) {
        n += (int) slots_.at(a.slot).waiting.size();
    }
    return n;
}

// Returns what the round is for. It is called once a round, because the planner counts the calls.
planner::turn drafter::turn_of(const std::vector<ask> & asks) {
    float n_past = 0.0f;
    bool any     = false;
    for (const ask & a : asks) {
        n_past += (float) slots_.at(a.slot).n_past / (float) asks.size();
        any = any || (a.kind == EAGLE3_PLANNED && a.n_max > 0 && slots_.ready(a.slot));
    }
    planner_.begin((int) asks.size(), n_past, n_waiting(asks), slots_.target.n_free());
    return any ? planner_.next_turn() : planner::turn::look;
}

// Says whether the source drafts for this ask.
bool drafter::drafts_for(const source & from, const ask & a) const {
    if (slots_.takes_passes(from)) {
        return from.ready(a.slot);
    }
    return a.kind == EAGLE3_PLANNED && from.ready(a.slot) && (&from != slots_.text() || a.text != 0);
}

// Lets the sources without cost offer.
void drafter::offer_for_free(draft_tree & g) {
    for (const auto & from : slots_.sources()) {
        std::vector<int> open;
        for (int a = 0; a < (int) g.asks.size() && !slots_.takes_passes(*from); ++a) {
            if (drafts_for(*from, g.asks[a])) {
                open.push_back(a);
            }
        }
        if (!open.empty()) {
            from->begin(g, open);
        }
    }
    spent_.offered = !g.nodes.empty();
}

// Returns the asks that the source of passes drafts for in this round.
std::vector<int> drafter::pass_asks(const draft_tree & g, planner::turn now) const {
    std::vector<int> open;
    for (int a = 0; a < (int) g.asks.size() && slots_.passes(); ++a) {
        if (drafts_for(*slots_.passes(), g.asks[a]) &&
            (g.asks[a].kind != EAGLE3_PLANNED || now == planner::turn::draft)) {
            open.push_back(a);
        }
    }
    return open;
}

// Says whether passes are run: they are where an ask is for them alone, or nothing else was offered, or the
// first one is expected to pay beside what was.
bool drafter::runs_passes(const draft_tree & g, planner::turn now) {
    const std::vector<int> open = pass_asks(g, now);
    const bool fixed =
        std::any_of(open.begin(), open.end(), [&](int a) { return g.asks[a].kind != EAGLE3_PLANNED; });
    if (open.empty() || fixed || g.nodes.empty()) {
        return !open.empty();
    }
    return passes_pay(g, open, first_pass_seconds(g, open), spent_.base);
}

// Does the work that gathered while no pass was run, so that the first pass of all slots has at most MAX_ROWS
// rows. Its time does not count as the draft's: the planner would take drafts for expensive.
void drafter::catch_up(const draft_tree & g) {
    const int64_t start = ggml_time_us();
    const int most      = std::min(tree_limits::overdue, MAX_ROWS / std::max(g.n_asks, 1));
    for (const ask & a : g.asks) {
        slots_.passes()->catch_up(a.slot, most);
    }
    spent_.start += ggml_time_us() - start;
}

// Runs the first pass, and lets the others offer behind its tokens.
void drafter::begin_passes(draft_tree & g, planner::turn now) {
    const std::vector<int> open = pass_asks(g, now);
    spent_.passes_seconds += first_pass_seconds(g, open);
    spent_.steps = 1;
    g.level.clear();
    slots_.passes()->begin(g, open);
    follow(g);
}

void drafter::follow(draft_tree & g) {
    for (const auto & from : slots_.sources()) {
        std::vector<int> nodes;
        for (const int v : g.level) {
            if (!slots_.takes_passes(*from) && g.nodes[v].evidence[from->id] == NOT_OFFERED &&
                drafts_for(*from, g.asks[g.nodes[v].ask])) {
                nodes.push_back(v);
            }
        }
        from->follow(g, nodes);
    }
}

// Returns the nodes of the last level that drafts of a given size extend.
std::vector<int> drafter::fixed_frontier(const draft_tree & g) const {
    std::vector<int> frontier;
    for (int i = 0; i < (int) g.asks.size(); ++i) {
        const ask & a = g.asks[i];
        if (a.kind == EAGLE3_PLANNED) {
            continue;
        }
        std::vector<int> level = g.level_by_reach([&](const draft_tree::node & v) { return v.ask == i; });
        if (a.kind == EAGLE3_CHOICES) {
            std::copy_if(level.begin(), level.end(), std::back_inserter(frontier),
                [&](int v) { return has_children(a, g.nodes[v].choice); });
            continue;
        }
        level.resize(std::min({(int) level.size(), a.width, slots_.passes()->n_extensible(i)}));
        std::copy_if(level.begin(), level.end(), std::back_inserter(frontier),
            [&](int v) { return g.nodes[v].depth < a.depth && g.is_likely(g.nodes[v]); });
    }
    return frontier;
}

// Extends what passes offered, as long as that pays.
void drafter::grow(draft_tree & g) {
    while (true) {
        std::vector<int> frontier = fixed_frontier(g);
        const std::vector<int> planned =
            planned_frontier(g, g.most_rows, [&](int a) { return slots_.passes()->n_extensible(a); });
        frontier.insert(frontier.end(), planned.begin(), planned.end());
        if (frontier.empty()) {
            return;
        }
        g.level.clear();
        spent_.passes_seconds += planner_.pass_seconds(std::min((int) frontier.size(), MAX_ROWS), false);
        slots_.passes()->extend(g, frontier);
        follow(g);
        ++spent_.steps;
    }
}

// An ask drafts nothing if there is no room for it or no source is ready.
void drafter::begin_asks(draft_tree & g, const std::vector<ask> & asks) {
    g.plan      = &planner_;
    g.n_asks    = (int) asks.size();
    g.most_rows = slots_.most_rows - n_waiting(asks);
    g.ends      = &slots_.ends();
    for (const ask & q : asks) {
        slot_state & s = slots_.at(q.slot);
        s.draft.clear();
        if (q.kind == EAGLE3_GIVEN) {
            g.n_given += std::min(q.n, room(q, g.n_asks));
        }
        const ask a       = grown(q, g.n_asks);
        const bool offers = a.kind == EAGLE3_PLANNED ? slots_.ready(a.slot)
                                                     : slots_.passes() && slots_.passes()->ready(a.slot);
        if (grows(a) && a.n_max > 0 && offers) {
            g.asks.push_back(a);
            g.n_past.push_back(s.n_past);
            g.trust.push_back(&s.trust);
        }
    }
}

// Returns what the planner expects of the first pass, for these asks.
float drafter::first_pass_seconds(const draft_tree & g, const std::vector<int> & asks) const {
    int n = 0;
    const int most =
        std::min(tree_limits::overdue, MAX_ROWS / std::max(g.n_asks, 1));  // catch_up() does the others
    for (const int a : asks) {
        n += std::min(slots_.passes()->n_pending(g.asks[a].slot), most);
    }
    return planner_.pass_seconds(std::min(n, MAX_ROWS), true);
}

// Returns the most draft tokens that there is room for. The ask's own token needs a cell and a row, too.
int drafter::room(const ask & a, int n_asks) const {
    if (a.kind == EAGLE3_PLANNED && slots_.many_wait(a.slot)) {
        return 0;
    }
    const int rows = (slots_.most_rows - n_asks) / (a.kind == EAGLE3_PLANNED ? 1 : n_asks);
    return std::max(std::min(slots_.n_ctx - slots_.at(a.slot).n_past - 1, rows), 0);
}

// Returns the ask as draft_tree takes it: chains and choices are trees of a certain depth and width.
ask drafter::grown(ask a, int n_asks) const {
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

}  // namespace eagle3
