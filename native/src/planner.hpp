// Chooses what to draft by measured cost: how far a chain or a tree is grown, how much of it the target checks, and
// whether to draft at all.
#pragma once

#include <array>
#include <vector>

namespace eagle3 {

constexpr int MAX_ROWS = 64;

// Seconds. Entry n is for n rows, entry 0 is unused.
struct costs {
    std::array<float, MAX_ROWS + 1> layers{};  // a target decode without the output matrix, at `context` positions
    std::array<float, MAX_ROWS + 1> output{};  // the output matrix
    std::array<float, MAX_ROWS + 1> head{};    // a pass over the head
    std::array<float, MAX_ROWS + 1> cell{};    // more for each position beyond, a target decode
    float first   = 0.0f;                      // what the first pass of a draft costs above head[1]
    float other   = 0.0f;                      // the rest of a round that drafts
    float context = 0.0f;                      // positions before the measured rows
};

// The value of a draft of n nodes is the tokens it is expected to bring less what its time would bring elsewhere:
//
//     1 + sum of reach[i] - rate * (layers[n + 1] + expected output)
//
// reach[i] is the probability that verification gets to node i, rate the long run's tokens per second. What raises the
// value raises the rate, and a rate that no draft can raise is the highest there is (renewal reward).
class planner {
  public:
    void set(const costs & c);
    bool ready() const { return costs_.layers[1] > 0.0f; }

    // Whether the next round should draft. Counts a round.
    bool wants_draft();

    // Probability that a child the head gives q is the token the target samples, if verification gets to its parent.
    // depth counts from 1. Learnt from drafts that verification reached; older ones count less.
    float accept(int depth, float q) const;
    // rank counts siblings from 0, the likeliest first.
    void  learn(int depth, int rank, float q, bool accepted);

    // Of nodes sorted by reach, how many to draft, and what that is worth.
    struct choice {
        int   n;
        float value;
    };
    choice best(const std::vector<float> & reach) const;
    int    grow_width(const std::vector<float> & reach, int depth, const std::vector<float> & level, int n_children) const;
    // How many rows of the output matrix to compute at once, from row i on of those whose reach is given (row 0 is 1).
    int   piece(const std::vector<float> & reach, int i) const;

    struct round {
        int   n_past    = 0;
        int   n_drafted = 0;
        bool  tried     = false;  // the head ran
        bool  whole     = false;  // the decode computed the output matrix too
        float layers_s = 0.0f, draft_s = 0.0f, total_s = 0.0f;
        int   n_tokens = 0;       // that it brought
        float value    = 0.0f;    // of its draft, from best()
    };
    void  saw_round(const round & r);

    float rate() const;           // tokens per second
    float plain_seconds() const;  // of a token without drafts
    float trust() const { return trust_; }
    int   asleep() const { return asleep_; }

  private:
    static constexpr int N_DEPTH = 5, N_BIN = 13, N_RANK = 3;

    struct tally {
        float tries = 0.0f, hits = 0.0f;
    };

    float layers(int n) const;
    float row_seconds(int i, float reach) const;
    float mean_accept(int depth, int rank) const;

    costs costs_;
    float context_ = 0.0f;  // of the slot at hand
    float drift_   = 1.0f;  // time taken against time measured, shared by all sizes
    std::array<float, MAX_ROWS + 1> drift_of_{};  // and of each
    std::array<std::array<tally, N_BIN>, N_DEPTH> bins_{};
    std::array<std::array<tally, N_RANK>, N_DEPTH> ranks_{};
    float trust_ = 1.0f;    // in the tallies, after the last few tokens
    float tokens_ = 0.0f, seconds_ = 0.0f;  // decaying
    float gain_ = 0.0f;                     // of drafting over not drafting, tokens a round, decaying
    int   n_drafts_ = 0, asleep_ = 0, nap_ = 0;
};

} // namespace eagle3
