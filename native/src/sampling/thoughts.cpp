#include "sampling/thoughts.hpp"

#include "error.hpp"
#include "target/pieces.hpp"
#include "sampling/sampler_kinds.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace eagle3 {

namespace {

const char BLANKS[] = " \t\r\n";

enum class place { before, inside, closing, behind };

struct thoughts {
    thoughts_settings settings;
    llama_sampler * grammar;
    place at = place::before;
    int n    = 0;      // tokens of these thoughts, or of the closing tag
    std::string text;  // since the last tag; of thoughts only what an end tag may begin in
    std::vector<std::pair<llama_token, size_t>> tokens;  // the text's, each with its bytes

    thoughts(thoughts_settings s, llama_sampler * g) : settings(std::move(s)), grammar(g) { begin(); }

    void begin() {
        text.clear();
        tokens.clear();
        at = place::before;
        if (settings.inside) {
            enter();
        }
    }

    void enter() {
        n  = 0;
        at = settings.budget == 0 ? place::closing : place::inside;
    }

    void tell_grammar(llama_token token) {
        if (grammar != nullptr) {
            llama_sampler_accept(grammar, token);
        }
    }

    // Drops the first bytes of the text. A token is dropped with its last byte.
    void drop(size_t n_bytes) {
        text.erase(0, n_bytes);
        while (!tokens.empty() && tokens.front().second <= n_bytes) {
            n_bytes -= tokens.front().second;
            tokens.erase(tokens.begin());
        }
        if (!tokens.empty()) {
            tokens.front().second -= n_bytes;
        }
    }
};

// Says whether a text does not end within a character.
bool is_whole(const std::string & text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
        const auto byte = (unsigned char) text[text.size() - back];
        if (byte >= 0xC0) {
            return back >= (byte >= 0xF0 ? 4u : byte >= 0xE0 ? 3u : 2u);
        }
        if (byte < 0x80) {
            return true;
        }
    }
    return true;
}

// Looks for the tag before thoughts: they begin behind it, or the text holds something else.
void look_before(thoughts & t) {
    t.drop(std::min(t.text.find_first_not_of(BLANKS), t.text.size()));
    const std::string & start = t.settings.start;
    const size_t have         = std::min(start.size(), t.text.size());
    if (t.text.compare(0, have, start, 0, have) != 0) {
        t.at = place::behind;
    } else if (have == start.size()) {
        t.drop(have);
        t.enter();
    }
}

// Looks for the first end tag. The grammar gets its tokens and those behind it.
void look_inside(thoughts & t) {
    size_t at = std::string::npos, size = 0, longest = 0;
    for (const auto & end : t.settings.ends) {
        const size_t found = t.text.find(end);
        longest            = std::max(longest, end.size());
        if (found < at) {
            at   = found;
            size = end.size();
        }
    }
    if (at == std::string::npos) {
        if (t.settings.budget >= 0 && t.n >= t.settings.budget && is_whole(t.text)) {
            t.n  = 0;
            t.at = place::closing;
        }
        const size_t kept = std::max<size_t>(longest, 4);  // a character has up to 4 bytes
        t.drop(t.text.size() - std::min(kept, t.text.size()));
        return;
    }
    t.drop(at);
    for (const auto & token : t.tokens) {
        t.tell_grammar(token.first);
    }
    t.drop(size);
    t.at = place::before;
    look_before(t);
}

const char * name(const llama_sampler *) {
    return "thoughts";
}

void accept(llama_sampler * s, llama_token token) {
    thoughts & t = *(thoughts *) s->ctx;
    if (t.at == place::closing) {
        t.tell_grammar(token);
        if (++t.n >= (int) t.settings.closing.size()) {
            t.text.clear();
            t.tokens.clear();
            t.at = place::before;
        }
        return;
    }
    const bool inside = t.at == place::inside;
    if (!inside) {
        t.tell_grammar(token);
    }
    if (t.at == place::behind) {
        return;
    }
    const std::string piece = piece_of(t.settings.vocab, token);
    t.text += piece;
    t.tokens.emplace_back(token, piece.size());
    t.n += inside;
    if (inside) {
        look_inside(t);
    } else {
        look_before(t);
    }
}

void apply(llama_sampler * s, llama_token_data_array * all) {
    const thoughts & t = *(const thoughts *) s->ctx;
    if (t.at == place::closing) {
        const llama_token next = t.settings.closing[t.n];
        for (size_t i = 0; i < all->size; ++i) {
            all->data[i].logit = all->data[i].id == next ? all->data[i].logit : -INFINITY;
        }
    } else if (t.grammar != nullptr && t.at != place::inside) {
        llama_sampler_apply(t.grammar, all);
    }
}

void reset(llama_sampler * s) {
    thoughts & t = *(thoughts *) s->ctx;
    t.begin();
    if (t.grammar != nullptr) {
        llama_sampler_reset(t.grammar);
    }
}

llama_sampler * clone(const llama_sampler * s);

void destroy(llama_sampler * s) {
    auto * t = (thoughts *) s->ctx;
    if (t->grammar != nullptr) {
        llama_sampler_free(t->grammar);
    }
    delete t;
}

llama_sampler_i table() {
    llama_sampler_i out = {};
    out.name            = name;
    out.accept          = accept;
    out.apply           = apply;
    out.reset           = reset;
    out.clone           = clone;
    out.free            = destroy;
    return out;
}

llama_sampler_i functions = table();

llama_sampler * clone(const llama_sampler * s) {
    const thoughts & t = *(const thoughts *) s->ctx;
    auto * copy        = new thoughts(t);
    copy->grammar      = t.grammar != nullptr ? llama_sampler_clone(t.grammar) : nullptr;
    return llama_sampler_init(&functions, copy);
}

}  // namespace

llama_sampler * make_thoughts(thoughts_settings settings, llama_sampler * grammar) {
    const auto is_empty = [](const std::string & tag) {
        return tag.empty();
    };
    const auto & ends = settings.ends;
    require(!settings.start.empty() && !ends.empty() && std::none_of(ends.begin(), ends.end(), is_empty),
        EAGLE3_E_ARGUMENT, "thoughts need a start tag and end tags");
    require(settings.budget < 0 || !settings.closing.empty(), EAGLE3_E_ARGUMENT,
        "a budget of thoughts needs the tokens that close them");
    return llama_sampler_init(&functions, new thoughts(std::move(settings), grammar));
}

bool holds_grammar(const llama_sampler * sampler) {
    return sampler->iface == &functions && ((const thoughts *) sampler->ctx)->grammar != nullptr;
}

const llama_sampler * grammar_behind_thoughts(const llama_sampler * sampler) {
    const auto * t = sampler->iface == &functions ? (const thoughts *) sampler->ctx : nullptr;
    return t && (t->at == place::before || t->at == place::behind) ? t->grammar : nullptr;
}

std::vector<llama_token> closing_tokens(const llama_sampler * sampler) {
    const auto * t = sampler->iface == &functions ? (const thoughts *) sampler->ctx : nullptr;
    if (t == nullptr || t->at != place::closing) {
        return {};
    }
    return {t->settings.closing.begin() + t->n, t->settings.closing.end()};
}

int lets_through(llama_sampler * chain, int i) {
    const llama_sampler * s = link(chain, i);
    return s->iface == sampler_kinds::known().greedy && link(chain, i + 1) ? 0 : lets_through(s);
}

int lets_through(const llama_sampler * sampler) {
    return sampler->iface == &functions && !holds_grammar(sampler) ? -1 : llama_sampler_lets_through(sampler);
}

}  // namespace eagle3
