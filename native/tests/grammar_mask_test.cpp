// Grammars that test the likeliest tokens only, and samplers that go on from the largest logits: what the
// samplers behind them get, bit for bit, is what they get from the whole vocabulary. Run under the
// sanitizers.
//     grammar_mask_test TARGET.gguf
//
// A sampler's functions stand in a table that all samplers of its kind share: here some count and record.
#include "check.hpp"
#include "error.hpp"
#include "sampling/sampling.hpp"
#include "sampling/thoughts.hpp"

#include "llama-ext.h"

#include <cmath>
#include <random>
#include <string>

namespace {

std::mt19937 rng(1);

int up_to(int most) {
    return (int) (rng() % most);
}

template <typename T> T pick(const std::vector<T> & of) {
    return of[up_to((int) of.size())];
}

using apply_fn = void (*)(llama_sampler *, llama_token_data_array *);

size_t n_tested = 0;                  // candidates that grammars looked at
size_t n_cut    = 0;                  // those that top-k cut
std::vector<llama_token_data> drawn;  // those from which the last token was drawn

apply_fn test_with_grammar, cut, draw;

void count_tests(llama_sampler * s, llama_token_data_array * all) {
    n_tested += all->size;
    test_with_grammar(s, all);
}
void count_cut(llama_sampler * s, llama_token_data_array * all) {
    n_cut += all->size;
    cut(s, all);
}
void record_draw(llama_sampler * s, llama_token_data_array * all) {
    drawn.assign(all->data, all->data + all->size);
    draw(s, all);
}

// Puts another function in place of a sampler's own, for all of its kind.
apply_fn hook(llama_sampler * one, apply_fn instead) {
    const apply_fn own = one->iface->apply;
    one->iface->apply  = instead;
    llama_sampler_free(one);
    return own;
}

const char * const JSON                  = R"(
root   ::= "{" space pair ("," space pair)* "}" space
pair   ::= string ":" space value
value  ::= ("true" | "false" | "null" | number | string | "[" space (value ("," space value)*)? "]") space
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)?
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt])* "\"" space
space  ::= | " " | "\n" [ \t]{0,20}
)";
const std::vector<const char *> GRAMMARS = {
    JSON,
    JSON,
    "root ::= [a-z ]+",
    "root ::= .*",
    R"(root ::= "yes" | "no" | " a0" | "perhaps")",
    R"(root ::= " " [a-z] [0-9]+ root?)",
    R"(root ::= ("é" | "€" | [^a-z])+)",
    "root ::= (!<[5]> [0-9]? <[70]>)+",
    "root ::= <[70]>",
    R"(root ::= s
       s ::= [a-z] s "b" | [a-z] s "c" | "d")",  // twice as many ways to read it with each letter
};

struct made {
    const llama_vocab * vocab;
    int n_vocab;

    // Logits that tests make. Most are numbers without order; some repeat themselves, or are not finite.
    void logits(float * x) const {
        const int kind    = up_to(8);
        const float scale = pick<float>({0.5f, 2, 5, 12});
        std::normal_distribution<float> normal(0.0f, scale);
        for (int i = 0; i < n_vocab; ++i) {
            x[i] = kind == 0 ? std::round(normal(rng)) : normal(rng);
        }
        for (int n = up_to(6); n > 0; --n) {  // some are far above the others
            x[up_to(n_vocab)] += scale * (float) (3 + up_to(9));
        }
        for (int n = kind == 1 ? n_vocab / 2 : 0; n > 0; --n) {
            x[up_to(n_vocab)] = -INFINITY;
        }
        const float odd = pick<float>({NAN, NAN, INFINITY, -INFINITY});
        for (int n = kind == 2 ? 1 + up_to(100) : 0; n > 0; --n) {
            x[up_to(n % 8 ? n_vocab : 100)] = odd;
        }
        for (int n = kind == 4 ? 1 + up_to(4) : 0; n > 0; --n) {
            x[up_to(n_vocab)] = INFINITY;
        }
        for (int n = kind == 3 ? 1 + up_to(90) : 0; n > 0; --n) {  // equal ones
            x[up_to(n_vocab)] = scale * 3;
        }
    }

    llama_sampler * bias() const {
        std::vector<llama_logit_bias> some;
        for (int n = 1 + up_to(40); n > 0; --n) {
            some.push_back({up_to(n_vocab), pick<float>({-INFINITY, -3, 2, 30})});
        }
        return llama_sampler_init_logit_bias(n_vocab, (int) some.size(), some.data());
    }

    // A grammar by itself, or in a sampler that waits for thoughts to end, or ends them.
    llama_sampler * grammar() const {
        llama_sampler * one = llama_sampler_init_grammar(vocab, pick(GRAMMARS), "root");
        if (up_to(4) > 0) {
            return one;
        }
        const std::vector<llama_token> closing = {up_to(n_vocab), up_to(n_vocab)};
        return eagle3::make_thoughts({vocab, "<", {"e", "\n"}, up_to(2) > 0, up_to(6) - 1, closing}, one);
    }

    // One of llama-cpp-python's chains, mostly; else samplers in another order.
    llama_sampler * chain(bool with_grammar) const {
        llama_sampler * all = llama_sampler_chain_init(llama_sampler_chain_default_params());
        const auto add      = [&](llama_sampler * s) {
            CHECK(s != nullptr);
            llama_sampler_chain_add(all, s);
        };
        const bool usual = up_to(3) > 0;
        if (up_to(3) == 0) {
            add(bias());
        }
        add(llama_sampler_init_penalties(n_vocab, up_to(70), pick<float>({1, 1, 1.1f, 0.7f}),
            pick<float>({0, 0, 0.5f, -0.5f}), pick<float>({0, 0, 1})));
        if (!usual && up_to(3) == 0) {
            add(pick<llama_sampler * (*)()>({[]() { return llama_sampler_init_top_k(50); },
                []() { return llama_sampler_init_top_p(0.9f, 1); },
                []() { return llama_sampler_init_temp(0.7f); }})());
        }
        if (with_grammar) {
            add(grammar());
        }
        if (up_to(5) == 0) {
            add(llama_sampler_init_greedy());
            if (up_to(3) == 0) {  // it selects, and this draws again, of all
                add(llama_sampler_init_dist(rng()));
            }
            return all;
        }
        if (!usual && up_to(4) == 0) {
            add(llama_sampler_init_temp(0.7f));
        }
        add(llama_sampler_init_top_k(pick<int>({40, 40, 40, 1, 2, 64, 300, 0})));
        if (!usual && up_to(3) == 0) {
            add(bias());
        }
        add(llama_sampler_init_typical(usual ? 1.0f : pick<float>({1, 0.5f, 0.9f}), 1));
        add(llama_sampler_init_top_p(pick<float>({1, 0.95f, 0.95f, 0.5f}), up_to(3)));
        add(llama_sampler_init_min_p(pick<float>({0, 0.05f, 0.05f, 0.4f}), up_to(3)));
        add(llama_sampler_init_temp(pick<float>({0.8f, 1, 0, 4})));
        add(!usual && up_to(4) == 0 ? llama_sampler_init_mirostat_v2(rng(), 5, 0.1f)
            : up_to(6) == 0         ? llama_sampler_init_greedy()
                                    : llama_sampler_init_dist(rng()));
        return all;
    }
};

struct rows {
    llama_context * ctx;
    made make;
    float * logits;

    // Returns the token that the product takes, or LLAMA_TOKEN_NULL where the sampler fails.
    int taken(llama_sampler * s) const {
        try {
            return eagle3::sample(ctx, s, -1);
        } catch (const std::runtime_error &) {
            return LLAMA_TOKEN_NULL;
        }
    }
    int taken_by_all(llama_sampler * s) const {
        try {
            return llama_sampler_sample(s, ctx, -1);
        } catch (const std::runtime_error &) {
            return LLAMA_TOKEN_NULL;
        }
    }
};

bool same_bits(const std::vector<llama_token_data> & a, const std::vector<llama_token_data> & b) {
    return std::equal(
        a.begin(), a.end(), b.begin(), b.end(), [](const llama_token_data & x, const llama_token_data & y) {
            return x.id == y.id && memcmp(&x.logit, &y.logit, sizeof(float)) == 0;
        });
}

// Each chain takes what its copy takes of the whole vocabulary, token after token. Returns the number of rows
// that it took.
int chains_agree(const rows & r, int n_chains, bool with_grammar) {
    int n_rows = 0;
    for (int i = 0; i < n_chains; ++i) {
        llama_sampler * mine = r.make.chain(with_grammar);
        llama_sampler * copy = llama_sampler_clone(mine);
        for (int j = 0; j < 12; ++j, ++n_rows) {
            r.make.logits(r.logits);
            drawn.clear();
            const int token                             = r.taken(mine);
            const std::vector<llama_token_data> mine_of = drawn;
            drawn.clear();
            const int expected = r.taken_by_all(copy);
            if (expected == LLAMA_TOKEN_NULL) {
                break;  // the grammar failed, perhaps at a token far down the order that was not wanted
            }
            CHECK(token == expected && same_bits(mine_of, drawn));
            if (llama_vocab_is_eog(r.make.vocab, token)) {
                break;
            }
        }
        llama_sampler_free(mine);
        llama_sampler_free(copy);
    }
    return n_rows;
}

// Returns the token's text if it is ASCII, else an empty one.
std::string ascii(const llama_vocab * vocab, int token) {
    char piece[64];
    const int n         = llama_token_to_piece(vocab, token, piece, sizeof(piece), 0, true);
    const bool is_ascii = std::all_of(piece, piece + std::max(n, 0), [](char c) { return c > 0; });
    return is_ascii ? std::string(piece, std::max(n, 0)) : "";
}

bool accepts(llama_sampler * grammar, int token) {
    llama_sampler * copy = llama_sampler_clone(grammar);
    bool accepted        = true;
    try {
        llama_sampler_accept(copy, token);
    } catch (const std::runtime_error &) {
        accepted = false;
    }
    llama_sampler_free(copy);
    return accepted;
}

// Where a text has gone on at random, a mask allows the tokens that the grammar accepts; of those that are
// ASCII, for it accepts part of any character. Returns how many it allowed and refused.
std::pair<int, int> masks_are_what_is_accepted(const made & make) {
    int n_allowed = 0, n_refused = 0;
    for (int i = 0; i < 60; ++i) {
        llama_sampler * grammar =
            llama_sampler_init_grammar(make.vocab, GRAMMARS[i % GRAMMARS.size()], "root");
        for (int length = up_to(20); length >= 0; --length) {
            std::vector<llama_token_data> all;
            for (int token = 0; token < make.n_vocab; ++token) {
                all.push_back({token, 0.0f, 0.0f});
            }
            llama_token_data_array row = {all.data(), all.size(), -1, false};
            try {
                llama_sampler_apply(grammar, &row);
            } catch (const std::runtime_error &) {
                break;  // it is too ambiguous here
            }
            tokens allowed;
            for (const llama_token_data & t : all) {
                if (t.logit == 0.0f && !llama_vocab_is_eog(make.vocab, t.id) &&
                    !ascii(make.vocab, t.id).empty()) {
                    allowed.push_back(t.id);
                }
            }
            for (int n = 0; n < 40; ++n) {
                const int token = allowed.empty() || up_to(3) > 0 ? up_to(make.n_vocab) : pick(allowed);
                if (!ascii(make.vocab, token).empty() && !llama_vocab_is_eog(make.vocab, token)) {
                    CHECK(accepts(grammar, token) == (all[token].logit == 0.0f));
                    ++(all[token].logit == 0.0f ? n_allowed : n_refused);
                }
            }
            if (allowed.empty()) {
                break;
            }
            llama_sampler_accept(grammar, pick(allowed));
        }
        llama_sampler_free(grammar);
    }
    return {n_allowed, n_refused};
}

// Returns how many tokens a grammar tests in a row, on average of 50 rows; without one, how many top-k gets.
double tests_of_a_row(
    const rows & r, const char * grammar, bool greedy, bool usual_logits, float penalty = 1.1f) {
    llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    const auto add        = [&](llama_sampler * s) {
        llama_sampler_chain_add(chain, s);
    };
    add(llama_sampler_init_penalties(r.make.n_vocab, 64, penalty, 0, 0));
    if (grammar != nullptr) {
        add(llama_sampler_init_grammar(r.make.vocab, grammar, "root"));
    }
    if (greedy) {
        add(llama_sampler_init_greedy());
    } else {
        add(llama_sampler_init_top_k(10));
        add(llama_sampler_init_typical(1, 1));
        add(llama_sampler_init_top_p(0.95f, 1));
        add(llama_sampler_init_min_p(0.05f, 1));
        add(llama_sampler_init_temp(0.8f));
        add(llama_sampler_init_dist(3));
    }
    n_tested = n_cut = 0;
    std::normal_distribution<float> normal(0.0f, 2.0f);
    for (int i = 0; i < 50; ++i) {
        for (int k = 0; k < r.make.n_vocab; ++k) {
            r.logits[k] = normal(rng);
        }
        for (int digit = '0'; usual_logits && digit <= '9'; ++digit) {
            r.logits[3 + digit] += 20;  // a model knows what is wanted
        }
        CHECK(r.taken(chain) != LLAMA_TOKEN_NULL);
    }
    llama_sampler_free(chain);
    return (double) (grammar != nullptr ? n_tested : n_cut) / 50;
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr);
    llama_context * ctx = make_context(model, 1, 256, 64, 64);
    int32_t first       = 5;
    CHECK(llama_decode(ctx, llama_batch_get_one(&first, 1)) == 0);
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const rows r              = {ctx, {vocab, llama_vocab_n_tokens(vocab)}, llama_get_logits_ith(ctx, -1)};

    test_with_grammar = hook(llama_sampler_init_grammar(nullptr, "", ""), count_tests);
    cut               = hook(llama_sampler_init_top_k(1), count_cut);
    draw              = hook(llama_sampler_init_dist(0), record_draw);
    CHECK(chains_agree(r, 1200, true) > 4000);
    CHECK(chains_agree(r, 400, false) > 4000);
    const auto [n_allowed, n_refused] = masks_are_what_is_accepted(r.make);
    CHECK(n_allowed > 1000 && n_refused > 1000);

    // many tokens are allowed; a few, that the model likes; a few, anywhere
    CHECK(tests_of_a_row(r, "root ::= [a-z0-9 ]*", true, false) < 10);
    CHECK(tests_of_a_row(r, "root ::= [a-z0-9 ]*", false, false) <= 64);
    CHECK(tests_of_a_row(r, "root ::= [0-9]+", true, true) < 10);
    CHECK(tests_of_a_row(r, "root ::= [0-9]+", false, true) <= 64);
    CHECK(tests_of_a_row(r, "root ::= [0-9]+", false, false) < 512 + r.make.n_vocab);
    CHECK(tests_of_a_row(r, nullptr, false, false, 1.0f) == 11);  // of 10 that it keeps
    CHECK(tests_of_a_row(r, nullptr, false, false, 1.1f) == 11 + 64);

    llama_free(ctx);
    llama_model_free(model);
    printf("ok\n");
}
