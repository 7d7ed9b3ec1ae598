// Guarded C functions of llama.cpp do not throw: their callers are written in Python. Run under the
// sanitizers.
//     boundary_test TARGET.gguf
// Each function below is made to fail by what it is given, or by operator new, which fails at one place after
// the other. By itself it throws; guarded it logs that, and returns what its error is.
#include "check.hpp"
#include "replaced_new.hpp"

#include "eagle3.h"
#include "llama-ext.h"

#include <climits>
#include <cmath>
#include <memory>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

long failing = 0;  // the n-th request for memory from now on fails; 0: none
bool hit     = false;

void * take(size_t size) {
    if (failing > 0 && --failing == 0) {
        hit = true;
        return nullptr;
    }
    return malloc(size ? size : 1);
}

constexpr int NO_TOKEN    = 1 << 30;
constexpr int MOST_PLACES = 400;

bool throws = false;  // the evaluation of the next tensor

bool evaluated(ggml_tensor *, bool, void *) {
    if (throws) {
        throws = false;
        throw std::runtime_error("the callback's");
    }
    return false;
}

std::string logged;  // the last line

void log_line(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        logged = text;
    }
}

template <auto F> auto guarded(const char * name) {
    return (decltype(F)) eagle3_guarded(name, (void *) F);
}

// That F throws for what it is given, and guarded returns its error: f takes the function, and says whether
// it did.
template <auto F, typename Call> void fails(const char * name, Call && f) {
    bool threw = false;
    try {
        f(F);
    } catch (const std::exception &) {
        threw = true;
    }
    logged.clear();
    const bool returned = f(guarded<F>(name));
    const bool told     = logged.rfind(std::string(name) + ": ", 0) == 0;
    if (!threw || !returned || !told) {
        fprintf(stderr, "%s %s\n", name,
            !threw      ? "does not throw"
            : !returned ? "returned no error"
                        : "was not logged");
        exit(1);
    }
}

// That guarded F catches wherever it asks for memory and gets none: at some place it does.
template <auto F, typename Call> void runs_out(const char * name, Call && f) {
    const std::string line = std::string(name) + ": std::bad_alloc\n";
    const auto function    = guarded<F>(name);
    int n_caught           = 0;
    for (int place = 1; place <= MOST_PLACES; ++place) {
        logged.clear();
        hit     = false;
        failing = place;
        f(function);
        failing = 0;
        n_caught += logged == line;
        if (!hit) {
            break;
        }
    }
    if (n_caught == 0) {
        fprintf(stderr, "%s: no lack of memory reached it\n", name);
        exit(1);
    }
}

// In the expression the function's name is the function as it is, and guarded.
#define FAILS(f, ...) fails<f>(#f, [&](auto f) { return __VA_ARGS__; })
#define RUNS_OUT(f, ...) runs_out<f>(#f, [&](auto f) { __VA_ARGS__; })

// `n` alternatives at the root, or one rule down.
std::string alternatives(int n, bool nested) {
    std::string out = nested ? "root ::= \"x\" item\nitem ::= " : "root ::= ";
    for (int i = 0; i < n; ++i) {
        out += (i ? " | \"w" : "\"w") + std::to_string(i) + "\"";
    }
    return out;
}

constexpr const char * DOUBLES = "root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"d\"";

struct world {
    llama_model * model;
    llama_context * ctx;
    const llama_vocab * vocab;
    std::vector<llama_token_data> row;

    explicit world(const char * path)
        : model(llama_model_load_from_file(path, llama_model_default_params())) {
        CHECK(model != nullptr);
        vocab                  = llama_model_get_vocab(model);
        llama_context_params p = llama_context_default_params();
        p.n_ctx                = 64;
        p.n_batch              = 64;
        p.n_threads = p.n_threads_batch = 1;
        p.cb_eval                       = evaluated;
        ctx                             = llama_init_from_model(model, p);
        CHECK(ctx != nullptr);
    }
    ~world() {
        llama_free(ctx);
        llama_model_free(model);
    }

    int decode(decltype(llama_decode) * by = llama_decode) {
        llama_token token = 5;
        return by(ctx, llama_batch_get_one(&token, 1));
    }

    llama_token_data_array all() {
        row.clear();
        for (int i = 0; i < llama_vocab_n_tokens(vocab); ++i) {
            row.push_back({i, 0.0f, 0.0f});
        }
        return {row.data(), row.size(), -1, false};
    }

    int process(decltype(llama_process) * by) {
        llama_batch_ext * batch = llama_batch_ext_init(ctx);
        const llama_pos pos     = llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1;
        CHECK(llama_batch_ext_add_token(batch, 0, 5) == 0 && llama_batch_ext_set_pos(batch, 0, &pos));
        CHECK(llama_batch_ext_set_output_logits(batch, 0, true));
        const std::unique_ptr<llama_batch_ext, decltype(&llama_batch_ext_free)> owner(
            batch, llama_batch_ext_free);
        return by(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    }

    bool accept(llama_sampler * sampler, llama_token token, int n, decltype(llama_sampler_accept) * by) {
        for (int i = 0; i < n; ++i) {
            by(sampler, token);
        }
        return true;
    }

    int n_allowed(llama_sampler * sampler, decltype(llama_sampler_apply) * by = llama_sampler_apply) {
        auto cur = all();
        by(sampler, &cur);
        int n = 0;
        for (const auto & token : row) {
            n += std::isfinite(token.logit);
        }
        return n;
    }

    llama_token token_of(const char * text) {
        llama_token tokens[16];
        const int n = llama_tokenize(vocab, text, (int) strlen(text), tokens, 16, false, false);
        CHECK(n >= 1);
        return tokens[n - 1];
    }

    llama_sampler * grammar(
        const std::string & text, decltype(llama_sampler_init_grammar) * by = llama_sampler_init_grammar) {
        return by(vocab, text.c_str(), "root");
    }
};

void vocabulary(world & w) {
    char text[16];
    const llama_token none = NO_TOKEN;
    FAILS(llama_vocab_get_text, llama_vocab_get_text(w.vocab, none) == nullptr);
    FAILS(llama_vocab_get_score, std::isnan(llama_vocab_get_score(w.vocab, none)));
    FAILS(llama_vocab_get_attr, llama_vocab_get_attr(w.vocab, none) == LLAMA_TOKEN_ATTR_UNDEFINED);
    CHECK(!guarded<llama_vocab_is_control>("llama_vocab_is_control")(
        w.vocab, none));  // it does not look itself
    FAILS(llama_token_to_piece, llama_token_to_piece(w.vocab, none, text, 16, 0, true) == 0);
    FAILS(llama_detokenize, llama_detokenize(w.vocab, &none, 1, text, 16, false, true) == 0);
    llama_token tokens[64];
    const std::string words(60, 'a');
    RUNS_OUT(
        llama_tokenize, llama_tokenize(w.vocab, words.c_str(), (int) words.size(), tokens, 64, true, true));
}

void decoding(world & w) {
    CHECK(w.decode() == 0);
    FAILS(llama_decode, (throws = true, w.decode(llama_decode) == -3));
    FAILS(llama_process, (throws = true, w.process(llama_process) == -3));
    throws = false;
}

void grammars(world & w) {
    std::string wide = "root ::= a0";  // each rule doubles the ways, and may be empty
    for (int i = 0; i < 24; ++i) {
        const std::string n = std::to_string(i), next = std::to_string(i + 1);
        wide += "\na" + n + " ::= a" + next + " \"x\" | a" + next + " \"y\" | a" + next + " \"z\" | \"\"";
    }
    wide += "\na24 ::= \"w\"";
    FAILS(llama_sampler_init_grammar, w.grammar(wide, llama_sampler_init_grammar) == nullptr);
    const char * pattern = "(";
    FAILS(llama_sampler_init_grammar_lazy_patterns,
        llama_sampler_init_grammar_lazy_patterns(
            w.vocab, "root ::= \"a\"", "root", &pattern, 1, nullptr, 0) == nullptr);
    llama_sampler * doubles = w.grammar(DOUBLES);
    const llama_token a     = w.token_of("a");
    FAILS(llama_sampler_accept, w.accept(doubles, a, 30, llama_sampler_accept));
    llama_sampler_free(doubles);

    llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(chain, w.grammar("root ::= \"ab\""));
    llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    FAILS(llama_sampler_accept, w.accept(chain, w.token_of("b"), 1, llama_sampler_accept));
    FAILS(llama_sampler_apply, w.n_allowed(chain, llama_sampler_apply) == 0);  // it has refused a token
    CHECK(w.decode() == 0);
    FAILS(llama_sampler_sample, llama_sampler_sample(chain, w.ctx, -1) == LLAMA_TOKEN_NULL);
    llama_sampler_reset(chain);
    CHECK(w.n_allowed(chain) > 0);
    RUNS_OUT(llama_sampler_clone, llama_sampler_free(llama_sampler_clone(chain)));
    RUNS_OUT(llama_sampler_reset, llama_sampler_reset(chain));
    llama_sampler_reset(chain);
    CHECK(w.n_allowed(chain) > 0);
    RUNS_OUT(llama_sampler_apply, w.n_allowed(llama_sampler_chain_get(chain, 0), llama_sampler_apply));
    llama_sampler * other = llama_sampler_clone(chain);
    llama_sampler_copy(chain, other);
    llama_sampler_free(other);
    llama_sampler_free(chain);
}

// Many alternatives are no ambiguity.
void wide_grammars(world & w) {
    for (const bool nested : {false, true}) {
        for (const int n : {600, 5000}) {
            llama_sampler * grammar = w.grammar(alternatives(n, nested));
            CHECK(grammar != nullptr && w.n_allowed(grammar) > 0);
            for (const char * text : {"x", "w", "1", "2"}) {
                if (nested || text[0] != 'x') {
                    llama_sampler_accept(grammar, w.token_of(text));
                    CHECK(w.n_allowed(grammar) > 0);
                }
            }
            llama_sampler * copy = llama_sampler_clone(grammar);
            CHECK(w.n_allowed(copy) == w.n_allowed(grammar));
            llama_sampler_free(copy);
            llama_sampler_free(grammar);
        }
    }
}

void samplers(world & w) {
    const char * breakers[]         = {"\n"};
    const llama_logit_bias biases[] = {{3, 1.0f}, {4, 2.0f}};
    RUNS_OUT(llama_sampler_init_penalties,
        llama_sampler_free(llama_sampler_init_penalties(100, 1000, 1.1f, 0.1f, 0.1f)));
    RUNS_OUT(llama_sampler_init_dry,
        llama_sampler_free(llama_sampler_init_dry(w.vocab, 0.8f, 1.75f, 2, 64, breakers, 1)));
    RUNS_OUT(
        llama_sampler_init_logit_bias, llama_sampler_free(llama_sampler_init_logit_bias(100, 2, biases)));
    RUNS_OUT(llama_sampler_init_infill, llama_sampler_free(llama_sampler_init_infill(w.vocab)));
    llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler * added = llama_sampler_init_greedy();
    fails<llama_sampler_chain_add>("llama_sampler_chain_add", [&](auto add) {
        failing = 1;
        add(chain, added);
        failing = 0;
        return llama_sampler_chain_n(chain) == 0;
    });
    llama_sampler_chain_add(chain, added);
    llama_sampler_chain_add(chain, llama_sampler_init_dry(w.vocab, 0.8f, 1.75f, 2, 64, breakers, 1));
    llama_sampler_chain_add(chain, llama_sampler_init_penalties(100, 1000, 1.1f, 0.1f, 0.1f));
    llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(100, 2, biases));
    RUNS_OUT(llama_sampler_clone, llama_sampler_free(llama_sampler_clone(chain)));
    runs_out<llama_sampler_copy>("llama_sampler_copy", [&](auto copy) {
        const long later    = failing;
        failing             = 0;
        llama_sampler * old = llama_sampler_clone(chain);
        llama_sampler_accept(chain, 7);
        failing = later;
        copy(chain, old);
        failing = 0;
        llama_sampler_free(old);
    });
    llama_sampler_free(chain);
}

void models(world & w, const char * path) {
    char text[64];
    const std::string long_path = std::string(200, 'p') + "-00001-of-00002.gguf", key(100, 'k');
    const char * paths[]        = {path};
    llama_chat_message message  = {"user", "Some text that is longer than a short string holds."};
    const auto params           = llama_model_default_params();
    const std::string far_path  = std::string(99, '/') + path;
    FAILS(llama_load_mode_from_str, llama_load_mode_from_str("no such") == LLAMA_LOAD_MODE_AUTO);
    RUNS_OUT(llama_model_meta_val_str, llama_model_meta_val_str(w.model, key.c_str(), text, 64));
    RUNS_OUT(llama_model_desc, llama_model_desc(w.model, text, 64));
    RUNS_OUT(llama_model_chat_template, llama_model_chat_template(w.model, nullptr));
    RUNS_OUT(llama_chat_apply_template, llama_chat_apply_template("chatml", &message, 1, true, text, 64));
    RUNS_OUT(llama_split_prefix, llama_split_prefix(text, 64, long_path.c_str(), 0, 2));
    RUNS_OUT(llama_print_system_info, llama_print_system_info());
    RUNS_OUT(
        llama_model_load_from_file, llama_model_free(llama_model_load_from_file(far_path.c_str(), params)));
    RUNS_OUT(llama_model_load_from_splits, llama_model_free(llama_model_load_from_splits(paths, 1, params)));
    RUNS_OUT(llama_model_save_to_file, llama_model_save_to_file(w.model, "/no/such/folder/x.gguf"));
}

void states(world & w) {
    std::vector<uint8_t> state(llama_state_seq_get_size(w.ctx, 0) + 16, 0x7f);
    CHECK(llama_state_seq_set_data(w.ctx, state.data(), state.size(), 0) == 0);
    CHECK(llama_state_seq_load_file(w.ctx, "/no/such/file", 0, nullptr, 0, nullptr) == 0);
    CHECK(!llama_state_load_file(w.ctx, "/no/such/file", nullptr, 0, nullptr));
    llama_batch_ext * batch = nullptr;
    RUNS_OUT(llama_batch_ext_init, llama_batch_ext_free(llama_batch_ext_init(w.ctx)));
    batch = llama_batch_ext_init(w.ctx);
    RUNS_OUT(llama_batch_ext_add, llama_batch_ext_add(batch, 0));
    llama_batch_ext_free(batch);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: boundary_test TARGET.gguf\n");
        return 2;
    }
    llama_log_set(log_line, nullptr);
    world w(argv[1]);
    vocabulary(w);
    decoding(w);
    grammars(w);
    wide_grammars(w);
    samplers(w);
    models(w, argv[1]);
    states(w);
    puts("ok");
    return 0;
}
