// A sampler that knows when a model thinks: it ends thoughts that are too long, and keeps a lazy grammar from
// what is in them.
#pragma once

#include "llama.h"

#include <string>
#include <vector>

namespace eagle3 {

// Thoughts stand between two tags at the beginning of an answer. Behind them others may follow, with nothing
// but blanks between. The text of the tokens tells where they are, special tokens included.
struct thoughts_settings {
    const llama_vocab * vocab;
    std::string start;                 // the tag before thoughts, not empty
    std::vector<std::string> ends;     // the tags that end them, none empty; the grammar may begin with one
    bool inside;                       // the prompt ends within thoughts
    int budget;                        // most tokens between the tags; below 0: any number
    std::vector<llama_token> closing;  // what follows then: an end tag
};

// Makes the sampler, for llama_sampler_free. It takes the grammar, which may be null and sees no token of
// thoughts, but those with an end tag. Throws E_ARGUMENT for settings that do not fit.
llama_sampler * make_thoughts(thoughts_settings settings, llama_sampler * grammar);

// Says whether a sampler was made by make_thoughts, with a grammar.
bool holds_grammar(const llama_sampler * sampler);

// Returns the grammar of a sampler that was made by make_thoughts, which owns it; null without one, and
// within thoughts, which it does not constrain.
const llama_sampler * grammar_behind_thoughts(const llama_sampler * sampler);

// Returns the tokens that end the thoughts of a sampler that was made by make_thoughts, as far as they are
// still to come; none where their budget is not spent.
std::vector<llama_token> closing_tokens(const llama_sampler * sampler);

// Returns what llama_sampler_lets_through does; that knows nothing of make_thoughts, which without a grammar
// can only lower logits.
int lets_through(const llama_sampler * sampler);
// Returns the same of sampler number i of a chain: 0 for a greedy one with others behind it, to which it
// leaves all.
int lets_through(llama_sampler * chain, int i);

}  // namespace eagle3
