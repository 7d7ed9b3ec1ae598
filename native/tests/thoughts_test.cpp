// Thoughts that a tag or a budget ends, and a lazy grammar that sees nothing of them. Run under the
// sanitizers.
//     thoughts_test TARGET.gguf
//
// The vocabulary of tiny_models: a token for each byte, and some of a blank with a letter and a number.
#include "check.hpp"
#include "error.hpp"
#include "draft/grammar_source.hpp"
#include "sampling/thoughts.hpp"

#include "llama-ext.h"

#include <string>

namespace {

const llama_vocab * vocab;

llama_token of_byte(char c) {
    return 3 + (unsigned char) c;
}

tokens bytes(const std::string & text) {
    tokens out;
    for (const char c : text) {
        out.push_back(of_byte(c));
    }
    return out;
}

struct asked {
    const char * start             = "<t>";
    std::vector<const char *> ends = {"</t>"};
    int inside                     = 0;
    int budget                     = -1;
    tokens closing                 = bytes("</t>");
    bool lazy                      = true;
};

// A grammar that begins with "[call" and then allows "x" alone.
llama_sampler * make(const asked & a) {
    const char * pattern    = "\\[call";
    llama_sampler * grammar = !a.lazy ? nullptr
                                      : llama_sampler_init_grammar_lazy_patterns(vocab,
                                            "root ::= \"[call\" \"x\"+", "root", &pattern, 1, nullptr, 0);
    llama_sampler * out     = nullptr;
    CHECK(eagle3_thoughts(vocab, a.start, a.ends.data(), (int) a.ends.size(), a.inside, a.budget,
              a.closing.data(), (int) a.closing.size(), grammar, &out) == EAGLE3_OK);
    return out;
}

// Returns the only token that may come, of those that are ASCII: grammars take parts of odd characters too.
// -1 if all may.
int wanted(llama_sampler * s) {
    std::vector<llama_token_data> all;
    for (int i = of_byte(0); i < of_byte('\x80'); ++i) {
        all.push_back({i, 1.0f, 0.0f});
    }
    llama_token_data_array row = {all.data(), all.size(), -1, false};
    llama_sampler_apply(s, &row);
    int found = -1, n = 0;
    for (const auto & t : all) {
        found = t.logit == 1.0f ? t.id : found;
        n += t.logit == 1.0f;
    }
    CHECK(n == 1 || n == (int) all.size());
    return n == 1 ? found : -1;
}

// Takes the bytes of a text, all of which may come, and any other token too.
void write(llama_sampler * s, const std::string & text) {
    for (const llama_token token : bytes(text)) {
        CHECK(wanted(s) == -1);
        llama_sampler_accept(s, token);
    }
}

// Takes a text of which each byte is the only token that may come.
void forced(llama_sampler * s, const std::string & text) {
    for (const llama_token token : bytes(text)) {
        CHECK(wanted(s) == token);
        llama_sampler_accept(s, token);
    }
}

// The bytes of a text are also what the library says that comes, and what it drafts.
void foretold(llama_sampler * s, const std::string & text) {
    const eagle3::grammar_source source(vocab, 1);
    for (size_t n = 0; n < text.size(); ++n) {
        CHECK(eagle3::closing_tokens(s) == bytes(text.substr(n)));
        CHECK(source.n_forced(s) == (int) (text.size() - n));
        llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
        llama_sampler_chain_add(chain, llama_sampler_clone(s));
        CHECK(source.n_forced(chain) == (int) (text.size() - n));
        llama_sampler_free(chain);
        forced(s, text.substr(n, 1));
    }
    CHECK(eagle3::closing_tokens(s).empty());
}

// The rest of a test with a sampler, with its copy, and once more from the beginning.
template <typename F> void thrice(const asked & a, const std::string & first, F rest) {
    llama_sampler * s = make(a);
    write(s, first);
    llama_sampler * copy = llama_sampler_clone(s);
    rest(s);
    rest(copy);
    llama_sampler_reset(s);
    write(s, first);
    rest(s);
    llama_sampler_free(s);
    llama_sampler_free(copy);
}

void grammars_wait() {
    const auto is_bound = [](llama_sampler * s) {
        write(s, "[call");
        CHECK(wanted(s) == of_byte('x'));
    };
    const auto after_thoughts = [&](llama_sampler * s) {
        write(s, "a [call b < / </t");
        write(s, "> \n");
        is_bound(s);
    };
    thrice({}, " \n<t>", after_thoughts);
    thrice({}, "<t>one</t>\n<t>", after_thoughts);  // thoughts behind thoughts
    asked inside;
    inside.inside = 1;
    thrice(inside, "", after_thoughts);
    thrice({}, "", is_bound);
    thrice({}, "<tx", is_bound);
    thrice({}, "So: <t>", is_bound);  // a tag within the answer is text
    asked by_call;
    by_call.ends = {"</t>", "[call"};  // the call itself ends thoughts
    thrice(by_call, "<t>Hm. ", is_bound);
    thrice(by_call, "<t>Hm. ", [&](llama_sampler * s) {
        write(s, "[cal </t>");
        is_bound(s);
    });
    thrice({}, "[call", [&](llama_sampler * s) { forced(s, "xxx"); });
}

void budgets_end() {
    asked a;
    for (const bool lazy : {false, true}) {
        a.lazy          = lazy;
        a.budget        = 5;
        const auto ends = [&](llama_sampler * s) {
            CHECK(eagle3::closing_tokens(s).empty());
            write(s, "12345");
            foretold(s, "</t>");
            write(s, " The answer, and more of it.");
        };
        thrice(a, "<t>", ends);
        thrice(a, "<t>1</t><t>", ends);  // a budget of their own
        thrice(a, "<t>", [&](llama_sampler * s) { write(s, "1</t>12345678"); });
        thrice(a, "<t>", [&](llama_sampler * s) {
            write(s, "123\xE4\xB8\x96");  // a character becomes whole
            forced(s, "</t>");
        });
        thrice(a, "12345678 <t>", [&](llama_sampler * s) { write(s, "12345678"); });
        a.budget = 0;
        thrice(a, "<t>", [&](llama_sampler * s) { forced(s, "</t>"); });
        a.inside = 1;
        thrice(a, "", [&](llama_sampler * s) { forced(s, "</t>"); });
        a.inside = 0;
    }
}

void wrong_settings() {
    llama_sampler * out     = nullptr;
    const char * end        = "</t>";
    const llama_token close = 5, odd = 1 << 20;
    const auto is_wrong = [&](const char * start, const char * tag, int budget, const llama_token * ids,
                              int n) {
        CHECK(eagle3_thoughts(vocab, start, &tag, 1, 0, budget, ids, n, nullptr, &out) == EAGLE3_E_ARGUMENT);
    };
    is_wrong("", end, -1, &close, 1);
    is_wrong("<t>", "", -1, &close, 1);
    is_wrong("<t>", end, 3, nullptr, 0);
    is_wrong("<t>", end, 3, &odd, 1);
    is_wrong("<t>", end, 3, nullptr, 1);
    is_wrong(nullptr, end, 3, &close, 1);
    CHECK(eagle3_thoughts(nullptr, "<t>", &end, 1, 0, 3, &close, 1, nullptr, &out) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_thoughts(vocab, "<t>", nullptr, 0, 0, 3, &close, 1, nullptr, &out) == EAGLE3_E_ARGUMENT);
    CHECK(out == nullptr);
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only         = true;
    llama_model * model       = llama_model_load_from_file(argv[1], params);
    CHECK(model != nullptr);
    vocab = llama_model_get_vocab(model);
    grammars_wait();
    budgets_end();
    wrong_settings();
    llama_model_free(model);
    printf("ok\n");
    return 0;
}
