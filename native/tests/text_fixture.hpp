// This has sessions with and without a head, and greedy generation that counts drafts by source.
#pragma once

#include "asks.hpp"
#include "check.hpp"

struct fixture {
    llama_model * model;
    llama_context * ctx;
    llama_sampler * greedy = llama_sampler_init_greedy();
    eagle3_head * head     = nullptr;

    fixture(const char * target, const char * path)
        : model(llama_model_load_from_file(target, llama_model_default_params())) {
        CHECK(model != nullptr);
        ctx = make_context(model, 2, 256, 64, 64);
        CHECK(eagle3_head_open(path, model, &head) == 0);
    }
    ~fixture() {
        eagle3_head_close(head);
        llama_sampler_free(greedy);
        llama_free(ctx);
        llama_model_free(model);
    }
    fixture(const fixture &)             = delete;
    fixture & operator=(const fixture &) = delete;
};

inline eagle3_costs cheap_rows() {
    eagle3_costs c = {};
    for (int n = 1; n <= EAGLE3_MAX_ROWS; ++n) {
        c.layers[n] = 1e-3f * (1.0f + 0.01f * (float) n);
        c.head[n]   = 1e-5f;
    }
    return c;
}

struct result {
    tokens text;
    int rounds = 0, of_text = 0, of_head = 0;
};

// Decodes n tokens of a slot greedily. kind is PLAIN, or PLANNED from the text or not.
inline result generate(
    eagle3_session * s, const fixture & f, int slot, const tokens & prompt, int n, int kind, int text) {
    result r;
    CHECK(eagle3_rewind(s, slot, 0) == 0);
    for (size_t at = 0; at < prompt.size(); at += 64) {
        const int n_batch = (int) std::min<size_t>(64, prompt.size() - at);
        CHECK(eagle3_prefill(s, slot, prompt.data() + at, n_batch, 0) == 0);
    }
    r.text.push_back(eagle3_sample(s, f.greedy, -1));
    while ((int) r.text.size() < n) {
        eagle3_ask a = ask_for(slot, r.text.back(), kind, EAGLE3_MAX_DRAFT, 0, 4);
        a.text       = text;
        CHECK(decode(s, a) >= 0);
        int32_t ids[EAGLE3_MAX_DRAFT], sources[EAGLE3_MAX_DRAFT], out[EAGLE3_MAX_ROWS];
        const int drafted = eagle3_round_drafted(s, 0, ids, nullptr, nullptr, sources);
        for (int i = 0; i < drafted; ++i) {
            CHECK(sources[i] & (EAGLE3_FROM_HEAD | EAGLE3_FROM_TEXT));
            r.of_text += (sources[i] & EAGLE3_FROM_TEXT) != 0;
            r.of_head += (sources[i] & EAGLE3_FROM_HEAD) != 0;
        }
        const int count = verify(s, f.greedy, out);
        CHECK(count > 0 && eagle3_round_commit(s, &count) == 0);
        r.text.insert(r.text.end(), out, out + count);
        ++r.rounds;
    }
    r.text.resize(n);
    return r;
}

inline eagle3_session * open(const fixture & f, eagle3_head * head, const eagle3_costs & costs) {
    eagle3_session * s = nullptr;
    llama_memory_clear(llama_get_memory(f.ctx), true);
    CHECK(eagle3_session_open(f.ctx, head, 2, &s) == 0 && eagle3_plan_set(s, &costs) == 0);
    return s;
}
