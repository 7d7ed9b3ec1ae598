// A small model that drafts: every row that stays has the bits of its text decoded plainly and alone, as many
// tokens come of a round as the model's chance says, and rows that a draft decoded are not decoded twice.
// Texts are rewound, restored and continued behind a gap meanwhile.
//     draft_model_test TARGET.gguf SMALL.gguf CHANCE ROUNDS TOKEN    TOKEN: one of the cycle
#include "asks.hpp"
#include "check.hpp"
#include "api/capi.hpp"
#include "model/model_source.hpp"

#include <cmath>
#include <cstring>
#include <memory>
#include <random>

namespace {

constexpr int N_CTX = 512, MAX_ROWS = 64, N_CHAIN = 3;

std::mt19937 rng(1);
int n_told;     // lines of the log about a small model that failed
int32_t start;  // a token that the cycle goes on from

int pick(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

struct world {
    llama_model * model;
    llama_context * ctx;
    eagle3_drafter * drafter = nullptr;
    eagle3_session * s       = nullptr;
    std::vector<std::unique_ptr<plain_decodes>> plain;  // of each slot
    std::vector<tokens> text;                           // and the token that follows it
    std::vector<int> n_prompt;
    std::vector<llama_sampler *> samplers;

    world(llama_model * m, const char * small, int n_slots, bool sampled)
        : model(m), ctx(make_context(m, n_slots, N_CTX, MAX_ROWS, MAX_ROWS)), text(n_slots),
          n_prompt(n_slots) {
        CHECK(eagle3_session_open(ctx, nullptr, n_slots, &s) == EAGLE3_OK);
        CHECK(eagle3_drafter_open(small, ctx, n_slots, 0, &drafter) == EAGLE3_OK);
        CHECK(eagle3_session_use(s, drafter) == EAGLE3_OK);
        CHECK(eagle3_session_use(s, drafter) == EAGLE3_E_ARGUMENT);  // it has one
        CHECK(strcmp(eagle3_source_name(s, 0), "model") == 0);
        for (int slot = 0; slot < n_slots; ++slot) {
            plain.push_back(std::make_unique<plain_decodes>(m, N_CTX));
            samplers.push_back(llama_sampler_chain_init(llama_sampler_chain_default_params()));
            if (sampled) {
                llama_sampler_chain_add(samplers.back(), llama_sampler_init_temp(1.0f));
            }
            llama_sampler_chain_add(samplers.back(),
                sampled ? llama_sampler_init_dist((uint32_t) slot) : llama_sampler_init_greedy());
        }
        eagle3_costs c = {};
        for (int n = 1; n <= MAX_ROWS; ++n) {
            c.layers[n] = 1e-3f * (1.0f + 0.001f * (float) n);
            CHECK(n > 4 || eagle3_measure_head(s, 0, n, &c.head[n]) == EAGLE3_OK);
            c.head[n] = 1e-6f;
        }
        CHECK(eagle3_plan_set(s, &c) == EAGLE3_OK);
    }
    ~world() {
        eagle3_session_close(s);
        eagle3_drafter_close(drafter);
        for (llama_sampler * sampler : samplers) {
            llama_sampler_free(sampler);
        }
        llama_free(ctx);
    }
    world(const world &)             = delete;
    world & operator=(const world &) = delete;

    eagle3::model_source & source() const { return *static_cast<eagle3::model_source *>(s->impl->passes()); }

    void begin(int slot) {
        CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
        text[slot].clear();
        for (int i = 0, n = pick(0, 40); i < n; ++i) {
            text[slot].push_back(300 + pick(0, 1000));
        }
        text[slot].push_back(start);
        CHECK(eagle3_prefill(s, slot, text[slot].data(), (int) text[slot].size(), 0) == EAGLE3_OK);
        n_prompt[slot] = (int) text[slot].size();
        text[slot].push_back(eagle3_sample(s, samplers[slot], -1));
    }

    // One round of all slots. Returns the tokens that came of it.
    int round(int kind) {
        std::vector<eagle3_ask> asks;
        const int n_slots = (int) text.size();
        for (int slot = 0; slot < n_slots; ++slot) {
            if ((int) text[slot].size() + MAX_ROWS > N_CTX) {
                begin(slot);
            }
            const int n_max = kind == EAGLE3_CHAIN ? N_CHAIN : EAGLE3_MAX_DRAFT;
            const int width = kind == EAGLE3_CHAIN || !eagle3_can_tree(s) ? 1 : 2;
            asks.push_back(ask_for(slot, text[slot].back(), kind, n_max, 0, width));
        }
        tokens drafted(n_slots), out(n_slots * MAX_ROWS), counts(n_slots);
        CHECK(eagle3_round_draft(s, asks.data(), n_slots, drafted.data()) >= 0);
        CHECK(eagle3_round_decode(s) == EAGLE3_OK);
        CHECK(eagle3_round_verify(s, samplers.data(), out.data(), counts.data()) == EAGLE3_OK);
        int total = 0;
        for (int slot = 0; slot < n_slots; ++slot) {
            for (int k = 0; k < counts[slot]; ++k) {
                CHECK(same_bits(
                    ctx, eagle3_verified_row(s, slot, k), plain[slot]->after(text[slot], n_prompt[slot])));
                text[slot].push_back(out[slot * MAX_ROWS + k]);
            }
            total += counts[slot];
        }
        CHECK(eagle3_round_commit(s, counts.data()) == EAGLE3_OK);
        return total;
    }

    // Goes back, also behind what a draft decoded, or to a saved state, or leaves a part of the text untold.
    void disturb() {
        const int slot = pick(0, (int) text.size() - 1), n_past = eagle3_n_past(s, slot);
        switch (pick(0, 3)) {
        case 0: {
            const int to   = pick(1, n_past);
            const int code = eagle3_rewind(s, slot, to);
            CHECK(code == EAGLE3_OK || code == EAGLE3_E_UNSUPPORTED);  // a state, of a text that was not told
            text[slot].resize((code == EAGLE3_OK ? to : n_past) + 1);
            n_prompt[slot] = std::min(n_prompt[slot], (int) text[slot].size() - 1);
            break;
        }
        case 1: {
            std::vector<uint8_t> state(eagle3_state_size(s, slot));
            const int64_t n = (int64_t) state.size();
            CHECK(eagle3_state_get(s, slot, state.data(), n) == n);
            CHECK(eagle3_state_set(s, slot, state.data(), n) == EAGLE3_OK);
            break;
        }
        case 2:
            CHECK(eagle3_settle(s, slot) == EAGLE3_OK);
            CHECK(eagle3_state_reset(s, slot, n_past) == EAGLE3_OK);
            break;
        default:
            CHECK(eagle3_session_set_capture(s, 0) == EAGLE3_OK);
            round(EAGLE3_CHAIN);
            CHECK(eagle3_session_set_capture(s, 1) == EAGLE3_OK);
        }
    }
};

// Chains of a fixed length bring 1 + p + p^2 + p^3 tokens a round, as the chance of a token does not depend
// on the one before. Then the planner chooses, and everything is disturbed.
void run(llama_model * model, const char * small, double p, int n_rounds, int n_slots, bool sampled) {
    world w(model, small, n_slots, sampled);
    for (int slot = 0; slot < n_slots; ++slot) {
        w.begin(slot);
    }
    double total = 0.0;
    for (int i = 0; i < n_rounds; ++i) {
        total += w.round(EAGLE3_CHAIN);
    }
    const double mean = total / n_rounds / n_slots, theory = 1.0 + p + p * p + p * p * p;
    fprintf(stderr, "%d slots, %s: %.3f tokens a round, %.3f expected\n", n_slots,
        sampled ? "sampled" : "greedy", mean, theory);
    // three standard deviations of a mean, and what the short beginnings of texts add
    CHECK(std::abs(mean - theory) < 0.03 * theory + 4.0 / std::sqrt((double) n_rounds * n_slots));
    if (w.source().n_reused() > 0) {  // a memory that drops rows keeps what the target kept of a draft
        CHECK(w.source().n_read() < total);
    }
    for (int i = 0; i < n_rounds; ++i) {
        w.round(i % 5 == 4 ? EAGLE3_CHAIN : EAGLE3_PLANNED);
        if (i % 7 == 6) {
            w.disturb();
        }
    }
    const eagle3_memory m = [&] {
        eagle3_memory out;
        CHECK(eagle3_memory_get(w.s, &out) == EAGLE3_OK);
        return out;
    }();
    CHECK(m.head_weights > 0 && m.head_cache > 0 && m.head_compute > 0);
}

// A small model that fails drafts no more, and the text goes on as it would.
void fail(llama_model * model, const char * small) {
    world w(model, small, 1, false);
    w.begin(0);
    w.round(EAGLE3_CHAIN);
    CHECK(w.source().ready(0));
    llama_set_abort_callback(w.drafter->impl->ctx(), [](void *) { return true; }, nullptr);
    for (int i = 0; i < 5; ++i) {
        CHECK(w.round(i % 2 ? EAGLE3_PLANNED : EAGLE3_CHAIN) >= 1 && !w.source().ready(0));
    }
    CHECK(n_told == 1);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: draft_model_test TARGET.gguf SMALL.gguf CHANCE ROUNDS TOKEN\n");
        return 2;
    }
    start = atoi(argv[5]);
    llama_log_set([](ggml_log_level, const char * text,
                      void *) { n_told += strstr(text, "drafts no more") != nullptr; },
        nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr);
    for (const int n_slots : {1, 4}) {
        for (const bool sampled : {false, true}) {
            run(model, argv[2], atof(argv[3]), atoi(argv[4]), n_slots, sampled);
        }
    }
    fail(model, argv[2]);
    llama_model_free(model);
    puts("ok");
    return 0;
}
