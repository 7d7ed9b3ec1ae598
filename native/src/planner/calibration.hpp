// This says what the estimates of each source are worth. It learns that from the drafts that verification
// reached.
#pragma once

#include "eagle3.h"
#include "planner/tuning.hpp"

#include <array>

namespace eagle3 {

// Sources of draft tokens have ids: that of the source which takes passes, the text's, and from OTHER on
// those of the sources that were added. Two more ids have statistics of their own: where passes and text
// offer the same token, and where the text offers one that passes do not.
enum { PASSES = 0, TEXT = 1, OTHER = 2, MAX_SOURCES = EAGLE3_MAX_SOURCES };
enum { BOTH = MAX_SOURCES, DISPUTED, N_RECORDS };

class calibration {
  public:
    static constexpr int N_DEPTH = tally_limits::n_depth, N_BIN = tally_limits::n_bin,
                         N_RANK = tally_limits::n_rank;

    calibration(const tuning & t, const text_tuning & text) : tune_(t), of_text_(text) {}

    // Returns the probability that a draft token is the one that the target samples, if verification gets to
    // its parent. q is the source's own estimate, depth counts from 1, trust is the slot's in that source.
    float accept(int source, int depth, float q, float trust) const;
    // Returns the same for any token of the head with this rank among its siblings.
    float mean_accept(int depth, int rank, float trust) const;

    // This says how much drafting rests while it learns.
    enum class rest { none, some, longest };
    // Learns from one draft token that verification reached, or from a first one that was offered and not
    // drafted. rank counts a source's siblings from 0, the likeliest first. trust follows the slot's last few
    // tokens. Returns whether the text has become another one: what was learnt before is then forgotten.
    bool learn(int source, int depth, int rank, float q, bool accepted, float & trust, rest now, int n_slots);

  private:
    struct tally {
        float tries = 0.0f, hits = 0.0f;
    };
    struct record {
        std::array<std::array<tally, N_BIN>, N_DEPTH> bins{};
        std::array<std::array<tally, N_RANK>, N_DEPTH> ranks{};
        tally first;            // first tokens, whatever the source said of them
        float expected = 0.0f;  // hits among those that its own estimates said
        float surprise = 0.0f;  // hits of first tokens above what was expected, decaying: while drafts rest
        float excess   = 0.0f;  // and always, over more of them
        int pardons    = 0;     // first tokens whose slots are trusted again, after a turn of the text
    };
    float estimate(int source, float q) const;
    bool has_turned(record & c, int rank, float surprise, float & trust, bool rests, int n_slots);

    const tuning & tune_;
    const text_tuning & of_text_;
    std::array<record, N_RECORDS> records_{};  // by the ids above
};

}  // namespace eagle3
