// Limits that no setting changes: of costs that are believed, tallies, growing, checkpoints and graphs.
#pragma once

#include <cstddef>

namespace eagle3 {

// Limits of what costs are believed, which no setting changes.
struct cost_limits {
    static constexpr float least_cost = 1e-9f;   // seconds: sums and quotients are safe with what is above it
    static constexpr float most_cost  = 1e4f;    // seconds
    static constexpr float most_context = 1e9f;  // positions
    static constexpr float least_share =
        0.1f;  // share of a measured decode that one with fewer positions takes
};

// The tallies of the head's and the text's estimates: fewer bins follow a text sooner, more know it better.
struct tally_limits {
    static constexpr int n_depth = 5;  // levels of a draft with tallies of their own; the last has all below
    static constexpr int n_rank  = 3;  // siblings of a level with tallies of their own
    // Estimates between two neighbours share a bin. They are close where most estimates of a head are.
    static constexpr float edges[] = {
        0.02f, 0.05f, 0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 0.9f, 0.97f};
    static constexpr int n_bin = (int) (sizeof(edges) / sizeof(edges[0])) + 1;
};

// Limits of growing, which no setting changes.
struct tree_limits {
    static constexpr float least_reach = 0.02f;  // below it, what follows a node is worth no row
    static constexpr int most_width    = 4;      // different tokens that the text offers after one node
    static constexpr int least_nodes   = 8;      // offered to each of many slots, for whom there are few rows
    static constexpr int least_match   = 4;      // tokens of a match in other texts: shorter ones are chance
    static constexpr float chance      = 0.25f;  // that a guess of head or text is right by luck
    static constexpr float least_left = 0.05f;  // share of the probability that head and text leave to others
    static constexpr float least_odds = 0.001f;  // so near to 0 or 1 an estimate comes where odds are taken
    static constexpr int overdue = 16;  // pending features of a slot, more than most rounds with drafts leave
};

// What a token that a grammar forces is worth until the planner has seen some. The last one may be another
// token that goes on beyond what is forced: `": "` where the value may begin with anything.
struct grammar_prior {
    static constexpr float other_tokens = 0.9f;
    static constexpr float last_token   = 0.6f;
};

// Checkpoints of a target that cannot drop rows, by which a later text goes back to where it differs.
struct checkpoint_limits {
    // Tokens of a slot that wait for its next batch. With more of them, a planned round drafts nothing, so
    // that none wait after it, and other drafts begin with a pass for them alone: else each rejected draft
    // would add to them, and each round decode them all again.
    static constexpr int most_waiting   = 6;
    static constexpr int least_distance = 64;         // positions between two of a slot, in short texts
    static constexpr size_t most        = 16;         // for a slot
    static constexpr size_t most_bytes  = 256 << 20;  // for all slots; each slot has one all the same
};

// The bytes that the kept graphs over the head may take beside their common compute buffer: their
// descriptions. A head of one layer has room for 37, and an answer of SmolLM2 with chains or trees needs up
// to 15.
constexpr size_t MOST_GRAPH_BYTES = 4 << 20;

}  // namespace eagle3
