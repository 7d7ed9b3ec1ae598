// A session is what a C handle stands for: slots, the drafter, the round and the planner. It says which calls
// are legal when.
#pragma once

#include "session/round.hpp"
#include "sampling/sampling.hpp"

#include <memory>
#include <string>
#include <vector>

namespace eagle3 {

class session {
  public:
    session(llama_context * ctx, const head * h, int n_slots);  // h may be null
    ~session();

    // Adds a source of drafts, before the first prompt. Throws E_ARGUMENT if there are too many, if it takes
    // passes, or if its name is taken.
    void add_source(std::unique_ptr<source> source) { slots_.add_source(std::move(source)); }
    // Drafts with this model, which outlives the session. See eagle3_session_use.
    void use(drafter_model & own);
    pass_source * passes() const { return slots_.passes(); }  // or null
    const char * source_name(int id) const { return slots_.source_name(id); }
    head_source & need_head() { return slots_.need_head(); }  // E_ARGUMENT without a head
    const slot_state & slot(int i) const { return slots_.at(i); }
    int n_past(int slot) const { return slots_.at(slot).n_past; }

    // These are the four steps of a round: see round.hpp.
    int draft(const std::vector<ask> & asks) { return round_.draft(asks); }
    void decode() { round_.decode(); }
    void verify(llama_sampler * const * samplers, int32_t * out, int32_t * counts, std::string & failure) {
        round_.verify(samplers, out, counts, failure);
    }
    void commit(const int32_t * keep) { round_.commit(keep); }
    void plain_rounds(const ask & a, llama_sampler * sampler, eagle3_run & run) {
        round_.plain_rounds(a, sampler, run);
    }
    const round & last_round() const { return round_; }
    int text_match(int slot, int32_t token) const;  // see text_source::match
    int n_forced(llama_sampler * sampler) const {
        return slots_.grammar() ? slots_.grammar()->n_forced(sampler) : 0;
    }
    void set_memory(int slot, std::shared_ptr<const text_memory> memory);

    int sample(llama_sampler * sampler, int row);
    void prefill(int slot, const int32_t * tokens, int n, bool all_logits);
    void rewind(int slot, int n_past);
    void settle(int slot);  // see slots::settle
    void reset(int slot, int n_past);
    void set_capture(bool on);
    bool can_tree();
    const char * tree_refusal() const;  // why not, null if it can
    eagle3_memory memory() const;

    int64_t state_size(int slot) const;
    void state_get(int slot, uint8_t * out) const;
    void state_set(int slot, const uint8_t * data, int64_t size);

    // The planner goes by these: times of the parts of a round, on this machine.
    const planner & plan() const { return planner_; }
    void set_plan(const costs & c);
    float measure_target(int slot, int n);
    void measure_threads(int slot);
    void choose_threads(bool on) { round_.choose_threads(on); }
    int threads() { return round_.threads().now(); }
    float measure_output(int n);
    float measure_back(int slot);
    float measure_head(int slot, int n) { return measure_passes(slot, n, false); }
    float measure_step(int slot, int n) { return measure_passes(slot, n, true); }

    void head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g,
        float * state, float * logits);
    const std::vector<float> & head_trace(
        int slot, const int32_t * tokens, const float * features, int n, const char * stage);

  private:
    float measure_passes(int slot, int n, bool ahead);
    kept_tokens decode_text(int slot, const int32_t * tokens, int n, bool all_logits);
    float timed_decode(int slot, int n);  // seconds of n rows after what the slot holds, which stays
    void compute_last(int slot, int n);
    void check_head_alone(int slot, const int32_t * tokens, int n);

    slots slots_;
    planner planner_;
    uint32_t n_timed_ = 0;  // rows of timed decodes so far
    drafter drafter_{slots_, planner_};
    round round_{slots_, drafter_, planner_};
};

}  // namespace eagle3
