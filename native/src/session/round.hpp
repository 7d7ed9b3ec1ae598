// A round goes over some of the slots: it drafts, decodes, verifies and commits.
#pragma once

#include "draft/draft.hpp"
#include "planner/planner.hpp"
#include "session/slots.hpp"
#include "session/thread_policy.hpp"

#include <string>
#include <vector>

namespace eagle3 {

// This is how far a round is: see the table in eagle3.h.
enum class stage { none, drafted, decoded, verified };

class round {
  public:
    round(slots & s, drafter & d, planner & p) : slots_(s), drafter_(d), planner_(p) {}

    // Sets whether rounds may use fewer threads than the context's, where that is faster. They do by default
    // where all is computed by the CPU.
    void choose_threads(bool on) { chooses_threads_ = on; }
    // Returns the numbers of threads to choose from now; the next round's is threads().now().
    const thread_policy & threads();
    void measured_threads(
        const std::vector<float> & seconds);  // seconds of a decode of one row with each of them
    void new_costs();                         // the planner has others, or none

    // These are the four steps; a slot takes part at most once. Calls that are not legal at a stage of the
    // round throw E_ARGUMENT and change nothing. draft returns the number of draft tokens. counts and keep
    // have an entry for each slot, in the order of the asks. A count below 0 is the code of a slot whose
    // sampler failed at its first row, and failure holds its message. Where it failed at a later row, the
    // count is of the good tokens before it, and failure_of has the code.
    int draft(const std::vector<ask> & asks);
    void decode();
    void verify(llama_sampler * const * samplers, int32_t * out, int32_t * counts, std::string & failure);
    void commit(const int32_t * keep);
    void plain_rounds(ask a, llama_sampler * sampler, eagle3_run & out);  // see eagle3_plain_rounds

    stage at() const { return at_; }
    const std::vector<int> & of() const { return of_; }  // its slots, in the order of the asks
    bool under_way() const { return at_ >= stage::decoded; }
    void check_rests() const;          // the next decode would overwrite the rows of a round under way
    void check_rests(int slot) const;  // the same of a slot's round
    int verified_row(int slot, int i) const;
    int failure_of(int i) const;  // the code with which the sampler of ask i failed, or EAGLE3_OK

    void drop_draft();  // what is drafted is void: a slot changes, or time passes that is no part of a round
    void end_of(int slot);  // before the slot changes: its round ends, for all its slots
    void begin_other();     // before a decode that is no round's
    void abandon();         // none of its rows stay. Allocates nothing, so that it works without memory, too.

  private:
    void tell_threads(int n);
    void begin(slot_state & s, int32_t token);
    void prepare_memory();
    void lay_out();
    void lay_out_waiting(bool with_logits);
    void set_tree();
    bool knows_reach() const;
    void run(int n);
    void end();

    void begin_paths();
    void need_logits(int row);
    void read_ahead(int row);
    int sample_at(int row, llama_sampler * sampler, float & seconds);
    int sample_row(slot_round & r, llama_sampler * sampler, int32_t & token);
    void reach_now();
    int32_t sample_plain(llama_sampler * sampler);

    std::vector<int32_t> kept_path(const slot_round & r, int n) const;
    std::vector<kept_tokens> kept_of(const int32_t * keep) const;
    void keep_tree(const std::vector<kept_tokens> & kept);
    std::vector<kept_tokens> begin_commit(const int32_t * keep);
    void keep_rows(const kept_tokens & k);

    void learn(slot_state & s);
    void learn_undrafted(slot_state & s);
    void tell_planner(int n_tokens);

    slots & slots_;
    drafter & drafter_;
    planner & planner_;
    thread_policy threads_;
    row_times row_times_;
    bool chooses_threads_ = true;
    bool is_trial_        = false;  // the round tries another number of threads

    // These belong to the round, or to the last one.
    stage at_ = stage::none;
    std::vector<int> of_;
    std::vector<int32_t> slot_of_, row_of_;  // by row of the batch: its slot and its number there
    int n_copies_  = 0;                      // checkpoints taken or restored
    int n_waiting_ = 0;                      // rows in front of these that only bring the memory up
    std::vector<float> reach_;               // probability that verification gets to it
    bool whole_           = true;            // the decode computed the logits of all rows
    bool tree_            = false;
    bool sampled_         = false;  // the context still has the rows that verification sampled from
    float layers_seconds_ = 0.0f;
    float output_seconds_ = 0.0f;  // for the pieces computed so far
    int64_t told_         = 0;     // ggml_time_us() when the planner was last told of a round
};

}  // namespace eagle3
