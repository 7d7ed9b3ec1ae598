// Chooses what to draft by measured cost: how far a chain or a tree is grown, how much of it the target
// checks, and whether to draft at all.
#pragma once

#include "eagle3.h"
#include "tuning.hpp"

#include <array>
#include <cmath>
#include <vector>

namespace eagle3 {

constexpr int MAX_ROWS = EAGLE3_MAX_ROWS;

// Sources of draft tokens, by their ids, and two more that have statistics of their own: where head and text
// offer the same token, and where the text offers one that the head does not.
enum { HEAD = 0, TEXT = 1, OTHER = 2, BOTH = 4, DISPUTED = 5, MAX_SOURCES = 6 };

using costs = eagle3_costs;
// E_ARGUMENT for costs that eagle3_plan_set refuses.
void check(const costs & c);

// The value of a draft of n nodes is the tokens it is expected to bring less what its time would bring
// elsewhere:
//
//     1 + sum of reach[i] - rate * (layers[n + 1] + expected output)
//
// reach[i] is the probability that verification gets to node i, rate the long run's tokens per second. What
// raises the value raises the rate, and a rate that no draft can raise is the highest there is (renewal
// reward).
//
// A round may hold several slots: their roots are rows that are there anyway, their nodes compete for the
// rest. What a round takes and brings is remembered for each number of slots.
class planner {
  public:
    explicit planner(const tuning & t = {}, const text_tuning & text = {}) : tune_(t), of_text_(text) {}

    void set(const costs & c);
    bool ready() const { return costs_.layers[1] > 0.0f; }

    // The rounds that follow hold this many slots, with this many positions before each on average.
    void begin(int n_slots, float n_past);

    // A slot begins another text: what the last one gave a lone slot cause to rest, or to draft, for does not
    // apply to it.
    void new_text();

    // What the next round is for. Counts a round.
    enum class turn {
        look,   // nothing is drafted, so that a plain round's time is known
        rest,   // the head drafts nothing; what costs no pass may
        draft,  // everything drafts
    };
    turn next_turn();

    // Probability that a draft token is the one that the target samples, if verification gets to its parent.
    // q is the source's own estimate, depth counts from 1. Learnt from drafts of that source that
    // verification reached; older ones count less. trust: the slot's in that source.
    float accept(int source, int depth, float q, float trust) const;
    // To be told of all draft tokens that verification reached, and of first ones that were offered and not
    // drafted: where no draft pays, these are all that there is to learn from. rank counts a source's
    // siblings from 0, the likeliest first. trust follows the slot's last few tokens.
    void learn(int source, int depth, int rank, float q, bool accepted, float & trust);

    // Of nodes sorted by reach, how many to draft, and what that is worth. n_fixed: other nodes that are
    // drafted anyway.
    struct choice {
        int n;
        float value;
    };
    choice best(const std::vector<float> & reach, int n_fixed = 0) const;
    // Of a level's nodes, how many the head should extend. extra: seconds that the first pass takes beyond
    // the others.
    int grow_width(const std::vector<float> & reach, int depth, const std::vector<float> & level,
        int n_children, float trust, int n_fixed = 0, float extra = 0.0f) const;
    // How many rows of the output matrix to compute at once, from row i on of those whose reach is given.
    int piece(const std::vector<float> & reach, int i) const {
        return pieces(reach, i, tune_.try_two, tune_.try_piece).n;
    }
    void saw_piece(int n, float seconds);  // a piece of the output matrix took so long
    // Expected of a pass over the head; first: of a draft.
    float pass_seconds(int n, bool first) const {
        return (costs_.head[n] + (first ? costs_.first : 0.0f)) * at().plain.value * at().head.value;
    }

    // What a round is expected to take and to bring.
    struct expectation {
        float seconds = 0.0f, tokens = 0.0f;
    };
    // Of a round in which nodes with this reach are drafted, n_fixed others beside.
    expectation foresee(const std::vector<float> & reach, int n_fixed, float passes_s) const;
    // Seconds that rounds were expected to take, and that plain decoding takes for the tokens expected of
    // them.
    struct forecast {
        double seconds = 0.0, plain = 0.0;
    };
    forecast foreseen() const { return foreseen_; }  // of all rounds since set()

    struct round {
        int n_rows     = 0;
        bool tried     = false;  // the head ran
        bool offered   = false;  // other sources offered something
        bool whole     = false;  // the decode computed the output matrix too
        float layers_s = 0.0f, draft_s = 0.0f, total_s = 0.0f;
        float before_s   = 0.0f;       // since the planner was told of the last round
        float gathered_s = 0.0f;       // work that had gathered, which is in none of these
        float passes_s   = 0.0f;       // expected of the head's passes
        int n_tokens     = 0;          // that it brought
        float value      = 0.0f;       // of its draft, from best()
        float base       = -INFINITY;  // the same without the head
        float output_s   = 0.0f;       // of the pieces that the output matrix was computed in, unless whole
        expectation expected;
    };
    void saw_round(round r);

    float rate() const;           // tokens per second, of all slots
    float plain_seconds() const;  // of a round without drafts
    float usual_seconds() const;  // the same on average over many rounds
    int n_slots() const { return n_slots_; }
    int asleep() const { return at().asleep; }
    const text_tuning & of_text() const { return of_text_; }

  private:
    struct mode;
    struct calibration;

    static constexpr float NO_HOPE    = INFINITY;  // mode::hope: no draft is tried
    static constexpr float DISTURBED  = 3.0f;      // of a round's expected seconds, the most that counts
    static constexpr float KEEP_USUAL = 0.999f;    // some 1000 rounds
    static constexpr float MOST_USUAL = 1.35f;     // of rounds near a look, the most of it that counts
    static constexpr float N_USUAL    = 48.0f;     // rounds that the measured costs count for beside looks
    static constexpr int SETTLED      = 2;         // plain rounds after a draft that take longer
    static constexpr int N_DEPTH = 5, N_BIN = 13, N_RANK = 3;

    struct tally {
        float tries = 0.0f, hits = 0.0f;
    };

    // Time taken against time measured, of something that does not happen in each round. The longer it has
    // not been seen, the more the next time counts.
    struct factor {
        float value = 1.0f, weight = 0.0f;
        std::array<float, 2> last = {1.0f, 1.0f};  // ratios of the last two times
        void correct(float ratio, float keep, float least_weight);
        void fade(float keep) { weight *= keep; }  // in a round without it
        void relax(float rate) { value = 1.0f + (value - 1.0f) * (1.0f - rate); }
    };

    float steady(factor & f, float ratio) const;
    float steady_plain(float ratio);
    float layers(int n) const;
    float output(int n) const;
    float row_seconds(int i, float reach) const;
    struct pieces_of {
        int n;          // rows of the first one
        float seconds;  // expected of all
    };
    pieces_of pieces(const std::vector<float> & reach, int i, float try_two, float try_piece) const;
    float mean_accept(int depth, int rank, float trust) const;  // of the head's
    bool gains(float least) const;
    float callers_seconds(float before_s);
    void compare(const round & r, float plain_s);
    float measured(int n) const;
    float measured_whole(int n) const;
    void look_for_turn(calibration & c, int rank, float surprise, float & trust);
    void time_passes(bool tried, bool drafted, int n_rows);
    void learn_times(const round & r, bool plain, bool unsettled, float ratio);
    void learn_rest(const round & r, bool plain, float gain_plain);
    void plan_look(bool plain, float raw, float ratio);
    void saw_draft(const round & r, bool plain, float raw, float seconds);
    void saw_free(const round & r, bool plain, float raw);
    void rest_or_wake();
    bool rests(const mode & m) const;

    // of rounds with so many slots
    struct mode {
        factor plain;    // of plain rounds, whose size is another in each mode: the machine's drift
        factor drafted;  // of rounds with drafts, beyond that
        std::array<factor, MAX_ROWS + 1> sizes;  // of each size of these, beyond both
        factor one, many;  // of pieces of the output matrix in these, of one row and of more, beyond plain
        factor head;       // of the head's passes, beyond plain
        float tokens = 0.0f, seconds = 0.0f;  // decaying
        float gain        = 0.0f;             // of drafting over not drafting, tokens a round, decaying
        float seen_tokens = 0.0f,
              seen_plain  = 0.0f;  // of rounds that drafted, and of plain ones in their time, decaying
        float plain_rest  = 0.0f;  // what a plain round takes beside its decode, seconds, decaying
        float draft_rest =
            0.0f;  // the same of one with a draft, above plain_rest and what is expected of the output matrix
        float before = -1.0f;  // what the caller takes between rounds, seconds, decaying; negative if unknown
        // What was seen, and what was expected, decaying.
        struct average {
            float seen = 0.0f, expected = 0.0f;
            float value(float prior) const { return (seen + prior) / (expected + prior); }
            void add(float s, float e, float keep) {
                seen     = seen * keep + s;
                expected = expected * keep + e;
            }
        };
        average late, brought;  // seconds and tokens of all rounds, against their forecasts
        // seconds of the layers in rounds with drafts since the last look, against the costs measured
        average unseen;
        // seconds of plain rounds, against the same. Each counts for the rounds since the one before: a
        // disturbance brings looks, so that more of them fall into it
        average usual;
        int n_unseen = 0;                // rounds since the last look
        int n_plain = 0, n_drafted = 0;  // plain rounds, the first few; rounds with drafts since the last one
        int looks    = 0;                // rounds that a look still has
        int n_since  = SETTLED;          // plain rounds since the last draft, up to this number
        int n_drafts = 0, asleep = 0, nap = 0, n_naps = 0;
        bool begun = false;  // whether the text has had a round
        // a draft that brings this part of its cost is tried, for the cost may be another than is thought
        float hope        = 0.0f;
        float plain_tried = 1.0f;  // the drift when that was last due
        int n_idle        = 0;     // probes in a row that drafted nothing
        int n_declined    = 0;     // rounds without a draft, though one cost no pass

        void forget_drafts() {
            gain = seen_tokens = seen_plain = 0.0f;
            n_drafts = nap = n_idle = 0;
        }
    };
    mode & at() { return modes_[n_slots_]; }
    const mode & at() const { return modes_[n_slots_]; }

    tuning tune_;
    text_tuning of_text_;
    costs costs_{};
    forecast foreseen_;
    float context_ = 0.0f;  // positions before the rows at hand
    int n_slots_   = 1;
    std::array<mode, MAX_ROWS + 1> modes_{};
    struct calibration {
        std::array<std::array<tally, N_BIN>, N_DEPTH> bins{};
        std::array<std::array<tally, N_RANK>, N_DEPTH> ranks{};
        float surprise = 0.0f;  // hits of first tokens above what was expected, decaying: while drafts rest
        float excess   = 0.0f;  // and always, over more of them
        int pardons    = 0;     // first tokens whose slots are trusted again, after a turn of the text
    };
    std::array<calibration, MAX_SOURCES> calibrations_{};  // of each source
};

}  // namespace eagle3
