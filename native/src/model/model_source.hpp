// A small model as a source of drafts: chains, with the likeliest siblings as leaves.
#pragma once

#include "draft/source.hpp"
#include "model/drafter_model.hpp"
#include "target/target_memory.hpp"
#include "text/text_source.hpp"

#include <algorithm>
#include <vector>

namespace eagle3 {

// What a draft decoded stays in the model's memory where the target keeps it: these rows are not decoded
// twice. A prompt is read when the first draft wants it, so that a text that is never drafted for costs
// nothing.
//
// If a decode of the model fails, it drafts no more; the target goes on.
class model_source : public pass_source {
  public:
    model_source(drafter_model & own, const text_source & text);  // both outlive the source
    ~model_source() override;

    model_source(const model_source &)             = delete;
    model_source & operator=(const model_source &) = delete;

    static constexpr const char * NAME = "model";
    const char * name() const override { return NAME; }
    bool ready(int slot) const override;
    int n_pending(int slot) const override { return n_unread(slot) + 1; }
    void catch_up(int slot, int at_most) override;
    void begin(draft_tree & g, const std::vector<int> & asks) override;
    void extend(draft_tree & g, const std::vector<int> & nodes) override;
    int n_extensible(int ask) const override;

    void set_on(bool on) override { on_ = on; }
    float measure(int slot, int n_past, int n) override;
    bytes memory() const override;

    void kept(const kept_tokens & k) override;
    void rewind(int slot, int n_past) override;
    void reset(int slot, int n_past) override;

    // Nothing is saved: it reads the text again.
    int64_t state_size(int /* slot */) const override { return 0; }
    void save(int /* slot */, int /* n_past */, uint8_t * /* out */) const override {}
    int64_t check(const uint8_t * /* data */, int64_t /* size */) const override { return 0; }
    void restore(int slot, int n_past, const uint8_t * /* data */) override { reset(slot, n_past); }

    int64_t n_read() const { return n_read_; }      // rows of texts that were decoded for drafts
    int64_t n_reused() const { return n_reused_; }  // rows of drafts that stayed

  private:
    // This is what it has of a slot's text, which the source of texts knows. Its memory holds the tokens of
    // `from` up to read_to().
    struct seen {
        int from = 0;
        std::vector<int32_t> drafted;  // rows that the last draft decoded behind the text
        int n_answer = 0;              // tokens since the prompt
    };
    struct chain {        // belongs to an ask whose draft grows
        int tip    = -1;  // the node whose row was decoded last; -1: the ask's own token
        bool grows = false;
    };

    int read_to(int slot) const { return of_[slot].from + memory_.held(slot); }
    int n_unread(int slot) const { return std::max(text_.end(slot) - read_to(slot), 0); }
    void start_over(int slot, int pos);
    void add(int slot, int32_t token, int at, bool logits);
    bool run();
    bool fail();
    bool drop_draft(int slot);
    void read(int slot);
    void offer_children(draft_tree & g, int ask, int row, int parent);

    drafter_model & own_;
    const text_source & text_;
    llama_context * const ctx_;
    target_memory memory_;
    llama_batch batch_;
    const int n_batch_, n_ctx_;
    bool on_ = true, failed_ = false;
    std::vector<seen> of_;
    std::vector<chain> chains_;  // one for each ask
    int64_t n_read_ = 0, n_reused_ = 0;
};

}  // namespace eagle3
