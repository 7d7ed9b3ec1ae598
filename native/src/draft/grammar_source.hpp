// This is a grammar as a source of drafts: the tokens of the text that it forces next, such as the keys,
// quotes and brackets of a tool's call. So is a budget of thoughts: the end tag that it forces.
#pragma once

#include "llama.h"
#include "draft/source.hpp"

#include <string>
#include <vector>

namespace eagle3 {

class grammar_source : public source {
  public:
    grammar_source(const llama_vocab * vocab, int n_slots) : vocab_(vocab), forced_(n_slots) {}

    static constexpr const char * NAME = "grammar";
    const char * name() const override { return NAME; }

    // Finds what a slot's sampler forces after the last token that it accepted; null: nothing. Call it before
    // each draft: it is read no more afterwards.
    void look(int slot, llama_sampler * sampler) { forced_[slot] = forced_by(sampler); }

    // Returns how many tokens the sampler forces next.
    int n_forced(llama_sampler * sampler) const { return (int) forced_by(sampler).tokens.size(); }

    bool ready(int slot) const override { return !forced_[slot].tokens.empty(); }
    void begin(draft_tree & g, const std::vector<int> & asks) override;

    // It has no state: what a grammar forces is in the sampler.
    void kept(const kept_tokens &) override {}
    void rewind(int, int) override {}
    void reset(int, int) override {}
    int64_t state_size(int) const override { return 0; }
    void save(int, int, uint8_t *) const override {}
    int64_t check(const uint8_t *, int64_t) const override { return 0; }
    void restore(int, int, const uint8_t *) override {}

  private:
    struct forced {
        std::vector<llama_token> tokens;
        bool as_text = true;  // the last token may be another that goes on beyond this text
    };

    forced forced_by(llama_sampler * sampler) const;
    std::vector<llama_token> tokens_of(const std::string & text) const;
    std::string text_of(const std::vector<llama_token> & tokens) const;

    const llama_vocab * vocab_;
    std::vector<forced> forced_;  // one for each slot
};

}  // namespace eagle3
