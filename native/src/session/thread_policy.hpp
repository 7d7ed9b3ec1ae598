// This chooses how many threads rounds use. A decode ends with its slowest thread: beside another program,
// fewer threads may be faster than all that the user allows. Which number is faster is measured, round by
// round.
#pragma once

#include "planner/tuning.hpp"

#include <cstdint>
#include <vector>

struct llama_context;

namespace eagle3 {

// The policy chooses among a few numbers of threads, from the user's own downwards. What rounds take is told
// in units of what the same decode was measured to take, so that rounds of different sizes can be compared.
class thread_policy {
  public:
    explicit thread_policy(const thread_tuning & t = {}) : tune_(t) { set_most(1); }

    // Sets the numbers that the user gave, of a decode of one row and of more. If fixed, there is nothing to
    // choose. Other numbers begin anew.
    void set_most(int one, int many, bool fixed = false);
    void set_most(int n) { set_most(n, n); }

    // Returns the numbers to choose from, the user's first. There is nothing to choose from a single one.
    const std::vector<int> & numbers() const { return numbers_; }
    int now() const { return numbers_[at()]; }     // in the next round
    bool is_trial() const { return trial_ >= 0; }  // the next round tries another number
    bool uses_most() const { return at() == 0; }
    float slower() const { return cost_[at()]; }  // what a round takes with now(), in the same units

    // Is told what a decode took with each of numbers(), now; 0 for those that were not measured, but for the
    // first. The next round uses the fastest, which is the unit from now on.
    void measured(const std::vector<float> & seconds);
    // From now on the unit is what the present number takes: other costs were measured, with it.
    void begin_unit();
    // The next round took so long.
    void saw(float ratio);

  private:
    int at() const { return trial_ >= 0 ? trial_ : home_; }
    void see_excess(float ratio);
    void begin_trial();
    bool is_lost() const;
    void end_trial();

    const thread_tuning tune_;
    int one_ = 0, many_ = 0;
    bool fixed_ = false;
    std::vector<int> numbers_;
    std::vector<float> cost_;    // by number, as far as it is known
    int home_ = 0, trial_ = -1;  // indexes of numbers_
    int n_seen_   = 0;           // rounds that cost_[home_] is the mean of
    int n_tried_  = 0;           // rounds of the trial so far
    float tried_  = 0.0f;        // and the sum of what they took
    int since_    = 0;           // rounds since the last trial
    float excess_ = 0.0f;  // accumulated excess of measured round times over the estimate for fewer threads
    int wait_fewer_, wait_more_;  // rounds before a trial of fewer, or more, threads
};

// These are the seconds that a decode of so many rows took on this machine when it was last undisturbed: the
// unit of thread_policy where no costs were measured.
class row_times {
  public:
    // Returns what this decode took in that unit. slower says how many times as long the present number of
    // threads takes.
    float ratio(int n_rows, float seconds, float slower);
    void clear() { seconds_.clear(); }

  private:
    std::vector<float> seconds_;  // by the number of rows; 0: not seen
};

// A context uses so many threads until the end of the scope, and then the user's numbers again.
class thread_scope {
  public:
    thread_scope(llama_context * ctx, const thread_policy & policy);
    thread_scope(llama_context * ctx, int most);  // no more than this
    ~thread_scope();

    thread_scope(const thread_scope &)             = delete;
    thread_scope & operator=(const thread_scope &) = delete;

  private:
    void set(int32_t one, int32_t many);

    llama_context * ctx_;
    int32_t one_, many_;
};

}  // namespace eagle3
