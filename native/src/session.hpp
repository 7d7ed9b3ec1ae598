// The state of the slots, and the four steps of a round over them.
#pragma once

#include "head_source.hpp"
#include "planner.hpp"
#include "source.hpp"

#include <memory>
#include <string>
#include <vector>

namespace eagle3 {

// Of a slot. With the token itself, a batch of which every row is computed as if it were alone.
constexpr int MAX_DRAFT = EAGLE3_MAX_DRAFT;
static_assert(MAX_DRAFT == MAX_ROWS - 1);

// How far a round is: see the table in eagle3.h.
enum class stage { none, drafted, decoded, verified };

// What the target has decoded of a slot, and the slot's part of a round.
struct slot_state {
    int n_past = 0;

    bool in_round = false, round_tree = false;
    std::vector<int32_t> round_tokens;   // token, then drafts
    std::vector<int32_t> round_parents;  // row that each row follows, -1 for the first
    std::vector<int32_t> round_path;     // rows that verification went through; before it, the first only
    std::vector<int32_t> round_at;       // each row's place in the batch, which other slots share

    // the last draft, level by level
    std::vector<int32_t> draft_tokens, draft_parents;  // parents: the draft token before it, -1 for none
    std::vector<float>
        draft_reach;  // expected: that verification gets to it; empty if the caller brought the draft
    std::vector<evidence_list> draft_evidence;  // empty like draft_reach
    trust_list trust;                           // in each source; follows the last few tokens

    struct first_token {
        int32_t token;
        evidence_list evidence;
    };
    std::vector<first_token> undrafted;  // what the sources offered, if nothing of it was drafted
    int32_t sampled = -1;                // the first token that verification sampled, -1 before it

    slot_state() { trust.fill(1.0f); }

    void clear_draft() {
        draft_tokens.clear();
        draft_parents.clear();
        draft_reach.clear();
        draft_evidence.clear();
        undrafted.clear();
    }
};

class session {
  public:
    session(llama_context * ctx, const head * h, int n_slots);  // h may be null
    ~session();

    // Adds a source of drafts, before the first prompt. E_ARGUMENT if there are MAX_SOURCES, or if it takes
    // passes.
    void add_source(std::unique_ptr<source> source);

    void set_capture(bool on);
    int n_past(int slot) const { return at(slot).n_past; }
    void rewind(int slot, int n_past);
    void reset(int slot, int n_past);
    void prefill(int slot, const int32_t * tokens, int n, bool all_logits);
    int sample(llama_sampler * sampler, int row);
    int verified_row(int slot, int i) const;
    bool can_tree();

    // The four steps of a round; a slot takes part at most once. Calls that are not legal at a stage of the
    // round throw E_ARGUMENT and change nothing: see the table in eagle3.h. draft returns the number of draft
    // tokens.
    // counts and keep have an entry for each slot, in the order of the asks. A count below 0 is the code of a
    // slot whose sampler failed, and failure holds its message; the other slots' tokens are good.
    int draft(const std::vector<ask> & asks);
    void decode();
    void verify(llama_sampler * const * samplers, int32_t * out, int32_t * counts, std::string & failure);
    void commit(const int32_t * keep);
    stage round_stage() const { return round_.at; }
    const std::vector<int> & round_slots() const { return round_.slots; }
    const slot_state & slot(int i) const { return at(i); }

    const planner & plan() const { return planner_; }
    void set_plan(const costs & c);
    head_source & need_head();  // E_ARGUMENT without a head

    float measure_target(int slot, int n);
    float measure_output(int n);
    float measure_head(int slot, int n);

    int64_t state_size(int slot) const;
    void state_get(int slot, uint8_t * out) const;
    void state_set(int slot, const uint8_t * data, int64_t size);

    void head_forward(int slot, const int32_t * tokens, const float * features, int n, float * g,
        float * state, float * logits);
    const std::vector<float> & head_trace(
        int slot, const int32_t * tokens, const float * features, int n, const char * stage);

  private:
    slot_state & at(int slot);
    const slot_state & at(int slot) const;
    void check_tokens(const int32_t * tokens, int n) const;
    bool under_way() const { return round_.at >= stage::decoded; }
    void check_rests() const;
    void check_slot_rests(int slot) const;
    void check_head_alone(int slot, const int32_t * tokens, int n);
    bool ready(int slot) const;
    kept_tokens run_batch(int slot, const int32_t * tokens, int n, bool all_logits);
    void run_rows(int n, const std::vector<int> & slots);
    void drop_rows(const std::vector<int> & slots);
    bool drop_from(int slot, int n_past);
    void drop_draft();
    void end_round_of(const slot_state & s);
    void end_round();
    void abandon_round();
    void tell(const kept_tokens & k);

    void begin_round(slot_state & s, int32_t token);
    void lay_out_rows();
    void set_tree(const std::vector<int32_t> & parents);
    void need_logits(int row);
    int sample_row(slot_state & s, llama_sampler * sampler, int32_t & token);
    void reach_now();
    std::vector<int32_t> kept_path(const slot_state & s, int n) const;
    std::vector<kept_tokens> kept_of(const int32_t * keep) const;
    void keep_tree(const std::vector<kept_tokens> & kept);
    void keep_rows(const kept_tokens & k);
    void learn(slot_state & s);
    void learn_undrafted(slot_state & s);
    void tell_planner(int n_tokens);

    int room(const ask & a, int n_asks) const;
    ask grown(ask a, int n_asks) const;
    void begin_growth(growth & g, const std::vector<ask> & asks);
    float first_pass_seconds(const growth & g, const std::vector<int> & asks) const;
    std::vector<int> fixed_front(const growth & g) const;
    std::vector<int> planned_front(const growth & g) const;
    int planned_room(const growth & g) const;
    std::vector<int> candidates(const growth & g, int most) const;
    std::vector<int> extensible(const growth & g, const std::vector<int> & candidates) const;
    void take_nodes(const growth & g, int ask, std::vector<int> order);
    void grow(growth & g);
    bool planner_drafts(const std::vector<ask> & asks);
    void catch_up(const std::vector<ask> & asks);
    std::vector<std::vector<int>> choose(const growth & g);
    void grow_drafts(std::vector<ask> asks);
    void check_asks(const std::vector<ask> & asks) const;
    void check_kind(const ask & a) const;

    llama_context * ctx_;
    llama_memory_t memory_;
    std::vector<std::unique_ptr<source>> sources_;
    head_source * head_ = nullptr;  // the first of them, or null
    int n_batch_, n_ctx_, n_vocab_;
    int most_rows_;  // of a round: they must fit a micro-batch, and MAX_ROWS
    std::vector<slot_state> slots_;
    llama_batch batch_;
    planner planner_;
    bool capture_ = true;  // of the next decode; the head follows when no round is under way

    // the round, or the last one
    struct {
        stage at = stage::none;
        std::vector<int> slots;
        std::vector<int32_t> slot_of, row_of;  // of each row of the batch, its slot and its number there
        std::vector<float> reach;              // probability that verification gets to it
        uint64_t done        = 0;              // rows whose logits are there, a bit each
        bool tree            = false;
        bool sampled         = false;  // the context still has the rows that verification sampled from
        float layers_seconds = 0.0f;
        float output_seconds = 0.0f;  // of the pieces computed so far
    } round_;

    // the last draft, until the planner learns how its round went
    struct {
        bool planned = false;
        int steps    = 0;
        float value = 0.0f, seconds = 0.0f;
        float passes_seconds = 0.0f;  // expected of the head's passes
        int64_t start        = 0;     // ggml_time_us()
    } draft_;
};

}  // namespace eagle3
