// Random rounds against fresh decodes, damaged input and calls out of order; run under the sanitizers.
//     rounds_test TARGET.gguf HEAD.gguf SEED ROUNDS [chains]    chains: the target's memory holds no trees
#include "asks.hpp"
#include "check.hpp"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

static std::mt19937 rng;
static bool flash = false;  // attention
static bool trees =
    false;  // drafts that are trees among others: with flash attention, where the memory holds them

static int pick(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

static llama_context * new_context(llama_model * model, int n_seq) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = 256 * n_seq;
    p.n_batch              = 64;
    p.n_ubatch             = 24;  // prompts arrive in chunks
    p.n_seq_max            = n_seq;
    p.n_threads            = 1;  // two would wait for each other longer than they work
    p.n_threads_batch      = 1;
    p.flash_attn_type      = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return llama_init_from_model(model, p);
}

// The logits after text, from a context of its own.
static std::vector<float> fresh(llama_model * model, const std::vector<int32_t> & text) {
    llama_context * ctx = new_context(model, 1);
    llama_batch batch   = llama_batch_init(64, 0, 1);
    for (size_t at = 0; at < text.size(); at += 64) {
        batch.n_tokens = (int) std::min<size_t>(64, text.size() - at);
        for (int i = 0; i < batch.n_tokens; ++i) {
            batch.token[i]     = text[at + i];
            batch.pos[i]       = (int) at + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = at + i + 1 == text.size();
        }
        CHECK(llama_decode(ctx, batch) == 0);
    }
    const float * l = llama_get_logits_ith(ctx, -1);
    std::vector<float> out(l, l + llama_vocab_n_tokens(llama_model_get_vocab(model)));
    llama_batch_free(batch);
    llama_free(ctx);
    return out;
}

static void check_rows(llama_model * model, llama_context * ctx, int row, const std::vector<int32_t> & text) {
    const std::vector<float> expected = fresh(model, text);
    const float * got                 = llama_get_logits_ith(ctx, row);
    CHECK(memcmp(got, expected.data(), expected.size() * sizeof(float)) == 0);
}

static void wrong_calls(eagle3_session * s) {
    int32_t tokens[64] = {};
    CHECK(eagle3_prefill(s, 0, nullptr, 1, 0) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_prefill(s, 0, tokens, 0, 0) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_prefill(s, 0, tokens, 65, 0) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_prefill(s, -1, tokens, 1, 0) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_prefill(s, 7, tokens, 1, 0) == EAGLE3_E_ARGUMENT);
    tokens[0] = 1 << 30;
    CHECK(eagle3_prefill(s, 0, tokens, 1, 0) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_for(0, 5, EAGLE3_CHAIN, 64)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_for(0, -5, EAGLE3_CHAIN, 4)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_given(0, 5, nullptr, 2)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_for(0, -1, EAGLE3_PLAIN)) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_rewind(s, 0, eagle3_n_past(s, 0) + 1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_rewind(s, 0, -1) == EAGLE3_E_ARGUMENT);
    CHECK(commit(s, 3) == EAGLE3_OK);  // no round under way
    const int32_t parents[3] = {-1, 0, -1}, ahead[1] = {0}, ranks[1] = {99}, text[3] = {5, 6, 7};
    float seconds = 0.0f;
    eagle3_plan_info info;
    CHECK(draft(s, ask_given(0, 5, text, 3, parents)) == EAGLE3_E_ARGUMENT);  // levels out of order
    CHECK(draft(s, ask_given(0, 5, text, 1, ahead)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_given(0, 5, tokens, 1)) == EAGLE3_E_ARGUMENT);  // not in the vocabulary
    CHECK(draft(s, ask_given(0, 5, text, 64)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_for(0, 5, EAGLE3_TREE, 64, 2, 2)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_for(0, 5, EAGLE3_TREE, 8, 2, 17)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_choices(0, 5, parents, ranks, 1)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_choices(0, 5, ahead, ahead, 1)) == EAGLE3_E_ARGUMENT);
    CHECK(draft(s, ask_for(0, 5, EAGLE3_PLANNED, 8, 0, 2)) == EAGLE3_E_ARGUMENT);  // no costs yet
    CHECK(eagle3_plan_get(s, &info) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_verified_row(s, 0, 9) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_measure_target(s, 0, 65, &seconds) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_measure_target(s, 0, 4, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_n_past(nullptr, 0) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_state_reset(s, 0, 5) == EAGLE3_E_ARGUMENT);  // the target holds nothing
    for (llama_sampler * sampler : {llama_sampler_init_greedy(), llama_sampler_init_dist(3)}) {
        const int32_t token = 5;
        CHECK(eagle3_prefill(s, 0, &token, 1, 0) == EAGLE3_OK);
        for (const int row : {1, 7, 1 << 30, -2, -(1 << 30)}) {  // there is one row
            CHECK(eagle3_sample(s, sampler, row) == EAGLE3_E_ARGUMENT);
        }
        CHECK(eagle3_sample(s, sampler, 0) >= 0 && eagle3_rewind(s, 0, 0) == EAGLE3_OK);
        llama_sampler_free(sampler);
    }
    eagle3_session_close(nullptr);
    eagle3_head_close(nullptr);
}

// Drafts of every kind, and a prompt and a round after them, whatever the state says: any code will do, but
// no wild access.
static void use_state(eagle3_session * s, int slot) {
    static const int32_t shape[3] = {-1, 0, 0}, ranks[3] = {0, 0, 1};
    const int32_t text[3]    = {5, 6, 7};
    const eagle3_ask kinds[] = {ask_for(slot, 9, EAGLE3_CHAIN, 8), ask_for(slot, 9, EAGLE3_TREE, 12, 3, 3),
        ask_choices(slot, 9, shape, ranks, 3), ask_for(slot, 9, EAGLE3_PLANNED, 12)};
    draft(s, kinds[pick(0, 3)]);
    if (decode(s, ask_given(slot, 9, text, pick(0, 3))) == EAGLE3_OK) {
        CHECK(commit(s, 1) == EAGLE3_OK);
    }
    eagle3_prefill(s, slot, text, 3, 0);
    draft(s, ask_for(slot, 9, EAGLE3_CHAIN, 8));
}

// A state as its writer would make it, but for what it says: fields from anywhere in reach, and as many bytes
// as follow from them.
static std::vector<uint8_t> crafted_state(const std::vector<uint8_t> & state, size_t row) {
    int32_t f[10];  // version, n_embd_kv, n_features, n_past, head_from, head_n, pending_pos, n_pending,
                    // n_pending_tokens, n_blocks
    memcpy(f, state.data() + 8, sizeof(f));
    const auto some = [](int32_t & x) {
        x = pick(0, 1) ? pick(-3, 260) : x + pick(-3, 3);
    };
    for (int n = pick(1, 4); n > 0; --n) {
        some(f[pick(3, 8)]);
    }
    if (pick(0, 1)) {  // in order at least, as far as each by itself can be told
        f[3] = pick(0, 256);
        f[5] = pick(0, f[3]);
        f[4] = pick(0, f[5]);
        f[6] = pick(0, f[3]);
        f[7] = std::min(pick(0, 40), f[3] - f[6]);
        f[8] = std::max(0, f[7] - pick(0, 1));
    }
    const int64_t size = 48 + 4 * (int64_t) f[8] + 4 * (int64_t) f[7] * f[2] + (int64_t) row * (f[5] - f[4]);
    std::vector<uint8_t> out(std::clamp<int64_t>(size, 48, 1 << 22), 0);
    memcpy(out.data(), state.data(), 8);
    memcpy(out.data() + 8, f, sizeof(f));
    for (size_t i = 48 + 4 * (size_t) std::clamp(f[8], 0, 1000); i < out.size(); ++i) {
        out[i] = state[std::min(i, state.size() - 1)];
    }
    return out;
}

static std::vector<uint8_t> flipped_state(std::vector<uint8_t> state) {
    const int last = pick(0, 1) ? 47 : (int) state.size() - 1;  // the header, or all of it
    for (int n = pick(1, 4); n > 0; --n) {
        state[pick(0, last)] ^= (uint8_t) pick(1, 255);
    }
    return state;
}

// Of a slot with features that wait. It holds what it held afterwards.
static void damaged_states(llama_context * ctx, eagle3_session * s, int slot, int n_states) {
    std::vector<uint8_t> state(eagle3_state_size(s, slot));
    CHECK(eagle3_state_get(s, slot, state.data(), (int64_t) state.size() - 1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_state_get(s, slot, state.data(), (int64_t) state.size()) == (int64_t) state.size());
    CHECK(eagle3_state_set(s, slot, state.data(), (int64_t) state.size() - 1) == EAGLE3_E_FORMAT);
    CHECK(eagle3_state_set(s, slot, state.data(), 20) == EAGLE3_E_FORMAT);
    int32_t f[10];
    memcpy(f, state.data() + 8, sizeof(f));
    const size_t cells = (size_t) (f[5] - f[4]);
    const size_t row   = cells ? (state.size() - 48 - 4 * (size_t) f[8] - 4 * (size_t) f[7] * f[2]) / cells
                               : 4 * (size_t) f[1] * f[9];
    const int n_past   = eagle3_n_past(s, slot);
    std::vector<uint8_t> target(llama_state_seq_get_size(ctx, slot));
    CHECK(llama_state_seq_get_data(ctx, target.data(), target.size(), slot) == target.size());
    int n_accepted = 0;
    for (int i = 0; i < n_states; ++i) {
        const std::vector<uint8_t> bad = pick(0, 1) ? crafted_state(state, row) : flipped_state(state);
        const int code                 = eagle3_state_set(s, slot, bad.data(), (int64_t) bad.size());
        CHECK(code == EAGLE3_OK || code == EAGLE3_E_FORMAT);
        CHECK(eagle3_n_past(s, slot) >= 0 && eagle3_n_past(s, slot) <= 256);
        if (code == EAGLE3_OK) {
            ++n_accepted;
            use_state(s, slot);
            llama_memory_seq_rm(llama_get_memory(ctx), slot, -1, -1);
            CHECK(llama_state_seq_set_data(ctx, target.data(), target.size(), slot) == target.size());
            CHECK(eagle3_state_set(s, slot, state.data(), (int64_t) state.size()) == EAGLE3_OK);
        }
        CHECK(eagle3_n_past(s, slot) == n_past);
    }
    CHECK(n_states < 100 || n_accepted > 0);
}

// Thousands of them, on a slot with a few features that wait, behind a text of which the head saw all, or the
// end only.
static void many_damaged_states(llama_context * ctx, eagle3_session * s, int n_states) {
    std::vector<int32_t> text(30, 7);
    CHECK(eagle3_rewind(s, 0, 0) == EAGLE3_OK);
    for (const int part : {0, 1}) {
        CHECK(eagle3_session_set_capture(s, part == 0) == EAGLE3_OK);
        CHECK(eagle3_prefill(s, 0, text.data(), (int) text.size(), 0) == EAGLE3_OK);
        CHECK(eagle3_session_set_capture(s, 1) == EAGLE3_OK);
        for (int i = 0; i < 3; ++i) {
            CHECK(decode(s, ask_given(0, 11 + i, text.data(), 1)) == EAGLE3_OK);
            CHECK(commit(s, 2) == EAGLE3_OK);
        }
        damaged_states(ctx, s, 0, n_states / 2);
    }
    CHECK(eagle3_rewind(s, 0, 0) == EAGLE3_OK);
}

// Costs as measured, so that measuring is run too, with the head nearly for nothing: the planner drafts.
static void plan(eagle3_session * s) {
    int32_t prompt[20] = {5, 6, 7};
    CHECK(eagle3_prefill(s, 0, prompt, 20, 0) == EAGLE3_OK);
    eagle3_costs c = {};
    for (int n = 1; n <= 64; ++n) {
        const int m = std::min(n, 16);
        CHECK(eagle3_measure_target(s, 0, m, &c.layers[n]) == EAGLE3_OK);
        CHECK(m == 1 || eagle3_measure_output(s, m, &c.output[n]) == EAGLE3_OK);
        CHECK(eagle3_measure_head(s, 0, m, &c.head[n]) == EAGLE3_OK);
        c.layers[n] = 1e-3f * (1.0f + 0.01f * n);
        c.head[n]   = 1e-6f;
    }
    CHECK(eagle3_rewind(s, 0, 0) == EAGLE3_OK);
    CHECK(eagle3_plan_set(s, &c) == EAGLE3_OK);
    c.head[3] = -1.0f;
    CHECK(eagle3_plan_set(s, &c) == EAGLE3_E_ARGUMENT);
}

struct round_draft {
    int n     = 0;
    bool tree = false;  // the round is a tree: it keeps rows that verification went through
    int32_t tokens[64], parents[64];
    float probs[64];
};

static eagle3_ask random_ask(int slot, int32_t token) {
    static const int32_t parents[6] = {-1, -1, 0, 0, 1, 2}, ranks[6] = {0, 1, 0, 2, 0, 1};
    const float p_min = pick(0, 3) == 0 ? 0.02f : 0.0f;
    eagle3_ask a = ask_for(slot, token, pick(EAGLE3_PLAIN, EAGLE3_CHOICES - !trees), pick(0, 20), pick(1, 4),
        trees ? pick(1, 4) : 1, p_min);
    a.parents    = parents;
    a.ranks      = ranks;
    a.n          = pick(0, 6);
    a.n_min      = a.kind == EAGLE3_CHAIN ? pick(0, 3) : 0;
    return a;
}

// Of the head's, in one of its ways, or made up; the round is drafted.
static round_draft make_draft(eagle3_session * s, int slot, int32_t token, int room, int n_vocab) {
    round_draft d;
    const eagle3_ask a = random_ask(slot, token);
    d.n                = draft(s, a, d.tokens, d.parents, d.probs);
    if (room == 0) {
        CHECK(d.n == EAGLE3_E_ARGUMENT);
        return d;
    }
    CHECK(d.n >= 0 && (a.kind != EAGLE3_CHAIN || d.n == 0 || d.n >= a.n_min));
    CHECK(a.kind != EAGLE3_CHOICES || d.n == 0 || d.n == std::min(a.n, room - 1));
    for (int i = 0; i < d.n; ++i) {
        CHECK(d.tokens[i] >= 0 && d.tokens[i] < n_vocab && d.probs[i] > 0.0f && d.probs[i] <= 1.0001f);
        CHECK(d.parents[i] >= -1 && d.parents[i] < i);
        CHECK(a.kind != EAGLE3_CHOICES || d.parents[i] == a.parents[i]);
    }
    if (d.n == 0) {
        const bool tree = trees && pick(0, 1);
        const int n     = pick(0, 5);
        for (int i = 0; i < n; ++i) {
            d.tokens[i]  = pick(3, n_vocab - 1);
            d.parents[i] = i < 2 ? -1 : pick(0, 1);
        }
        d.n = draft(s, ask_given(slot, token, d.tokens, n, tree ? d.parents : nullptr), d.tokens, d.parents);
        CHECK(d.n == std::min(n, room - 1));
    }
    for (int i = 0; i < d.n; ++i) {
        d.tree = d.tree || d.parents[i] != i - 1;
    }
    return d;
}

// One slot: random drafts, some right, some of the head's, random acceptance; logits are a fresh decode's,
// bit for bit.
static void rounds(llama_model * model, llama_context * ctx, eagle3_session * s, int n_slots, int n_rounds) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<std::vector<int32_t>> text(n_slots);
    llama_sampler * greedy = llama_sampler_init_greedy();
    for (int r = 0; r < n_rounds; ++r) {
        const int slot           = pick(0, n_slots - 1);
        std::vector<int32_t> & t = text[slot];
        const int n_past         = eagle3_n_past(s, slot);
        CHECK(n_past == (int) t.size());
        if (n_past == 0 || pick(0, 9) == 0) {
            std::vector<int32_t> prompt(pick(1, 60));
            for (int32_t & id : prompt) {
                id = pick(3, n_vocab - 1);
            }
            if (n_past + (int) prompt.size() > 250) {
                CHECK(eagle3_prefill(s, slot, prompt.data(), 64, 0) < 0 || n_past + 64 <= 256);
                CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
                t.clear();
            }
            CHECK(eagle3_prefill(s, slot, prompt.data(), (int) prompt.size(), pick(0, 1)) == EAGLE3_OK);
            t.insert(t.end(), prompt.begin(), prompt.end());
            continue;
        }
        if (pick(0, 7) == 0) {
            const int keep = pick(0, n_past);
            CHECK(eagle3_rewind(s, slot, keep) == EAGLE3_OK);
            t.resize(keep);
            continue;
        }
        if (pick(0, 30) == 0) {
            CHECK(eagle3_session_set_capture(s, pick(0, 1)) == EAGLE3_OK);
        }
        const int32_t token = pick(3, n_vocab - 1);
        const round_draft d = make_draft(s, slot, token, 256 - n_past, n_vocab);
        if (n_past >= 256) {
            CHECK(eagle3_round_decode(s) == EAGLE3_E_ARGUMENT);  // full
            CHECK(eagle3_rewind(s, slot, 10) == EAGLE3_OK);
            t.resize(10);
            continue;
        }
        CHECK(eagle3_round_decode(s) == EAGLE3_OK);
        CHECK(eagle3_round_decode(s) == EAGLE3_E_ARGUMENT);  // a round is under way
        int32_t out[64];
        const int sampled = verify(s, greedy, out);
        CHECK(sampled >= 1 && sampled <= d.n + 1);
        // not what verification says: bookkeeping must hold for any; of a tree, the rows that it went through
        const int keep            = pick(0, d.tree ? sampled : d.n + 1);
        std::vector<int32_t> upto = t;
        if (keep > 0) {
            upto.push_back(token);
            upto.insert(upto.end(), d.tree ? out : d.tokens, (d.tree ? out : d.tokens) + keep - 1);
        }
        if (keep > 0 && keep <= sampled && pick(0, 7) == 0) {
            const int row = eagle3_verified_row(s, slot, keep - 1);
            CHECK(row >= keep - 1);
            check_rows(model, ctx, row, upto);
        }
        CHECK(commit(s, keep) == EAGLE3_OK);
        t = upto;
        if (pick(0, 20) == 0) {
            damaged_states(ctx, s, slot, 40);
        }
    }
    llama_sampler_free(greedy);
}

// Greedy decoding goes without a list of candidates: the same token, among equals, infinities and NaN too,
// whatever stands before it in the chain.
static void greedy_rows(llama_context * ctx, eagle3_session * s) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));
    const int n_vocab         = llama_vocab_n_tokens(vocab);
    const int32_t token       = 5;
    CHECK(eagle3_prefill(s, 0, &token, 1, 1) == EAGLE3_OK);
    float * logits   = llama_get_logits_ith(ctx, -1);
    const auto chain = [&](std::vector<llama_sampler *> parts) {
        llama_sampler * c = llama_sampler_chain_init(llama_sampler_chain_default_params());
        for (llama_sampler * part : parts) {
            llama_sampler_chain_add(c, part);
        }
        return c;
    };
    const llama_logit_bias bias = {7, 100.0f};
    const auto off              = [&]() {
        return llama_sampler_init_penalties(n_vocab, 64, 1.0f, 0.0f, 0.0f);
    };
    const auto penalty = [&]() {
        return llama_sampler_init_penalties(n_vocab, 64, 1.5f, 0.5f, 0.5f);
    };
    const auto greedy                                         = llama_sampler_init_greedy;
    const std::vector<std::function<llama_sampler *()>> kinds = {
        greedy,
        [&]() { return chain({greedy()}); },
        [&]() { return chain({off(), greedy()}); },
        [&]() { return chain({penalty(), greedy()}); },
        [&]() { return chain({off(), llama_sampler_init_logit_bias(n_vocab, 1, &bias), greedy()}); },
        [&]() { return chain({llama_sampler_init_top_k(3), greedy()}); },
        [&]() { return chain({greedy(), off()}); },
        [&]() { return chain({chain({greedy()})}); },
        [&]() { return chain({off(), llama_sampler_init_dist(3)}); },
    };
    for (size_t k = 0; k < kinds.size(); ++k) {
        llama_sampler *ours = kinds[k](), *theirs = kinds[k]();
        for (int r = 0; r < 40; ++r) {
            for (int i = 0; i < n_vocab; ++i) {
                logits[i] =
                    (float) pick(-9, r % 4 ? 90 : 3);  // the least and the largest often more than once
            }
            if (k < 3 && r % 4 == 1) {
                for (int n = pick(1, n_vocab); n > 0; --n) {
                    logits[pick(0, n_vocab - 1)] = pick(0, 1) ? -INFINITY : NAN;
                }
            }
            if (r == 39) {
                std::fill_n(logits, n_vocab, -INFINITY);
                logits[n_vocab - 1] = 0.0f;
            }
            CHECK(eagle3_sample(s, ours, -1) == llama_sampler_sample(theirs, ctx, -1));
        }
        llama_sampler_free(ours);
        llama_sampler_free(theirs);
    }
    CHECK(eagle3_rewind(s, 0, 0) == EAGLE3_OK);
}

static void wrong_rounds(eagle3_session * s) {
    int32_t n[4] = {}, out[64] = {};
    eagle3_ask asks[2] = {ask_for(0, 5, EAGLE3_PLAIN), ask_for(0, 5, EAGLE3_PLAIN)};
    CHECK(eagle3_round_draft(s, asks, 2, n) == EAGLE3_E_ARGUMENT);  // a slot twice
    CHECK(eagle3_round_draft(s, asks, 0, n) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_round_draft(s, nullptr, 1, n) == EAGLE3_E_ARGUMENT);
    asks[0].kind = 9;
    CHECK(eagle3_round_draft(s, asks, 1, n) == EAGLE3_E_ARGUMENT);
    asks[0] = ask_for(99, 5, EAGLE3_PLAIN, 0, 1, 1);
    CHECK(eagle3_round_draft(s, asks, 1, n) == EAGLE3_E_ARGUMENT);
    asks[0] = ask_for(0, -5, EAGLE3_CHAIN, 3, 1, 1);
    CHECK(eagle3_round_draft(s, asks, 1, n) == EAGLE3_E_ARGUMENT);
    asks[0] = ask_for(0, 5, EAGLE3_TREE, 3, 1, 99);
    CHECK(eagle3_round_draft(s, asks, 1, n) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_round_decode(s) == EAGLE3_E_ARGUMENT);
    llama_sampler * samplers[1] = {nullptr};
    CHECK(eagle3_round_verify(s, samplers, out, n) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_round_drafted(s, 7, out, n, nullptr, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_round_commit(s, n) == EAGLE3_OK);  // none under way
}

// Several slots in one round, each with a draft of its kind: a slot's logits are those of a fresh decode of
// its text alone.
static void joint_rounds(
    llama_model * model, llama_context * ctx, eagle3_session * s, int n_slots, int n_rounds) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<std::vector<int32_t>> text(n_slots);
    std::vector<llama_sampler *> greedy;
    for (int slot = 0; slot < n_slots; ++slot) {
        greedy.push_back(llama_sampler_init_greedy());
        CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
    }
    for (int r = 0; r < n_rounds; ++r) {
        std::vector<eagle3_ask> asks;
        std::vector<llama_sampler *> samplers;
        for (int slot = 0; slot < n_slots; ++slot) {
            std::vector<int32_t> & t = text[slot];
            if (t.empty() || t.size() > 200) {
                CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
                t.assign(pick(1, 60), 0);
                for (int32_t & id : t) {
                    id = pick(3, n_vocab - 1);
                }
                CHECK(eagle3_prefill(s, slot, t.data(), (int) t.size(), 0) == EAGLE3_OK);
            }
            if (pick(0, 3) > 0) {
                asks.push_back(random_ask(slot, pick(3, n_vocab - 1)));
                samplers.push_back(greedy[slot]);
            }
        }
        if (asks.empty()) {
            continue;
        }
        std::shuffle(asks.begin(), asks.end(), rng);  // samplers are all alike
        const int n = (int) asks.size();
        std::vector<int32_t> drafted(n), counts(n), keep(n), out(n * 64);
        const int total = eagle3_round_draft(s, asks.data(), n, drafted.data());
        CHECK(total >= 0 && total + n <= 64);
        CHECK(eagle3_round_decode(s) == EAGLE3_OK);
        CHECK(eagle3_round_draft(s, asks.data(), n, drafted.data()) ==
              EAGLE3_E_ARGUMENT);  // a round is under way
        CHECK(eagle3_prefill(s, 0, out.data(), 1, 0) == EAGLE3_E_ARGUMENT);
        CHECK(eagle3_round_verify(s, samplers.data(), out.data(), counts.data()) == EAGLE3_OK);
        for (int i = 0; i < n; ++i) {
            CHECK(counts[i] >= 1 && counts[i] <= drafted[i] + 1);
            keep[i]                  = pick(0, counts[i]);
            std::vector<int32_t> & t = text[asks[i].slot];
            for (int k = 0; k < keep[i]; ++k) {
                t.push_back(k == 0 ? asks[i].token : out[i * 64 + k - 1]);
            }
            if (keep[i] > 0 && pick(0, 3) == 0) {
                check_rows(model, ctx, eagle3_verified_row(s, asks[i].slot, keep[i] - 1), t);
            }
        }
        if (pick(0, 9) == 0) {  // a slot that goes back ends the round for all
            CHECK(eagle3_rewind(s, asks[0].slot, 0) == EAGLE3_OK);
            for (int i = 0; i < n; ++i) {
                text[asks[i].slot].resize(eagle3_n_past(s, asks[i].slot));
            }
            continue;
        }
        CHECK(eagle3_round_commit(s, keep.data()) == EAGLE3_OK);
        for (int i = 0; i < n; ++i) {
            CHECK(eagle3_n_past(s, asks[i].slot) == (int) text[asks[i].slot].size());
        }
    }
    for (llama_sampler * g : greedy) {
        llama_sampler_free(g);
    }
}

// Truncated and flipped heads: an error or a head that works, never a crash. Their name is not ASCII.
static void damaged_heads(const char * path, llama_model * model) {
    std::ifstream in(path, std::ios::binary);
    const std::string good((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const std::string copy = std::string(path) + ".k\xc3\xb6pf";  // UTF-8
    const auto file        = std::filesystem::u8path(copy);
    for (int i = 0; i < 40; ++i) {
        std::string bad = good;
        if (i % 2) {
            bad.resize(pick(0, (int) good.size() - 1));
        } else {
            for (int k = 0; k < 4; ++k) {
                bad[pick(0, std::min<int>(4000, (int) bad.size() - 1))] ^= (char) (1 << pick(0, 7));
            }
        }
        std::ofstream(file, std::ios::binary).write(bad.data(), (std::streamsize) bad.size());
        eagle3_head * head = nullptr;
        if (eagle3_head_open(copy.c_str(), model, &head) == EAGLE3_OK) {
            eagle3_head_close(head);
        } else {
            CHECK(eagle3_last_error()[0] != '\0' && head == nullptr);
        }
    }
    std::ofstream(file, std::ios::binary).write(good.data(), (std::streamsize) good.size());
    eagle3_head * head = nullptr;
    CHECK(eagle3_head_open(copy.c_str(), model, &head) == EAGLE3_OK);
    eagle3_head_close(head);
    std::filesystem::remove(file);
    head = nullptr;
    CHECK(eagle3_head_open("no such file", model, &head) == EAGLE3_E_FILE);
    CHECK(eagle3_head_open(nullptr, model, &head) == EAGLE3_E_ARGUMENT);
}

int main(int argc, char ** argv) {
    const bool chains = argc == 6 && strcmp(argv[5], "chains") == 0;
    if (argc != 5 && !chains) {
        fprintf(stderr, "usage: %s TARGET.gguf HEAD.gguf SEED ROUNDS [chains]\n", argv[0]);
        return 2;
    }
    rng.seed((unsigned) atoi(argv[3]));
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr && eagle3_abi_version() == EAGLE3_ABI_VERSION);

    damaged_heads(argv[2], model);
    for (const int n_slots : {1, 3, 1, 3}) {
        llama_context * ctx = new_context(model, n_slots);
        eagle3_head * head  = nullptr;
        eagle3_session * s  = nullptr;
        CHECK(eagle3_head_open(argv[2], model, &head) == EAGLE3_OK);
        CHECK(eagle3_session_open(ctx, head, n_slots + 1, &s) == EAGLE3_E_ARGUMENT);
        CHECK(eagle3_session_open(ctx, head, n_slots, &s) == EAGLE3_OK);
        CHECK(eagle3_can_tree(s) == trees);
        wrong_calls(s);
        wrong_rounds(s);
        greedy_rows(ctx, s);
        plan(s);
        many_damaged_states(ctx, s, 3 * atoi(argv[4]));
        rounds(model, ctx, s, n_slots, atoi(argv[4]));
        joint_rounds(model, ctx, s, n_slots, atoi(argv[4]) / 2);
        eagle3_session_close(s);
        CHECK(eagle3_session_open(ctx, nullptr, n_slots, &s) == EAGLE3_OK);  // plain
        for (int slot = 0; slot < n_slots; ++slot) {
            CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
            llama_memory_seq_rm(llama_get_memory(ctx), slot, 0, -1);
        }
        rounds(model, ctx, s, n_slots, 0);
        eagle3_session_close(s);
        eagle3_head_close(head);
        llama_free(ctx);
        flash = flash || n_slots == 3;  // from the third on
        trees = flash && !chains;
    }
    llama_model_free(model);
    puts("ok");
    return 0;
}
