// Every call in every state of a round, and every call after every other, against the table in eagle3.h; run
// under the sanitizers.
//     states_test TARGET.gguf HEAD.gguf
#include "asks.hpp"

#include "llama-ext.h"
#include "check.hpp"

#include <functional>
#include <set>
#include <string>

namespace {

constexpr int N_SLOTS = 3, N_CTX = 256, N_PROMPT = 6;  // slots 0 and 1 are in the first round, slot 2 is not
constexpr int N_FEATURES = 3 * 64;                     // of the head that tests make

enum state { NONE, DRAFTED, DECODED, VERIFIED };

eagle3_costs some_costs() {
    eagle3_costs c = {};
    for (int n = 1; n <= 64; ++n) {
        c.layers[n] = 1e-3f * (1.0f + 0.01f * n);
        c.output[n] = 1e-4f * n;
        c.head[n]   = 1e-6f;
    }
    return c;
}

// The session, and what the table says of it.
struct world {
    llama_context * ctx;
    eagle3_head * head;
    eagle3_session * s     = nullptr;
    llama_sampler * greedy = llama_sampler_init_greedy();
    std::vector<tokens> text;

    state at = NONE;
    std::vector<int> slots;  // of the round
    tokens token;            // the one that each asked with
    std::set<int> sampled;   // slots of which eagle3_verified_row can tell
    bool planned   = false;
    eagle3_run run = {};

    world(llama_context * c, eagle3_head * h) : ctx(c), head(h) { open(); }
    ~world() {
        eagle3_session_close(s);
        llama_sampler_free(greedy);
    }

    void open() {
        llama_memory_clear(llama_get_memory(ctx), true);
        CHECK(eagle3_session_open(ctx, head, N_SLOTS, &s) == EAGLE3_OK);
        text.assign(N_SLOTS, {});
        at      = NONE;
        planned = false;
        slots.clear();
        sampled.clear();
    }

    bool in_round(int slot) const {
        return at >= DECODED && std::find(slots.begin(), slots.end(), slot) != slots.end();
    }

    void drop_draft() { at = at == DRAFTED ? NONE : at; }

    int verify() {
        std::vector<llama_sampler *> samplers(slots.size(), greedy);
        tokens out(64 * std::max<size_t>(slots.size(), 1)), counts(std::max<size_t>(slots.size(), 1));
        samplers.resize(std::max<size_t>(slots.size(), 1), greedy);
        const int rc = eagle3_round_verify(s, samplers.data(), out.data(), counts.data());
        for (size_t i = 0; i < slots.size() && rc == EAGLE3_OK; ++i) {
            CHECK(counts[i] >= 1);
        }
        return rc;
    }
};

// A call: its code, whether the table allows it now, and what it makes of the state where it is allowed.
struct call {
    std::string name;
    std::function<int64_t(world &)> run;
    std::function<bool(const world &)> legal;
    std::function<void(world &)> then;
};

bool always(const world &) {
    return true;
}

bool not_under_way(const world & w) {
    return w.at < DECODED;
}

std::function<bool(const world &)> unless_in_round(int slot) {
    return [=](const world & w) {
        return !w.in_round(slot);
    };
}

const std::function<void(world &)> nothing;  // what a call does that changes nothing

call draft_call(const std::string & name, const std::vector<eagle3_ask> & asks, bool needs_plan = false) {
    return {"draft " + name,
        [=](world & w) {
            tokens n(asks.size());
            return (int64_t) eagle3_round_draft(w.s, asks.data(), (int) asks.size(), n.data());
        },
        [=](const world & w) { return w.at < DECODED && (w.planned || !needs_plan); },
        [=](world & w) {
            w.at = DRAFTED;
            w.slots.clear();
            w.token.clear();
            w.sampled.clear();
            for (const eagle3_ask & a : asks) {
                w.slots.push_back(a.slot);
                w.token.push_back(a.token);
            }
        }};
}

// A run of two rounds without a draft, or of none, with a draft.
call run_call(bool drafts) {
    return {drafts ? "plain_rounds, drafted" : "plain_rounds",
        [=](world & w) {
            const int32_t wide[2] = {20, 21};
            const eagle3_ask a    = ask_given(0, 9, wide, drafts ? 2 : 0);
            w.run.n               = 2;
            w.run.seconds         = 1e6f;
            return (int64_t) eagle3_plain_rounds(w.s, &a, w.greedy, &w.run);
        },
        not_under_way,
        [=](world & w) {
            w.at      = drafts ? DRAFTED : NONE;
            w.slots   = {0};
            w.token   = {9};
            w.sampled = drafts ? std::set<int>() : std::set<int>{0};
            for (int i = 0; i < w.run.n_tokens; ++i) {
                w.text[0].push_back(i > 0 ? w.run.tokens[i - 1] : 9);
            }
        }};
}

std::vector<call> round_calls() {
    static const int32_t wide[3] = {20, 21, 22}, parents[3] = {-1, -1, 0}, ranks[3] = {0, 1, 0};
    std::vector<call> calls;
    calls.push_back(draft_call("chains", {ask_for(0, 9, EAGLE3_CHAIN, 4), ask_for(1, 11, EAGLE3_CHAIN, 2)}));
    calls.push_back(
        draft_call("trees", {ask_for(1, 11, EAGLE3_TREE, 6, 2, 3), ask_given(0, 9, wide, 3, parents)}));
    calls.push_back(draft_call("of another slot", {ask_choices(2, 13, parents, ranks, 3)}));
    calls.push_back(
        draft_call("planned", {ask_for(0, 9, EAGLE3_PLANNED, 8, 0, 2), ask_for(2, 7, EAGLE3_PLAIN)}, true));
    calls.push_back(run_call(false));
    calls.push_back(run_call(true));
    calls.push_back({"decode", [](world & w) { return (int64_t) eagle3_round_decode(w.s); },
        [](const world & w) { return w.at == DRAFTED; }, [](world & w) { w.at = DECODED; }});
    calls.push_back({"verify", [](world & w) { return (int64_t) w.verify(); },
        [](const world & w) { return w.at >= DECODED; },
        [](world & w) {
            w.at      = VERIFIED;
            w.sampled = {w.slots.begin(), w.slots.end()};
        }});
    for (const int keep : {0, 1}) {
        calls.push_back({"commit " + std::to_string(keep),
            [=](world & w) { return (int64_t) eagle3_round_commit(w.s, tokens(N_SLOTS, keep).data()); },
            always,
            [=](world & w) {
                for (size_t i = 0; i < w.slots.size() && w.at >= DECODED && keep; ++i) {
                    w.text[w.slots[i]].push_back(w.token[i]);
                }
                w.at = w.at >= DECODED ? NONE : w.at;
            }});
    }
    calls.push_back({"drafted",
        [](world & w) {
            int32_t out[63];
            return (int64_t) eagle3_round_drafted(w.s, 0, out, nullptr, nullptr, nullptr);
        },
        [](const world & w) { return w.at != NONE; }, nothing});
    for (const int slot : {0, 2}) {
        calls.push_back({"verified_row " + std::to_string(slot),
            [=](world & w) { return (int64_t) eagle3_verified_row(w.s, slot, 0); },
            [=](const world & w) { return w.sampled.count(slot) > 0; }, nothing});
    }
    calls.push_back({"failure", [](world & w) { return (int64_t) eagle3_round_failure(w.s, 0); },
        [](const world & w) { return !w.sampled.empty(); }, nothing});
    return calls;
}

void add_slot_calls(std::vector<call> & calls, int slot) {
    const std::string of = " " + std::to_string(slot);
    const auto add       = [&](const std::string & name, const std::function<int64_t(world &)> & run,
                               const std::function<bool(const world &)> & legal,
                               const std::function<void(world &)> & then) {
        calls.push_back({name + of, run, legal, then});
    };
    // what ends the slot's round, and its draft
    const auto ends = [=](world & w) {
        w.at = w.in_round(slot) ? NONE : w.at;
        w.drop_draft();
    };
    add(
        "prefill",
        [=](world & w) {
            const int32_t more[2] = {30, 31};
            return (int64_t) eagle3_prefill(w.s, slot, more, 2, 0);
        },
        not_under_way,
        [=](world & w) {
            w.drop_draft();
            w.sampled.clear();
            w.text[slot].insert(w.text[slot].end(), {30, 31});
        });
    add(
        "measure_target",
        [=](world & w) {
            float seconds = 0.0f;
            return (int64_t) eagle3_measure_target(w.s, slot, 3, &seconds);
        },
        not_under_way,
        [](world & w) {
            w.drop_draft();
            w.sampled.clear();
        });
    add(
        "measure_back",
        [=](world & w) {
            float seconds        = 1.0f;
            const int64_t status = eagle3_measure_back(w.s, slot, &seconds);
            return status < 0 || seconds == 0.0f ? status : (int64_t) EAGLE3_E_INTERNAL;  // rows are dropped
        },
        not_under_way,
        [](world & w) {
            w.drop_draft();
            w.sampled.clear();
        });
    add(
        "rewind",
        [=](world & w) { return (int64_t) eagle3_rewind(w.s, slot, (int) w.text[slot].size() - 1); }, always,
        [=](world & w) {
            ends(w);
            w.text[slot].pop_back();
        });
    add(
        "state_reset",
        [=](world & w) { return (int64_t) eagle3_state_reset(w.s, slot, (int) w.text[slot].size()); }, always,
        [=](world & w) {
            ends(w);
            w.sampled.erase(slot);
        });
    add(
        "state_set",
        [=](world & w) {
            std::vector<uint8_t> state(eagle3_state_size(w.s, slot));
            const int64_t n = eagle3_state_get(w.s, slot, state.data(), (int64_t) state.size());
            CHECK(n == (w.in_round(slot) ? (int64_t) EAGLE3_E_ARGUMENT : (int64_t) state.size()));
            return (int64_t) eagle3_state_set(w.s, slot, state.data(), (int64_t) state.size());
        },
        unless_in_round(slot),
        [=](world & w) {
            ends(w);
            w.sampled.erase(slot);
        });
    for (const bool traced : {false, true}) {
        add(
            traced ? "head_trace" : "head_forward",
            [=](world & w) {
                const int32_t two[2] = {5, 6};
                const std::vector<float> features(2 * N_FEATURES, 0.5f);
                std::vector<float> out(2 * 64);
                return traced ? eagle3_head_trace(w.s, slot, two, features.data(), 2, "g", out.data(), 2 * 64)
                              : eagle3_head_forward(
                                    w.s, slot, two, features.data(), 2, out.data(), nullptr, nullptr);
            },
            unless_in_round(slot), ends);
    }
    add(
        "measure_head",
        [=](world & w) {
            float seconds = 0.0f;
            return (int64_t) eagle3_measure_head(w.s, slot, 2, &seconds);
        },
        always, nothing);
    add(
        "n_past, state_size",
        [=](world & w) {
            CHECK(eagle3_state_size(w.s, slot) > 0);
            return (int64_t) eagle3_n_past(w.s, slot);
        },
        always, nothing);
}

std::vector<call> all_calls() {
    std::vector<call> calls = round_calls();
    add_slot_calls(calls, 0);
    add_slot_calls(calls, 2);
    for (const int on : {0, 1}) {
        calls.push_back({"set_capture " + std::to_string(on),
            [=](world & w) { return (int64_t) eagle3_session_set_capture(w.s, on); }, always,
            [](world &) {}});
        calls.push_back({"plan_set " + std::to_string(on),
            [=](world & w) {
                const eagle3_costs c = some_costs();
                return (int64_t) eagle3_plan_set(w.s, on ? &c : nullptr);
            },
            always, [=](world & w) { w.planned = on; }});
    }
    calls.push_back({"plan_get",
        [](world & w) {
            eagle3_plan_info info;
            return (int64_t) eagle3_plan_get(w.s, &info);
        },
        [](const world & w) { return w.planned; }, nothing});
    calls.push_back(
        {"can_tree", [](world & w) { return (int64_t) eagle3_can_tree(w.s); }, not_under_way, nothing});
    calls.push_back({"sample", [](world & w) { return (int64_t) eagle3_sample(w.s, w.greedy, -1); },
        // a measurement leaves the output matrix out, and so does a planned round
        [](const world & w) { return llama_has_logits_ith(w.ctx, -1); }, nothing});
    calls.push_back({"measure_output",
        [](world & w) {
            float seconds = 0.0f;
            return (int64_t) eagle3_measure_output(w.s, 1, &seconds);
        },
        always, nothing});
    calls.push_back({"close and open",
        [](world & w) {
            eagle3_session_close(w.s);
            for (int slot = 0; slot < N_SLOTS; ++slot) {  // the context is left with the kept rows alone
                CHECK(
                    llama_memory_seq_pos_max(llama_get_memory(w.ctx), slot) + 1 == (int) w.text[slot].size());
            }
            return (int64_t) eagle3_session_open(w.ctx, w.head, N_SLOTS, &w.s);
        },
        always,
        [](world & w) {
            w.at      = NONE;
            w.planned = false;
            w.sampled.clear();
            for (int slot = 0; slot < N_SLOTS; ++slot) {
                CHECK(eagle3_state_reset(w.s, slot, (int) w.text[slot].size()) == EAGLE3_OK);
            }
        }});
    return calls;
}

// The slots hold their prompts, and the round is as far as this. how: which draft of round_calls.
void bring_to(world & w, state at, const std::vector<call> & calls, int how, bool planned) {
    const eagle3_costs c = some_costs();
    if (w.at >= DECODED) {
        CHECK(eagle3_round_commit(w.s, tokens(N_SLOTS, 0).data()) == EAGLE3_OK);
    }
    CHECK(eagle3_session_set_capture(w.s, 1) == EAGLE3_OK);
    CHECK(eagle3_plan_set(w.s, planned ? &c : nullptr) == EAGLE3_OK);
    w.planned = planned;
    w.at      = NONE;
    w.slots.clear();
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        w.text[slot].clear();
        for (int i = 0; i < N_PROMPT; ++i) {
            w.text[slot].push_back(3 + (7 * slot + 5 * i) % 100);
        }
        CHECK(eagle3_rewind(w.s, slot, 0) == EAGLE3_OK);
        CHECK(eagle3_prefill(w.s, slot, w.text[slot].data(), N_PROMPT, 0) == EAGLE3_OK);
    }
    w.sampled.clear();
    const auto go = [&](const call & c) {
        CHECK(c.run(w) >= 0);
        c.then(w);
    };
    for (int i = 0; i < at; ++i) {
        go(i == 0 ? calls[how] : *std::find_if(calls.begin(), calls.end(), [&](const call & c) {
            return c.name == (i == 1 ? "decode" : "verify");
        }));
    }
    CHECK(w.at == at);
}

// Runs the call as the table has it. Whether it may have changed anything.
bool run(world & w, const call & c, const std::string & after) {
    const bool legal = c.legal(w);
    const int64_t rc = c.run(w);
    if (legal ? rc < 0 : rc != EAGLE3_E_ARGUMENT) {
        fprintf(stderr, "%s, then %s: %lld (%s)\n", after.c_str(), c.name.c_str(), (long long) rc,
            rc < 0 ? eagle3_last_error() : "expected to be refused");
        exit(1);
    }
    if (legal && c.then) {
        c.then(w);
    }
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        const int n     = (int) w.text[slot].size();
        const bool rows = w.in_round(slot);
        if (eagle3_n_past(w.s, slot) != n ||
            (!rows && llama_memory_seq_pos_max(llama_get_memory(w.ctx), slot) != n - 1)) {
            fprintf(stderr, "%s, then %s: slot %d holds %d, not %d\n", after.c_str(), c.name.c_str(), slot,
                eagle3_n_past(w.s, slot), n);
            exit(1);
        }
    }
    return legal && c.then;
}

// Each slot goes on as its text does when it is decoded alone, bit for bit, and drafts.
void check_usable(world & w, plain_decodes & plain, const std::string & after) {
    if (w.at >= DECODED) {
        CHECK(eagle3_round_commit(w.s, tokens(N_SLOTS, 0).data()) == EAGLE3_OK);
    }
    std::vector<eagle3_ask> asks;
    tokens n(N_SLOTS);
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        asks.push_back(ask_for(slot, 40 + slot, EAGLE3_TREE, 4, 2, 2));
    }
    CHECK(eagle3_round_draft(w.s, asks.data(), N_SLOTS, n.data()) >= 0);
    w.slots = {0, 1, 2};
    CHECK(eagle3_round_decode(w.s) == EAGLE3_OK && w.verify() == EAGLE3_OK);
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        tokens text = w.text[slot];
        text.push_back(40 + slot);
        if (!same_bits(w.ctx, eagle3_verified_row(w.s, slot, 0), plain.after(text, 1))) {
            fprintf(stderr, "%s: slot %d goes on with other logits\n", after.c_str(), slot);
            exit(1);
        }
    }
    w.at = DECODED;
}

// Every call after every other, from this state; rounds are chains and trees by turns. Pairs that change
// nothing share a state. Unless all are asked for, half of the pairs are tried in each state, each of them in
// two states, and whether the slots go on as they should is checked after every second one.
void every_pair(world & w, plain_decodes & plain, const std::vector<call> & calls, state at, bool all) {
    static const char * const names[] = {"none", "drafted", "decoded", "verified"};
    int n_pairs                       = 0;
    bool changed                      = true;
    for (size_t i = 0; i < calls.size(); ++i) {
        for (size_t k = all ? 0 : (i + at) % 2; k < calls.size(); k += all ? 1 : 2) {
            const call &first = calls[i], &second = calls[k];
            const int how           = n_pairs % 2;
            const std::string begin = std::string(names[at]) + " (" + calls[how].name + ")";
            if (changed) {
                bring_to(w, at, calls, how, how == 0 && n_pairs % 4 == 0);
            }
            changed = run(w, first, begin);
            changed = run(w, second, begin + ", " + first.name) || changed;
            if (changed && (all || (n_pairs + i) % 2 == 0)) {
                check_usable(w, plain, begin + ", " + first.name + ", " + second.name);
            }
            ++n_pairs;
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const bool all = argc == 4 && !strcmp(argv[3], "all");
    if (argc != 3 && !all) {
        fprintf(stderr, "usage: states_test TARGET.gguf HEAD.gguf [all]\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context * ctx = make_context(model, N_SLOTS, N_CTX, 64, 64);
    eagle3_head * head  = nullptr;
    CHECK(eagle3_head_open(argv[2], model, &head) == EAGLE3_OK);
    {
        world w(ctx, head);
        plain_decodes plain(model, N_CTX);
        const std::vector<call> calls = all_calls();
        for (const state at : {NONE, DRAFTED, DECODED, VERIFIED}) {
            every_pair(w, plain, calls, at, all);
        }
    }
    eagle3_head_close(head);
    llama_free(ctx);
    llama_model_free(model);
    puts("ok");
    return 0;
}
