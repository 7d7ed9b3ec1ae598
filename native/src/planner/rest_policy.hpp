// This says when nothing is drafted: looks, so that a plain round's time is known, and rests, where drafts do
// not pay.
#pragma once

#include "planner/cost_clock.hpp"

namespace eagle3 {

class rest_policy {
  public:
    rest_policy(const tuning & t, const text_tuning & text, const cost_clock & clock)
        : tune_(t), of_text_(text), clock_(clock) {}

    void reset();  // other costs were set
    // A slot begins another text: what the last one gave a lone slot cause to rest, or to draft, for does not
    // apply to it.
    // wrong: what the head offered in earlier texts was right too rarely to pay for its passes.
    void new_text(bool wrong);

    // This is what the next round is for.
    enum class turn {
        look,   // nothing is drafted, so that a plain round's time is known
        rest,   // the head drafts nothing; what costs no pass may
        draft,  // everything drafts
    };
    turn next_turn();  // counts a round

    // Says whether a first node with this reach is tried though its row is thought too dear: it may cost
    // less.
    bool hopes(float reach, float rate, float row_s) const {
        return at().hope < NO_HOPE && reach > at().hope * rate * row_s;
    }
    int asleep() const { return at().asleep; }  // rounds that the rest still has
    bool is_resting() const { return at().nap > 0; }
    bool rests_longest() const { return at().nap == tune_.nap_most; }

    void saw_round(const round_record & r, const cost_clock::reading & seen);
    void text_turned();  // drafts may pay again

  private:
    static constexpr float NO_HOPE = INFINITY;  // mode::hope: no draft is tried

    // This is what rounds with so many slots gave cause for.
    struct mode {
        float gain        = 0.0f;  // what drafting gains, tokens a round, decaying
        float seen_tokens = 0.0f;  // tokens of rounds that drafted, decaying
        float seen_plain  = 0.0f;  // tokens of plain rounds in their time
        int n_plain       = 0;     // plain rounds, the first few
        int n_drafted     = 0;     // rounds with drafts since the last plain one
        int looks         = 0;     // rounds that a look still has
        int n_drafts = 0, asleep = 0, nap = 0, n_naps = 0;
        bool begun      = false;  // whether the text has had a round
        float hope      = 0.0f;   // see hopes()
        int n_declined  = 0;      // rounds without a draft, though one cost no pass
        float missed    = 0.0f;   // tokens' time that drafts in a row cost of which nothing was accepted
        bool has_missed = false;  // whether the last round was such a draft
    };
    mode & at() { return modes_[clock_.n_slots()]; }
    const mode & at() const { return modes_[clock_.n_slots()]; }

    bool gains() const;
    void plan_look(bool plain, float raw, float ratio);
    void saw_draft(const round_record & r, const cost_clock::reading & seen);
    void saw_free(const round_record & r, bool plain, float raw);
    void add_missed(float tokens);
    float lost(const cost_clock::reading & seen) const;
    void rest_or_wake();
    bool rests(const mode & m) const;

    const tuning & tune_;
    const text_tuning & of_text_;
    const cost_clock & clock_;
    std::array<mode, MAX_ROWS + 1> modes_{};
};

}  // namespace eagle3
