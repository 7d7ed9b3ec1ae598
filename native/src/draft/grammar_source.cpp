#include "draft/grammar_source.hpp"

#include "target/pieces.hpp"
#include "sampling/sampler_kinds.hpp"
#include "sampling/thoughts.hpp"
#include "planner/tuning.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <utility>

namespace eagle3 {

namespace {

constexpr int MAX_TEXT = 256;  // bytes; more would be more tokens than a draft takes

std::vector<llama_token> tokenized(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> tokens(text.size() + 8);
    const int n = llama_tokenize(
        vocab, text.data(), (int) text.size(), tokens.data(), (int) tokens.size(), false, true);
    tokens.resize(std::max(n, 0));
    return tokens;
}

}  // namespace

std::string grammar_source::text_of(const std::vector<llama_token> & tokens) const {
    std::string text;
    for (const llama_token token : tokens) {
        text += piece_of(vocab_, token);
    }
    return text;
}

// Returns the tokens of a text within another one. Some vocabularies put a blank before a text; behind a line
// break they do not. Nothing is returned where neither gives the text itself.
std::vector<llama_token> grammar_source::tokens_of(const std::string & text) const {
    std::vector<llama_token> tokens = tokenized(vocab_, text);
    if (text_of(tokens) == text) {
        return tokens;
    }
    const size_t n_before = tokenized(vocab_, "\n").size();
    tokens                = tokenized(vocab_, "\n" + text);
    tokens.erase(tokens.begin(), tokens.begin() + (ptrdiff_t) std::min(n_before, tokens.size()));
    return text_of(tokens) == text ? tokens : std::vector<llama_token>();
}

grammar_source::forced grammar_source::forced_by(llama_sampler * sampler) const {
    llama_sampler * s = nullptr;
    for (int i = 0; sampler != nullptr && (s = link(sampler, i)) != nullptr; ++i) {
        if (std::vector<llama_token> closing = closing_tokens(s); !closing.empty()) {
            return {std::move(closing), false};
        }
        const bool is_grammar         = s->iface == sampler_kinds::known().grammar;
        const llama_sampler * grammar = is_grammar ? s : grammar_behind_thoughts(s);
        if (grammar != nullptr) {
            char text[MAX_TEXT];
            const int n = llama_sampler_forced_text(grammar, text, MAX_TEXT);
            return {n > 0 ? tokens_of(std::string(text, n)) : std::vector<llama_token>()};
        }
    }
    return {};
}

// Offers the tokens as a chain. The last one of a text may be another that goes on beyond what is forced.
void grammar_source::begin(draft_tree & g, const std::vector<int> & asks) {
    for (const int a : asks) {
        const auto & [tokens, as_text] = forced_[g.asks[a].slot];
        int node                       = -1;
        for (size_t i = 0; i < tokens.size() && (node < 0 || g.goes_on(g.nodes[node])); ++i) {
            const bool last = as_text && i + 1 == tokens.size();
            node            = g.offer(
                id, a, node, tokens[i], last ? grammar_prior::last_token : grammar_prior::other_tokens, 0);
        }
    }
}

}  // namespace eagle3
