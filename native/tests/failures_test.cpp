// Calls that fail half way, and what the slots, the context and other slots are afterwards; run under the
// sanitizers.
//     failures_test CASE TARGET.gguf [HEAD.gguf]    CASE: see main
#include "asks.hpp"
#include "check.hpp"
#include "script.hpp"
#include "llama.h"

#include "ggml-backend-impl.h"
#include "llama-ext.h"
#include "llama-model.h"
#include "session/session.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int N_SLOTS = 3;
constexpr int N_CTX   = 512;
constexpr int ROOM    = 64;  // of eagle3_round_verify's tokens, for each slot

int n_reserves   = 0;      // of llama.cpp's scheduler, by its log
bool throws      = false;  // the next tensor evaluated, or the one after these
int throws_after = 0;

void count_reserves(ggml_log_level, const char * text, void *) {
    n_reserves += strstr(text, "sched_reserve: reserving ...") != nullptr;
}

bool evaluated(ggml_tensor *, bool, void *) {
    if (throws && throws_after-- <= 0) {
        throw std::runtime_error("the callback's");
    }
    return false;  // the tensor itself is not wanted
}

struct fixture {
    llama_model * model = nullptr;
    llama_context * ctx = nullptr;
    eagle3_head * head  = nullptr;
    eagle3_session * s  = nullptr;

    fixture(const char * target, const char * head_path, bool callback = false, bool unified = false) {
        model = llama_model_load_from_file(target, llama_model_default_params());
        CHECK(model != nullptr);
        llama_context_params p = llama_context_default_params();
        p.n_ctx                = unified ? N_CTX : N_CTX * N_SLOTS;
        p.kv_unified           = unified;
        p.n_batch              = 512;
        p.n_ubatch             = 64;
        p.n_seq_max            = N_SLOTS;
        p.n_threads = p.n_threads_batch = 1;
        p.flash_attn_type               = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        p.cb_eval                       = callback ? evaluated : nullptr;
        ctx                             = llama_init_from_model(model, p);
        CHECK(ctx != nullptr);
        if (head_path) {
            CHECK(eagle3_head_open(head_path, model, &head) == EAGLE3_OK);
        }
        CHECK(eagle3_session_open(ctx, head, N_SLOTS, &s) == EAGLE3_OK);
    }

    ~fixture() {
        eagle3_session_close(s);
        eagle3_head_close(head);
        llama_free(ctx);
        llama_model_free(model);
    }

    void prefill(int slot, int n) {
        std::vector<int32_t> text(n);
        for (int i = 0; i < n; ++i) {
            text[i] = 3 + (7 * slot + 5 * i) % 100;
        }
        CHECK(eagle3_prefill(s, slot, text.data(), n, 0) == EAGLE3_OK);
    }

    // the greedy continuation of a slot
    std::vector<int32_t> text(int slot, int n, int kind) {
        llama_sampler * greedy   = llama_sampler_init_greedy();
        std::vector<int32_t> out = {eagle3_sample(s, greedy, -1)};
        while ((int) out.size() < n) {
            const eagle3_ask ask = ask_for(slot, out.back(), kind, 6, 3, kind == EAGLE3_TREE ? 3 : 1);
            int32_t drafted = 0, tokens[ROOM], count = 0;
            CHECK(eagle3_round_draft(s, &ask, 1, &drafted) >= 0 && eagle3_round_decode(s) == EAGLE3_OK);
            CHECK(eagle3_round_verify(s, &greedy, tokens, &count) == EAGLE3_OK && count > 0);
            CHECK(eagle3_round_commit(s, &count) == EAGLE3_OK);
            out.insert(out.end(), tokens, tokens + count);
        }
        llama_sampler_free(greedy);
        out.resize(n);
        return out;
    }
};

// A round of all slots up to verification.
void begin_round(fixture & f, int kind) {
    std::vector<eagle3_ask> asks;
    std::vector<llama_sampler *> samplers;
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        asks.push_back(ask_for(slot, 9 + slot, kind, 6, 3, kind == EAGLE3_TREE ? 3 : 1));
        samplers.push_back(llama_sampler_init_greedy());
    }
    int32_t drafted[N_SLOTS], counts[N_SLOTS], out[N_SLOTS * ROOM];
    CHECK(eagle3_round_draft(f.s, asks.data(), N_SLOTS, drafted) >= 0);
    CHECK(eagle3_round_decode(f.s) == EAGLE3_OK);
    CHECK(eagle3_round_verify(f.s, samplers.data(), out, counts) == EAGLE3_OK);
    for (llama_sampler * sampler : samplers) {
        llama_sampler_free(sampler);
    }
}

void check_slots(const fixture & f, const std::vector<int> & n_past) {
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        CHECK(eagle3_n_past(f.s, slot) == n_past[slot]);
        CHECK(eagle3_settle(f.s, slot) == EAGLE3_OK);  // what a recurrent memory lost waits until then
        CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), slot) == n_past[slot] - 1);
    }
}

// No slot waits for a round that is over: prompts, rounds and states work in each.
void check_usable(fixture & f) {
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        f.prefill(slot, 5);
        if (f.head) {
            CHECK(draft(f.s, ask_for(slot, 9, EAGLE3_CHAIN, 4)) == 4);
            std::vector<uint8_t> state(eagle3_state_size(f.s, slot));
            CHECK(
                eagle3_state_get(f.s, slot, state.data(), (int64_t) state.size()) == (int64_t) state.size());
        }
        CHECK(decode(f.s, ask_for(slot, 9, EAGLE3_PLAIN)) == EAGLE3_OK && commit(f.s, 1) == EAGLE3_OK);
    }
}

// The logits of a token after what a slot holds, which stays.
std::vector<float> logits_after(fixture & f, int slot, int32_t token) {
    const int n_past = eagle3_n_past(f.s, slot);
    CHECK(eagle3_prefill(f.s, slot, &token, 1, 0) == EAGLE3_OK);
    const float * l = llama_get_logits_ith(f.ctx, -1);
    std::vector<float> out(l, l + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(f.ctx))));
    CHECK(eagle3_rewind(f.s, slot, n_past) == EAGLE3_OK);
    return out;
}

// A recurrent memory cannot drop a row: the slot whose token is not kept goes back by a checkpoint, and has
// its text as before. So do the others.
void failed_commits(const char * target) {
    for (const int failing : {0, 1, 2}) {
        fixture f(target, nullptr), untouched(target, nullptr);
        for (int slot = 0; slot < N_SLOTS; ++slot) {
            f.prefill(slot, 10 + slot);
            untouched.prefill(slot, 10 + slot);
        }
        begin_round(f, EAGLE3_PLAIN);
        int32_t keep[N_SLOTS] = {1, 1, 1};
        keep[failing]         = 0;
        CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_OK);
        CHECK(logits_after(f, failing, 5) == logits_after(untouched, failing, 5));
        check_slots(f, {10 + keep[0], 11 + keep[1], 12 + keep[2]});
        CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_OK);  // none is under way
        check_usable(f);
    }
}

// The features are gone at commit, as another llama_decode in between takes them: the rows stay, the head
// starts over, in every slot.
void lost_features(const char * target, const char * head, int kind) {
    fixture f(target, head);
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        f.prefill(slot, 10 + slot);
    }
    begin_round(f, kind);
    CHECK(llama_decode(f.ctx, llama_batch{}) != 0);
    const int32_t too_many[N_SLOTS] = {1, 99, 1}, keep[N_SLOTS] = {1, 0, 1};
    CHECK(eagle3_round_commit(f.s, too_many) == EAGLE3_E_ARGUMENT);
    CHECK(draft(f.s, ask_for(0, 9, EAGLE3_PLAIN)) == EAGLE3_E_ARGUMENT);  // still under way
    CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_E_INTERNAL);
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        CHECK(eagle3_n_past(f.s, slot) == 10 + slot + keep[slot]);
    }
    check_usable(f);
}

// The tree is gone at commit, as the context's owner ended it: none of its rows stay.
void lost_trees(const char * target, const char * head) {
    fixture f(target, head);
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        f.prefill(slot, 10 + slot);
    }
    begin_round(f, EAGLE3_TREE);
    llama_memory_tree_set(llama_get_memory(f.ctx), nullptr, 0);
    const int32_t keep[N_SLOTS] = {1, 1, 1};
    CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_E_INTERNAL);
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        CHECK(eagle3_n_past(f.s, slot) == 10 + slot);
        CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), slot) == 9 + slot);
    }
    check_usable(f);
}

// A cache that slots share is full before their positions are: E_DECODE, the slots are as before, the round
// is still drafted, and one that drafts less goes through.
void full_cache(const char * target, const char * head) {
    fixture f(target, head, false, true);
    const std::vector<int32_t> more(N_CTX, 7);
    f.prefill(0, N_CTX - 60);
    f.prefill(1, 40);
    const eagle3_ask chains[2] = {ask_given(0, 9, more.data(), 20), ask_given(1, 9, more.data(), 20)};
    int32_t drafted[2]         = {};
    for (int turn = 0; turn < 2; ++turn) {
        CHECK(eagle3_round_draft(f.s, chains, 2, drafted) == 40);
        CHECK(eagle3_round_decode(f.s) == EAGLE3_E_DECODE);
        CHECK(strstr(eagle3_last_error(), "full") != nullptr);
        CHECK(eagle3_round_decode(f.s) == EAGLE3_E_DECODE);
        CHECK(eagle3_prefill(f.s, 1, more.data(), 30, 0) == EAGLE3_E_DECODE);
        CHECK(eagle3_round_decode(f.s) == EAGLE3_E_ARGUMENT);  // the prompt dropped the draft
        CHECK(eagle3_n_past(f.s, 0) == N_CTX - 60 && eagle3_n_past(f.s, 1) == 40);
        for (int slot = 0; slot < 2; ++slot) {
            CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), slot) == eagle3_n_past(f.s, slot) - 1);
        }
    }
    CHECK(eagle3_round_draft(f.s, chains, 2, drafted) == 40 && eagle3_round_decode(f.s) == EAGLE3_E_DECODE);
    CHECK(eagle3_rewind(f.s, 0, 100) == EAGLE3_OK);  // makes room, and drops the draft
    CHECK(eagle3_round_decode(f.s) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_round_draft(f.s, chains, 2, drafted) == 40 && eagle3_round_decode(f.s) == EAGLE3_OK);
    const int32_t keep[2] = {21, 21};
    CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_OK);
    CHECK(eagle3_n_past(f.s, 0) == 121 && eagle3_n_past(f.s, 1) == 61);
}

// A recurrent target's batch fails: of its slots' states nothing is right, and all slots hold what they held
// before, with the same logits.
void failed_recurrent_decodes(const char * target) {
    for (const int n : {1, 5, 150}) {           // tokens: up to three micro-batches
        for (const int after : {0, 40, 200}) {  // tensors that are evaluated before
            fixture f(target, nullptr, true), untouched(target, nullptr, true);
            for (int slot = 0; slot < N_SLOTS; ++slot) {
                f.prefill(slot, 10 + slot);
                untouched.prefill(slot, 10 + slot);
            }
            const std::vector<int32_t> more(n, 7);
            throws_after = after;
            throws       = true;
            const int rc = eagle3_prefill(f.s, 1, more.data(), n, 0);
            throws       = false;
            CHECK(rc == EAGLE3_OK || rc == EAGLE3_E_INTERNAL);
            CHECK(rc != EAGLE3_OK || eagle3_prefill(untouched.s, 1, more.data(), n, 0) == EAGLE3_OK);
            const int held = rc == EAGLE3_OK ? 11 + n : 11;
            CHECK(eagle3_n_past(f.s, 1) == held);

            std::vector<eagle3_ask> asks = {ask_for(0, 9, EAGLE3_PLAIN), ask_for(1, 9, EAGLE3_PLAIN)};
            int32_t drafted[N_SLOTS];
            CHECK(eagle3_round_draft(f.s, asks.data(), 2, drafted) == 0);
            throws_after = after;
            throws       = true;
            const int rd = eagle3_round_decode(f.s);
            throws       = false;
            CHECK(rd == EAGLE3_OK || eagle3_round_decode(f.s) == EAGLE3_OK);  // it is drafted still
            const int32_t keep[2] = {1, 1};
            CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_OK);
            CHECK(eagle3_round_draft(untouched.s, asks.data(), 2, drafted) == 0);
            CHECK(eagle3_round_decode(untouched.s) == EAGLE3_OK);
            CHECK(eagle3_round_commit(untouched.s, keep) == EAGLE3_OK);
            check_slots(f, {11, held + 1, 12});
            for (int slot = 0; slot < N_SLOTS; ++slot) {
                CHECK(logits_after(f, slot, 5) == logits_after(untouched, slot, 5));
            }
            check_usable(f);
        }
    }
}

// llama_decode throws: the slots are as before, and the text goes on as if nothing had been.
void thrown_decodes(const char * target, const char * head, int kind) {
    fixture f(target, head, true), good(target, head, true);
    for (fixture * x : {&f, &good}) {
        for (int slot = 0; slot < N_SLOTS; ++slot) {
            x->prefill(slot, 10 + slot);
        }
    }
    std::vector<eagle3_ask> asks;
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        asks.push_back(ask_for(slot, 9, kind, 6, 3, kind == EAGLE3_TREE ? 3 : 1));
    }
    int32_t drafted[N_SLOTS];
    float seconds       = 0.0f;
    const int32_t token = 5;
    CHECK(eagle3_round_draft(f.s, asks.data(), N_SLOTS, drafted) > 0);
    throws = true;
    CHECK(eagle3_round_decode(f.s) == EAGLE3_E_INTERNAL);
    CHECK(eagle3_prefill(f.s, 1, &token, 1, 0) == EAGLE3_E_INTERNAL);
    CHECK(eagle3_measure_target(f.s, 1, 4, &seconds) == EAGLE3_E_INTERNAL);
    throws = false;
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        CHECK(eagle3_n_past(f.s, slot) == 10 + slot);
        CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), slot) == 9 + slot);
    }
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        f.prefill(slot, 3);
        good.prefill(slot, 3);
        CHECK(f.text(slot, 20, kind) == good.text(slot, 20, EAGLE3_PLAIN));
    }
}

// Rows decoded by the context's owner, past the session: all their logits are there, and they see what rows
// of a text see.
void check_context(llama_model * model, llama_context * ctx) {
    const int n = 4, n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<float> rows[2];
    llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    for (const int step : {n, 1}) {
        std::vector<float> & out = rows[step == 1];
        for (int at = 0; at < n; at += step) {
            llama_batch batch = llama_batch_init(step, 0, 1);
            batch.n_tokens    = step;
            for (int i = 0; i < step; ++i) {
                batch.token[i]     = 20 + at + i;
                batch.pos[i]       = at + i;
                batch.n_seq_id[i]  = 1;
                batch.seq_id[i][0] = 0;
                batch.logits[i]    = true;
            }
            CHECK(llama_decode(ctx, batch) == 0);
            for (int i = 0; i < step; ++i) {
                const float * l = llama_get_logits_ith(ctx, i);
                out.insert(out.end(), l, l + n_vocab);
            }
            llama_batch_free(batch);
        }
        llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1);
    }
    CHECK(rows[0] == rows[1]);
}

// A measure that fails leaves a context that computes all logits.
void failed_measures(const char * target, const char * head) {
    fixture f(target, head);
    float seconds = 0.0f;
    f.prefill(0, 510);
    CHECK(eagle3_measure_target(f.s, 0, 4, &seconds) == EAGLE3_E_ARGUMENT);  // no room
    check_context(f.model, f.ctx);
}

// No row of an earlier batch is sampled: not where the output matrix is left out, nor after a failure.
void missing_rows(const char * target, const char * head) {
    fixture f(target, head, true);
    float seconds            = 0.0f;
    llama_sampler * sampler  = llama_sampler_init_greedy();
    const auto rows_with_any = [&] {
        int n = 0;
        for (int row = -1; row < 8; ++row) {
            const int32_t token = eagle3_sample(f.s, sampler, row);
            CHECK(token >= 0 || token == EAGLE3_E_ARGUMENT);
            CHECK((token >= 0) == (llama_get_logits_ith(f.ctx, row) != nullptr));
            n += token >= 0;
        }
        return n;
    };
    f.prefill(0, 8);
    CHECK(rows_with_any() == 2);  // the last one, by both of its numbers
    throws = true;
    CHECK(eagle3_measure_target(f.s, 0, 4, &seconds) == EAGLE3_E_INTERNAL);
    throws = false;
    CHECK(rows_with_any() == 0);
    f.prefill(0, 8);
    llama_set_abort_callback(f.ctx, [](void *) { return true; }, nullptr);
    CHECK(eagle3_measure_target(f.s, 0, 4, &seconds) < 0);
    CHECK(rows_with_any() == 0);
    llama_sampler_free(sampler);
}

// The same where the decode left the output matrix out.
void deferred_rows(const char * target, const char * head) {
    fixture f(target, head);
    float seconds           = 0.0f;
    llama_sampler * sampler = llama_sampler_init_greedy();
    f.prefill(0, 8);
    const int32_t before = eagle3_sample(f.s, sampler, -1);
    CHECK(before >= 0);
    CHECK(eagle3_measure_target(f.s, 0, 4, &seconds) == EAGLE3_OK);
    for (const int row : {-1, 0, 3}) {
        CHECK(eagle3_sample(f.s, sampler, row) == EAGLE3_E_ARGUMENT);
    }
    CHECK(eagle3_measure_output(f.s, 2, &seconds) == EAGLE3_OK);
    for (const int row : {0, 1, 2}) {  // what is measured is not kept
        CHECK(eagle3_sample(f.s, sampler, row) == EAGLE3_E_ARGUMENT);
    }
    llama_sampler_free(sampler);
}

// A sampler that fails at a row keeps the tokens of the rows before it, as in plain decoding. Fails as the
// first of a joint round, in its middle and at its end; the other slot's tokens are all good.
void failed_samplers(const char * target) {
    const tokens drafted = {11, 12, 13};
    for (size_t row = 0; row <= drafted.size(); ++row) {
        fixture f(target, nullptr), plain(target, nullptr);
        script failing({11, 12, 13, 14}), whole({11, 12, 13, 14});
        failing.throws_at = row;
        for (int slot = 0; slot < 2; ++slot) {
            f.prefill(slot, 8);
            plain.prefill(slot, 8);
        }
        std::vector<eagle3_ask> asks;
        for (int slot = 0; slot < 2; ++slot) {
            asks.push_back(ask_given(slot, 9, drafted.data(), (int) drafted.size(), nullptr));
        }
        llama_sampler * samplers[2] = {failing.sampler, whole.sampler};
        int32_t n[2], counts[2], out[2 * ROOM];
        CHECK(eagle3_round_draft(f.s, asks.data(), 2, n) == 6 && eagle3_round_decode(f.s) == EAGLE3_OK);
        CHECK(eagle3_round_failure(f.s, 0) == EAGLE3_E_ARGUMENT);  // nothing is verified yet
        CHECK(eagle3_round_verify(f.s, samplers, out, counts) == EAGLE3_OK);
        CHECK(strstr(eagle3_last_error(), "the script's") != nullptr);
        CHECK(counts[0] == (row ? (int) row : EAGLE3_E_INTERNAL) && counts[1] == 4);
        CHECK(eagle3_round_failure(f.s, 0) == EAGLE3_E_INTERNAL);
        CHECK(eagle3_round_failure(f.s, 1) == EAGLE3_OK);
        CHECK(eagle3_round_failure(f.s, 2) == EAGLE3_E_ARGUMENT);
        CHECK(tokens(out, out + row) == tokens(drafted.begin(), drafted.begin() + (int) row));
        const int32_t keep[2] = {(int32_t) row, 4};
        CHECK(eagle3_round_commit(f.s, keep) == EAGLE3_OK);
        tokens text = {9, 11, 12, 13};
        CHECK(row == 0 || eagle3_prefill(plain.s, 0, text.data(), (int) row, 0) == EAGLE3_OK);
        CHECK(logits_after(f, 0, 5) == logits_after(plain, 0, 5));
    }
}

// A session that is closed in the middle of a tree leaves a context whose batches are texts.
void closed_sessions(const char * target, const char * head) {
    fixture f(target, head);
    const int32_t tokens[3] = {5, 6, 7}, parents[3] = {-1, -1, 0};
    f.prefill(0, 7);
    CHECK(decode(f.s, ask_given(0, 9, tokens, 3, parents)) == EAGLE3_OK);
    CHECK(eagle3_can_tree(f.s) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_state_set(f.s, 0, (const uint8_t *) "", 0) == EAGLE3_E_ARGUMENT);
    eagle3_session_close(f.s);
    f.s = nullptr;
    CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), 0) == 6);
    check_context(f.model, f.ctx);
    CHECK(eagle3_session_open(f.ctx, f.head, N_SLOTS, &f.s) == EAGLE3_OK);
    check_usable(f);
}

// Prompts that do not draft take turns with rounds that do: the scheduler is reserved no more for it, the
// drafts are the same.
void flipped_capture(const char * target, const char * head) {
    llama_log_set(count_reserves, nullptr);
    std::vector<std::vector<int32_t>> drafts[2];
    for (const bool flips : {false, true}) {
        fixture f(target, head);
        f.prefill(0, 20);
        CHECK(n_reserves > 0);
        const int before = n_reserves;
        for (int turn = 0; turn < 12; ++turn) {
            std::vector<int32_t> tokens(5);
            CHECK(eagle3_session_set_capture(f.s, 1) == EAGLE3_OK);
            CHECK(draft(f.s, ask_for(0, 9, EAGLE3_CHAIN, 5), tokens.data()) == 5);
            CHECK(eagle3_round_decode(f.s) == EAGLE3_OK && commit(f.s, 1 + turn % 6) == EAGLE3_OK);
            drafts[flips].push_back(tokens);
            CHECK(eagle3_session_set_capture(f.s, !flips) == EAGLE3_OK);
            f.prefill(1, turn % 2 ? 3 : 70);
        }
        CHECK(n_reserves == before);
    }
    CHECK(drafts[0] == drafts[1]);
}

// Drafts of several lengths for all slots at once, with logits on demand: the text of each is what it is
// alone and undrafted.
void joint_text(const char * target, const char * head) {
    constexpr int N = 24;
    fixture f(target, head), plain(target, nullptr);
    eagle3_costs costs = {};
    for (int n = 1; n <= 64; ++n) {
        costs.layers[n] = 1e-3f * (1.0f + 0.01f * n);
        costs.output[n] = 1e-4f * n;
        costs.head[n]   = 1e-6f;
    }
    CHECK(eagle3_plan_set(f.s, &costs) == EAGLE3_OK);  // from then on rows wait for verification
    std::vector<std::vector<int32_t>> expected, text;
    std::vector<llama_sampler *> samplers;
    int total = 0;
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        plain.prefill(slot, 10 + slot);
        expected.push_back(plain.text(slot, N, EAGLE3_PLAIN));
        f.prefill(slot, 10 + slot);
        samplers.push_back(llama_sampler_init_greedy());
        text.push_back({eagle3_sample(f.s, samplers.back(), -1)});
    }
    while ((int) std::min({text[0].size(), text[1].size(), text[2].size()}) < N) {
        std::vector<eagle3_ask> asks;
        for (int slot = 0; slot < N_SLOTS; ++slot) {
            asks.push_back(ask_for(slot, text[slot].back(), EAGLE3_CHAIN, 1 + 2 * slot, 1, 1));
        }
        int32_t drafted[N_SLOTS], counts[N_SLOTS], out[N_SLOTS * ROOM];
        total += eagle3_round_draft(f.s, asks.data(), N_SLOTS, drafted);
        CHECK(eagle3_round_decode(f.s) == EAGLE3_OK);
        CHECK(eagle3_round_verify(f.s, samplers.data(), out, counts) == EAGLE3_OK);
        for (int slot = 0; slot < N_SLOTS; ++slot) {
            text[slot].insert(text[slot].end(), out + slot * ROOM, out + slot * ROOM + counts[slot]);
        }
        CHECK(eagle3_round_commit(f.s, counts) == EAGLE3_OK);
    }
    for (int slot = 0; slot < N_SLOTS; ++slot) {
        text[slot].resize(N);
        CHECK(text[slot] == expected[slot]);
        llama_sampler_free(samplers[slot]);
    }
    CHECK(total > N);
}

struct own_session {
    std::unique_ptr<eagle3::head> head;
    eagle3::session s;

    own_session(const fixture & f, const char * path)
        : head(eagle3::load_head(path, f.model)), s(f.ctx, head.get(), N_SLOTS) {}
};

// The head computes with as many threads as the target, also after these have changed.
void followed_threads(const char * target, const char * head) {
    fixture f(target, nullptr);
    own_session own(f, head);
    const std::vector<int32_t> text(8, 7);
    for (const int n : {3, 1, 2}) {
        llama_set_n_threads(f.ctx, n, n);
        own.s.rewind(0, 0);
        own.s.prefill(0, text.data(), (int) text.size(), false);
        CHECK(own.s.draft({ask_for(0, 9, EAGLE3_CHAIN, 4)}) == 4);
        CHECK(own.s.need_head().passes().n_threads() == n);
    }
}

// A head goes to the device of the target's last norm, or of its output matrix if that norm has no weight
// (OLMo). The device is any that is not the CPU's: its buffer is not on the host.
void output_devices(const char * target) {
    llama_model * model = llama_model_load_from_file(target, llama_model_default_params());
    CHECK(model != nullptr);
    ggml_backend_device device    = *ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_buffer_type type = *ggml_backend_buffer_get_type(model->output->buffer);
    ggml_backend_buffer_t host    = model->output->buffer;
    type.iface.is_host            = nullptr;
    type.device                   = &device;
    ggml_backend_buffer elsewhere = *host;
    elsewhere.buft                = &type;
    const auto norm               = std::exchange(model->output_norm, nullptr);
    const auto name               = std::string(norm->name);
    ggml_set_name(norm, "none");
    CHECK(eagle3::output_device(model) != &device);
    model->output->buffer = &elsewhere;
    CHECK(eagle3::output_device(model) == &device);
    model->output->buffer = host;
    model->output_norm    = norm;
    ggml_set_name(norm, name.c_str());
    llama_model_free(model);
}

// Prompts of every length, in every slot: few graphs over the head, and no more memory for them.
void few_shapes(const char * target, const char * head) {
    fixture f(target, nullptr);
    own_session own(f, head);
    size_t n_bytes = 0;
    for (int n = 1; n <= 160; ++n) {
        const int slot = n % N_SLOTS;
        const std::vector<int32_t> text(n, 7);
        own.s.rewind(slot, 0);
        own.s.prefill(slot, text.data(), n, false);
        n_bytes = n == 127 ? own.s.need_head().passes().compute_bytes() : n_bytes;
    }
    CHECK(own.s.need_head().passes().n_graphs() <= 7);  // 1, 2, 4, ... 64 rows
    CHECK(own.s.need_head().passes().compute_bytes() == n_bytes);
}

// A prompt in one chunk and in any: the head's probabilities are the same, bit for bit.
void cut_prompts(const char * target, const char * head) {
    fixture f(target, nullptr);
    own_session own(f, head);
    std::vector<int32_t> text(400);
    std::vector<float> probs[3];
    for (size_t i = 0; i < text.size(); ++i) {
        text[i] = 3 + (int32_t) (i * i % 97);
    }
    const int steps[3] = {400, 64, 23};
    for (int k = 0; k < 3; ++k) {
        own.s.rewind(k, 0);
        for (int at = 0; at < 400; at += steps[k]) {
            own.s.prefill(k, text.data() + at, std::min(steps[k], 400 - at), false);
        }
        CHECK(own.s.draft({ask_for(k, 9, EAGLE3_CHAIN, 6)}) == 6);
        for (const eagle3::evidence_list & e : own.s.slot(k).draft.evidence) {
            probs[k].push_back(e[0]);
        }
    }
    CHECK(probs[0] == probs[1] && probs[0] == probs[2]);
}

// One matrix for embeddings and output, of which the model keeps two copies: the head takes each as the model
// does, and drafts.
void shared_weights(const char * target, const char * head) {
    fixture f(target, head);
    CHECK(llama_model_get_tensor(f.model, "token_embd.weight") == f.model->tok_embd);
    CHECK(llama_model_get_tensor(f.model, "output.weight") == f.model->output);
    CHECK(llama_model_get_tensor(f.model, "output_norm.weight") == f.model->output_norm);
    CHECK(llama_model_get_tensor(f.model, "no such weight") == nullptr);
    check_usable(f);
}

// The target's tensors split over devices, which this process's CPU plays: plain decoding works, a head is
// refused.
void split_tensors(const char * target, const char * head_path) {
    ggml_backend_dev_t devices[2] = {ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr};
    llama_model_params p          = llama_model_default_params();
    p.split_mode                  = LLAMA_SPLIT_MODE_TENSOR;
    p.n_gpu_layers                = 99;
    p.devices                     = devices;
    llama_model * model           = llama_model_load_from_file(target, p);
    CHECK(model != nullptr);
    eagle3_head * head = nullptr;
    CHECK(eagle3_head_open(head_path, model, &head) == EAGLE3_E_UNSUPPORTED && head == nullptr);
    CHECK(
        strstr(eagle3_last_error(), "split_mode") != nullptr && strchr(eagle3_last_error(), '\n') == nullptr);
    llama_model_free(model);
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 2 ? argv[1] : "";
    const char * head      = argc > 3 ? argv[3] : nullptr;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    if (what == "commit") {
        failed_commits(argv[2]);
        failed_recurrent_decodes(argv[2]);
    } else if (what == "features" && head) {
        for (const int kind : {EAGLE3_PLAIN, EAGLE3_CHAIN, EAGLE3_TREE}) {
            lost_features(argv[2], head, kind);
        }
        lost_trees(argv[2], head);
    } else if (what == "full" && head) {
        full_cache(argv[2], head);
    } else if (what == "throws" && head) {
        thrown_decodes(argv[2], head, EAGLE3_CHAIN);
        thrown_decodes(argv[2], head, EAGLE3_TREE);
    } else if (what == "measure" && head) {
        failed_measures(argv[2], head);
        missing_rows(argv[2], head);
        deferred_rows(argv[2], head);
        followed_threads(argv[2], head);
        output_devices(argv[2]);
    } else if (what == "samplers") {
        failed_samplers(argv[2]);
    } else if (what == "close" && head) {
        closed_sessions(argv[2], head);
    } else if (what == "capture" && head) {
        flipped_capture(argv[2], head);
    } else if (what == "joint" && head) {
        joint_text(argv[2], head);
    } else if (what == "shapes" && head) {
        few_shapes(argv[2], head);
    } else if (what == "cuts" && head) {
        cut_prompts(argv[2], head);
    } else if (what == "shared" && head) {
        shared_weights(argv[2], head);
    } else if (what == "split" && head) {
        split_tensors(argv[2], head);
    } else {
        fprintf(stderr,
            "usage: failures_test "
            "commit|features|full|throws|measure|samplers|close|capture|joint|shapes|cuts|shared|split "
            "TARGET.gguf [HEAD.gguf]\n");
        return 2;
    }
    puts("ok");
    return 0;
}
