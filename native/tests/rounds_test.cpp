// Random rounds against fresh decodes, damaged input and calls out of order; run under the sanitizers.
//     rounds_test TARGET.gguf HEAD.gguf SEED ROUNDS
#include "eagle3.h"
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#define CHECK(x)                                                                          \
    do {                                                                                  \
        if (!(x)) {                                                                       \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #x, eagle3_last_error()); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static std::mt19937 rng;

static int pick(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

static llama_context * new_context(llama_model * model, int n_seq) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = 256 * n_seq;
    p.n_batch         = 64;
    p.n_ubatch        = 24;  // prompts arrive in pieces
    p.n_seq_max       = n_seq;
    p.n_threads       = 1;  // two would wait for each other longer than they work
    p.n_threads_batch = 1;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return llama_init_from_model(model, p);
}

// The logits after text, from a context of its own.
static std::vector<float> fresh(llama_model * model, const std::vector<int32_t> & text) {
    llama_context * ctx = new_context(model, 1);
    llama_batch batch = llama_batch_init(64, 0, 1);
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
    const float * got = llama_get_logits_ith(ctx, row);
    for (size_t i = 0; i < expected.size(); ++i) {
        CHECK(std::fabs(got[i] - expected[i]) <= 1e-4f);
    }
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
    CHECK(eagle3_draft(s, 0, 5, 64, 0, 0, tokens, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_draft(s, 0, -5, 4, 0, 0, tokens, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_decode(s, 0, 5, nullptr, 2) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_decode(s, 0, -1, nullptr, 0) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_rewind(s, 0, eagle3_n_past(s, 0) + 1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_rewind(s, 0, -1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_commit(s, 0, 3) == EAGLE3_OK);  // no round under way
    CHECK(eagle3_n_past(nullptr, 0) == EAGLE3_E_ARGUMENT);
    eagle3_session_close(nullptr);
    eagle3_head_close(nullptr);
}

static void damaged_states(eagle3_session * s, int slot) {
    std::vector<uint8_t> state(eagle3_state_size(s, slot));
    CHECK(eagle3_state_get(s, slot, state.data(), (int64_t) state.size() - 1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_state_get(s, slot, state.data(), (int64_t) state.size()) == (int64_t) state.size());
    CHECK(eagle3_state_set(s, slot, state.data(), (int64_t) state.size() - 1) == EAGLE3_E_FORMAT);
    for (int i = 0; i < 40; ++i) {
        std::vector<uint8_t> bad = state;
        bad[pick(0, 47)] ^= (uint8_t) pick(1, 255);  // the header
        if (eagle3_state_set(s, slot, bad.data(), (int64_t) bad.size()) == EAGLE3_OK) {
            CHECK(eagle3_n_past(s, slot) <= 256);  // a reserved byte, or positions that hang together too
        }
    }
    CHECK(eagle3_state_set(s, slot, state.data(), (int64_t) state.size()) == EAGLE3_OK);
}

// One slot: random drafts, some right, some of the head's, random acceptance; logits equal a fresh decode's.
static void rounds(llama_model * model, llama_context * ctx, eagle3_session * s, int n_slots, int n_rounds) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<std::vector<int32_t>> text(n_slots);
    llama_sampler * greedy = llama_sampler_init_greedy();
    for (int r = 0; r < n_rounds; ++r) {
        const int slot = pick(0, n_slots - 1);
        std::vector<int32_t> & t = text[slot];
        const int n_past = eagle3_n_past(s, slot);
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
        int32_t draft[64];
        float   probs[64];
        int n = eagle3_draft(s, slot, token, pick(0, 6), 0, pick(0, 3) == 0 ? 0.02f : 0.0f, draft, probs);
        CHECK(n >= 0);
        for (int i = 0; i < n; ++i) {
            CHECK(draft[i] >= 0 && draft[i] < n_vocab && probs[i] > 0.0f && probs[i] <= 1.0001f);
        }
        if (n == 0 && n_past < 240) {
            n = pick(0, 5);
            for (int i = 0; i < n; ++i) {
                draft[i] = pick(3, n_vocab - 1);
            }
        }
        if (n_past >= 256) {
            CHECK(eagle3_decode(s, slot, token, draft, n) == EAGLE3_E_ARGUMENT);  // full
            CHECK(eagle3_rewind(s, slot, 10) == EAGLE3_OK);
            t.resize(10);
            continue;
        }
        CHECK(eagle3_decode(s, slot, token, draft, n) == EAGLE3_OK);
        CHECK(eagle3_decode(s, slot, token, draft, n) == EAGLE3_E_ARGUMENT);  // a round is under way
        int32_t out[64];
        const int sampled = eagle3_verify(s, slot, greedy, out);
        CHECK(sampled >= 1 && sampled <= n + 1);
        const int keep = pick(0, n + 1);  // not what verification says: bookkeeping must hold for any
        if (keep > 0 && pick(0, 7) == 0) {
            std::vector<int32_t> upto = t;
            upto.push_back(token);
            upto.insert(upto.end(), draft, draft + keep - 1);
            check_rows(model, ctx, keep - 1, upto);
        }
        CHECK(eagle3_commit(s, slot, keep) == EAGLE3_OK);
        if (keep > 0) {
            t.push_back(token);
            t.insert(t.end(), draft, draft + keep - 1);
        }
        if (pick(0, 20) == 0) {
            damaged_states(s, slot);
        }
    }
    llama_sampler_free(greedy);
}

// Truncated and flipped heads: an error or a head that works, never a crash.
static void damaged_heads(const char * path, llama_model * model) {
    std::ifstream in(path, std::ios::binary);
    const std::string good((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const std::string copy = std::string(path) + ".damaged";
    for (int i = 0; i < 40; ++i) {
        std::string bad = good;
        if (i % 2) {
            bad.resize(pick(0, (int) good.size() - 1));
        } else {
            for (int k = 0; k < 4; ++k) {
                bad[pick(0, std::min<int>(4000, (int) bad.size() - 1))] ^= (char) (1 << pick(0, 7));
            }
        }
        std::ofstream(copy, std::ios::binary).write(bad.data(), (std::streamsize) bad.size());
        eagle3_head * head = nullptr;
        if (eagle3_head_open(copy.c_str(), model, &head) == EAGLE3_OK) {
            eagle3_head_close(head);
        } else {
            CHECK(eagle3_last_error()[0] != '\0' && head == nullptr);
        }
    }
    remove(copy.c_str());
    eagle3_head * head = nullptr;
    CHECK(eagle3_head_open("no such file", model, &head) == EAGLE3_E_FILE);
    CHECK(eagle3_head_open(nullptr, model, &head) == EAGLE3_E_ARGUMENT);
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s TARGET.gguf HEAD.gguf SEED ROUNDS\n", argv[0]);
        return 2;
    }
    rng.seed((unsigned) atoi(argv[3]));
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr && eagle3_abi_version() == EAGLE3_ABI_VERSION);

    damaged_heads(argv[2], model);
    for (int n_slots = 1; n_slots <= 3; n_slots += 2) {
        llama_context * ctx = new_context(model, n_slots);
        eagle3_head * head = nullptr;
        eagle3_session * s = nullptr;
        CHECK(eagle3_head_open(argv[2], model, &head) == EAGLE3_OK);
        CHECK(eagle3_session_open(ctx, head, n_slots + 1, &s) == EAGLE3_E_ARGUMENT);
        CHECK(eagle3_session_open(ctx, head, n_slots, &s) == EAGLE3_OK);
        wrong_calls(s);
        rounds(model, ctx, s, n_slots, atoi(argv[4]));
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
    }
    llama_model_free(model);
    puts("ok");
    return 0;
}
