// This refuses asks that eagle3_round_draft cannot draft for.
#include "draft/draft.hpp"

#include <cmath>

namespace eagle3 {

namespace {

constexpr int MAX_WIDTH = EAGLE3_MAX_WIDTH;

// Nodes come level by level, so the first of them, as many as there is room for, are a tree too.
void check_parents(const ask & a) {
    for (int i = 0; i < a.n; ++i) {
        require(a.parents[i] >= -1 && a.parents[i] < i, EAGLE3_E_ARGUMENT,
            format("node %d of a draft follows node %d: parents come first", i, a.parents[i]));
    }
    const std::vector<int> depth = depths(a.parents, a.n);
    for (int i = 1; i < a.n; ++i) {
        require(depth[i] >= depth[i - 1], EAGLE3_E_ARGUMENT,
            format("node %d of a draft is on a higher level than node %d: levels come in order", i, i - 1));
    }
}

void check_ranks(const ask & a) {
    for (int i = 0; i < a.n; ++i) {
        require(a.ranks[i] >= 0 && a.ranks[i] < MAX_WIDTH, EAGLE3_E_ARGUMENT,
            format("choice %d has rank %d, expected 0..%d", i, a.ranks[i], MAX_WIDTH - 1));
    }
}

}  // namespace

void drafter::check(const std::vector<ask> & asks) const {
    require(!asks.empty() && (int) asks.size() <= slots_.most_rows, EAGLE3_E_ARGUMENT,
        format("a round of %zu slots, expected 1..%d", asks.size(), slots_.most_rows));
    std::vector<bool> seen(slots_.size(), false);
    for (const ask & a : asks) {
        const slot_state & s = slots_.at(a.slot);
        require(!seen[a.slot], EAGLE3_E_ARGUMENT, format("slot %d is in the round twice", a.slot));
        seen[a.slot] = true;
        require(s.n_past < slots_.n_ctx, EAGLE3_E_ARGUMENT,
            format("slot %d is full: no token fits after its %d positions", a.slot, s.n_past));
        slots_.check_tokens(&a.token, 1);
        check_kind(a);
    }
}

// Checks the fields that the ask's kind names.
void drafter::check_kind(const ask & a) const {
    require(a.kind >= EAGLE3_PLAIN && a.kind <= EAGLE3_PROMPT, EAGLE3_E_ARGUMENT,
        format("there is no kind %d of draft", a.kind));
    const bool tree = a.kind == EAGLE3_TREE, planned = a.kind == EAGLE3_PLANNED,
               given = a.kind == EAGLE3_GIVEN;
    require(!planned || planner_.ready(), EAGLE3_E_ARGUMENT, "the planner has no costs: eagle3_plan_set");
    require(!(a.kind == EAGLE3_CHAIN || tree || planned) || (a.n_max >= 0 && a.n_max <= MAX_DRAFT),
        EAGLE3_E_ARGUMENT, format("n_max is %d, expected 0..%d", a.n_max, MAX_DRAFT));
    require(!(a.kind == EAGLE3_CHAIN || tree) || std::isfinite(a.p_min), EAGLE3_E_ARGUMENT,
        "p_min is not finite");
    require(!tree || a.depth >= 1, EAGLE3_E_ARGUMENT, format("a tree of depth %d", a.depth));
    require(!planned || a.depth >= 0, EAGLE3_E_ARGUMENT, format("drafts of %d levels", a.depth));
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
    given ? slots_.check_tokens(a.tokens, a.n) : check_ranks(a);
}

}  // namespace eagle3
