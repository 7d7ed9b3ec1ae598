// Rounds of several slots: each draft is cut to its own slot's room, and every row has the bits that its text
// has when it is decoded plainly and alone; run under the sanitizers.
//     slots_test CASE TARGET.gguf [HEAD.gguf]    CASE: see main
#include "asks.hpp"
#include "check.hpp"

#include <memory>
#include <random>
#include <string>
#include <utility>

namespace {

constexpr int N_CTX = 256, MAX_ROWS = 64;

std::mt19937 rng(1);

int pick(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

struct fixture {
    llama_model * model;
    llama_context * ctx;
    eagle3_head * head     = nullptr;
    eagle3_session * s     = nullptr;
    llama_sampler * greedy = llama_sampler_init_greedy();
    std::vector<std::unique_ptr<plain_decodes>> plain;  // of each slot
    std::vector<tokens> text;
    std::vector<int> n_prompt;

    fixture(llama_model * m, const char * head_path, int n_slots, int n_ubatch)
        : model(m), ctx(make_context(m, n_slots, N_CTX, MAX_ROWS, n_ubatch)), text(n_slots),
          n_prompt(n_slots, 0) {
        if (head_path) {
            CHECK(eagle3_head_open(head_path, m, &head) == EAGLE3_OK);
        }
        CHECK(eagle3_session_open(ctx, head, n_slots, &s) == EAGLE3_OK);
        for (int slot = 0; slot < n_slots; ++slot) {
            plain.push_back(std::make_unique<plain_decodes>(m, N_CTX));
        }
    }
    ~fixture() {
        eagle3_session_close(s);
        eagle3_head_close(head);
        llama_sampler_free(greedy);
        llama_free(ctx);
    }
    fixture(const fixture &)             = delete;
    fixture & operator=(const fixture &) = delete;

    // Drafting costs next to nothing: the planner drafts all that it may.
    void plan() {
        eagle3_costs c = {};
        for (int n = 1; n <= MAX_ROWS; ++n) {
            c.layers[n] = 1e-3f * (1.0f + 1e-6f * n);
            c.head[n]   = 1e-9f;
        }
        CHECK(eagle3_plan_set(s, &c) == EAGLE3_OK);
    }

    void begin(int slot, int n) {
        CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
        text[slot].clear();
        for (int i = 0; i < n; ++i) {
            text[slot].push_back(3 + (7 * slot + i * i) % 300);
        }
        n_prompt[slot] = n;
        for (int at = 0; at < n; at += MAX_ROWS) {
            CHECK(eagle3_prefill(s, slot, &text[slot][at], std::min(MAX_ROWS, n - at), 0) == EAGLE3_OK);
        }
    }

    // Drafts; n has the number of draft tokens of each ask.
    void draft(const std::vector<eagle3_ask> & asks, tokens & n) {
        n.assign(asks.size(), -1);
        const int total = eagle3_round_draft(s, asks.data(), (int) asks.size(), n.data());
        CHECK(total >= 0 && total + (int) asks.size() <= MAX_ROWS);
    }

    // The rest of the round: what verification reaches has the bits of its text, and all of that stays.
    void finish(const std::vector<eagle3_ask> & asks, const tokens & n) {
        CHECK(eagle3_round_decode(s) == EAGLE3_OK);
        const std::vector<llama_sampler *> samplers(asks.size(), greedy);
        tokens out(asks.size() * MAX_ROWS), counts(asks.size());
        CHECK(eagle3_round_verify(s, samplers.data(), out.data(), counts.data()) == EAGLE3_OK);
        for (size_t i = 0; i < asks.size(); ++i) {
            const int slot = asks[i].slot;
            CHECK(counts[i] >= 1 && counts[i] <= n[i] + 1);
            for (int k = 0; k < counts[i]; ++k) {
                text[slot].push_back(k ? out[i * MAX_ROWS + k - 1] : asks[i].token);
                CHECK(same_bits(
                    ctx, eagle3_verified_row(s, slot, k), plain[slot]->after(text[slot], n_prompt[slot])));
            }
        }
        CHECK(eagle3_round_commit(s, counts.data()) == EAGLE3_OK);
        for (size_t slot = 0; slot < text.size(); ++slot) {
            CHECK(eagle3_n_past(s, (int) slot) == (int) text[slot].size());
        }
    }
};

const int32_t PARENTS[12] = {-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 6, 9};
const int32_t RANKS[12]   = {0, 1, 2, 0, 1, 0, 0, 2, 0, 0, 1, 0};
const int32_t GIVEN[12]   = {20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
constexpr int N_KINDS     = 8;

bool drafts_nothing(int kind) {
    return kind == EAGLE3_PLAIN || kind == EAGLE3_PROMPT;
}

// One of every kind, each with twelve nodes or more to draft, if it drafts.
eagle3_ask some_ask(int slot, int kind) {
    const int32_t token = 9 + slot;
    switch (kind) {
    case 0:
        return ask_for(slot, token, EAGLE3_PLANNED, 20, 0, 4);
    case 1:
        return ask_for(slot, token, EAGLE3_PLAIN);
    case 2:
        return ask_for(slot, token, EAGLE3_CHAIN, 12);
    case 3:
        return ask_for(slot, token, EAGLE3_TREE, 12, 6, 4);
    case 4:
        return ask_choices(slot, token, PARENTS, RANKS, 12);
    case 5:
        return ask_given(slot, token, GIVEN, 12);
    case 6:
        return ask_for(slot, token, EAGLE3_PROMPT);
    default:
        return ask_given(slot, token, GIVEN, 12, PARENTS);
    }
}

// Slots of all kinds in one round, one of them at its context's end. It drafts as much as fits; the others
// draft what they would without it.
void near_the_end(llama_model * model, const char * head, int n_slots, int n_ubatch) {
    fixture f(model, head, n_slots, n_ubatch);
    f.plan();
    const int share = (n_ubatch - n_slots) / n_slots;
    for (int last = 0; last < N_KINDS; ++last) {
        for (const int others : {0, pick(1, N_KINDS - 1)}) {
            for (const int room : {0, 1, 2}) {
                const int ends = pick(0, n_slots - 1);
                std::vector<eagle3_ask> asks;
                for (int slot = 0; slot < n_slots; ++slot) {
                    f.begin(slot, slot == ends ? N_CTX - 1 - room : 10 + slot);
                    asks.push_back(some_ask(slot, slot == ends ? last : (others + slot) % N_KINDS));
                }
                tokens n;
                f.draft(asks, n);
                for (int i = 0; i < n_slots; ++i) {
                    const int kind = asks[i].kind;
                    const int most =
                        std::min(kind == EAGLE3_PLANNED ? 20 : std::min(12, share), i == ends ? room : 99);
                    CHECK(n[i] <= (drafts_nothing(kind) ? 0 : most));
                    CHECK(drafts_nothing(kind) || kind == EAGLE3_PLANNED || n[i] == most);
                }
                f.finish(asks, n);
            }
        }
    }
}

// What planned drafts share of a batch: each slot's own n_max, its room, and the largest n_max for all.
void planned_shares(llama_model * model, const char * head) {
    for (const int n_slots : {2, 4}) {
        fixture f(model, head, n_slots, MAX_ROWS);
        f.plan();
        for (const int n_max : {0, 1, 3, 30}) {
            for (const int room : {0, 1, 2, 100}) {
                std::vector<eagle3_ask> asks;
                int left = 0;
                for (int slot = 0; slot < n_slots; ++slot) {
                    f.begin(slot, slot ? 12 + slot : N_CTX - 1 - room);
                    asks.push_back(ask_for(slot, 9, EAGLE3_PLANNED, slot ? n_max : 20, 0, slot % 2 ? 3 : 1));
                    left = std::max(left, slot ? n_max : std::min(20, room));
                }
                f.plan();  // what the planner has seen of the clock is forgotten: it would look at a plain
                           // round
                tokens n;
                f.draft(asks, n);
                int total = 0, own = 0;
                for (int slot = 0; slot < n_slots; ++slot) {
                    const int most = slot ? n_max : std::min(20, room);
                    CHECK(n[slot] <= most);
                    total += n[slot];
                    own += most;
                }
                CHECK(total <= left && (own > left || total == own || own > 3 * n_slots));
                f.finish(asks, n);
            }
        }
    }
}

// Of a tree, the nodes are drafted whose path is as probable as p_min, and no others; none, if none is.
void probable_paths(llama_model * model, const char * head) {
    fixture f(model, head, 1, MAX_ROWS);
    const auto paths = [&](float p_min) {  // the tokens of each drafted path, and its probability
        f.begin(0, 20);
        tokens n, ids(63), parents(63);
        std::vector<float> probs(63);
        f.draft({ask_for(0, 9, EAGLE3_TREE, 63, 3, 3, p_min)}, n);
        CHECK(eagle3_round_drafted(f.s, 0, ids.data(), parents.data(), probs.data(), nullptr) == n[0]);
        std::vector<std::pair<float, tokens>> out;
        for (int i = 0; i < n[0]; ++i) {
            out.push_back(parents[i] < 0 ? std::make_pair(1.0f, tokens()) : out[parents[i]]);
            out.back().first *= probs[i];
            out.back().second.push_back(ids[i]);
        }
        std::sort(out.begin(), out.end());
        return out;
    };
    const std::vector<std::pair<float, tokens>> all = paths(0.0f);
    CHECK(all.size() == 3 + 9 + 9);
    for (size_t i = 0; i < all.size(); i += 4) {  // between two of them
        const float p_min = i ? 0.5f * (all[i - 1].first + all[i].first) : 0.5f * all[0].first;
        CHECK(!i || all[i - 1].first < p_min);
        CHECK(paths(p_min) == decltype(all)(all.begin() + (long) i, all.end()));
    }
    CHECK(paths(1.5f).empty());
}

// A slot that is full has no round, and the others' is as good as it was.
void full_slots(llama_model * model, const char * head) {
    fixture f(model, head, 2, MAX_ROWS);
    f.plan();
    f.begin(0, N_CTX);
    f.begin(1, 12);
    tokens n(2);
    for (int kind = 0; kind < N_KINDS; ++kind) {
        const std::vector<eagle3_ask> asks = {some_ask(1, 2), some_ask(0, kind)};
        CHECK(eagle3_round_draft(f.s, asks.data(), 2, n.data()) == EAGLE3_E_ARGUMENT);
        CHECK(strstr(eagle3_last_error(), "slot 0 is full") != nullptr);
        CHECK(eagle3_n_past(f.s, 0) == N_CTX && eagle3_n_past(f.s, 1) == (int) f.text[1].size());
        const std::vector<eagle3_ask> one = {some_ask(1, kind)};
        f.draft(one, n);
        CHECK(eagle3_round_draft(f.s, asks.data(), 2, tokens(2).data()) == EAGLE3_E_ARGUMENT);
        f.finish(one, n);  // the draft from before
    }
}

// 5 to 32 slots: what waited for the heads' passes is more than one pass holds, and each slot's share of the
// batch is small.
void many_slots(llama_model * model, const char * head) {
    for (const int n_slots : {5, 9, 16, 31, 32}) {
        fixture f(model, head, n_slots, MAX_ROWS);
        f.plan();
        for (int slot = 0; slot < n_slots; ++slot) {
            f.begin(slot, 4 + slot % 7);
        }
        for (int r = 0; r < 12; ++r) {
            std::vector<eagle3_ask> asks;
            for (int slot = 0; slot < n_slots; ++slot) {
                asks.push_back(some_ask(slot, r % 6 < 4 ? 1 : (slot + r) % N_KINDS));
                asks.back().token = 9 + (slot + r) % 50;
            }
            std::shuffle(asks.begin(), asks.end(), rng);
            tokens n;
            f.draft(asks, n);
            for (int i = 0; i < n_slots; ++i) {
                const int kind = asks[i].kind, share = std::min(12, (MAX_ROWS - n_slots) / n_slots);
                CHECK(kind == EAGLE3_PLANNED || n[i] == (drafts_nothing(kind) ? 0 : share));
            }
            f.finish(asks, n);
        }
    }
}

// A random tree, level by level.
int random_tree(int32_t * ids, int32_t * parents, int n_most) {
    const int n = pick(0, n_most);
    std::vector<int> depth;
    for (int i = 0; i < n; ++i) {
        int at     = i ? parents[i - 1] : -1;  // levels come in order: no parent comes before the last one's
        parents[i] = std::min(i - 1, at + (pick(0, 2) == 0 ? pick(1, 2) : 0));
        ids[i]     = pick(3, 300);
    }
    return n;
}

// Every row of rounds of trees, of chains and of plain rows, also those that verification does not reach.
void all_rows(llama_model * model, int n_slots, int n_rounds) {
    fixture f(model, nullptr, n_slots, MAX_ROWS);
    const int most = MAX_ROWS / n_slots - 1;
    for (int r = 0; r < n_rounds; ++r) {
        std::vector<std::vector<int32_t>> ids(n_slots, tokens(MAX_ROWS)), parents = ids;
        std::vector<eagle3_ask> asks;
        for (int slot = 0; slot < n_slots; ++slot) {
            if (f.text[slot].empty() || f.text[slot].size() > 150) {
                f.begin(slot, pick(1, 60));
            }
            const int n = random_tree(ids[slot].data(), parents[slot].data(), most);
            asks.push_back(
                ask_given(slot, pick(3, 300), ids[slot].data(), n, r % 3 ? parents[slot].data() : nullptr));
        }
        tokens n;
        f.draft(asks, n);
        CHECK(eagle3_round_decode(f.s) == EAGLE3_OK);
        std::vector<std::vector<tokens>> texts(n_slots);  // of each slot, of each row
        std::vector<std::vector<size_t>> depth(n_slots);
        for (int slot = 0; slot < n_slots; ++slot) {
            CHECK(n[slot] == asks[slot].n);
            texts[slot] = {f.text[slot]};
            texts[slot][0].push_back(asks[slot].token);
            depth[slot] = {0};
            for (int i = 0; i < n[slot]; ++i) {
                const int above = asks[slot].parents ? parents[slot][i] + 1 : i;
                texts[slot].push_back(texts[slot][above]);
                texts[slot].back().push_back(ids[slot][i]);
                depth[slot].push_back(depth[slot][above] + 1);
            }
        }
        int next = 0;  // the rows of a batch lie level by level over all slots
        std::vector<std::vector<int>> row(n_slots);
        for (int slot = 0; slot < n_slots; ++slot) {
            row[slot].resize(texts[slot].size());
        }
        for (size_t level = 0; level <= (size_t) MAX_ROWS; ++level) {
            for (int slot = 0; slot < n_slots; ++slot) {
                for (size_t i = 0; i < texts[slot].size(); ++i) {
                    row[slot][i] = depth[slot][i] == level ? next++ : row[slot][i];
                }
            }
        }
        for (int slot = 0; slot < n_slots; ++slot) {
            for (size_t i = 0; i < texts[slot].size(); ++i) {
                CHECK(same_bits(f.ctx, row[slot][i], f.plain[slot]->after(texts[slot][i], f.n_prompt[slot])));
            }
        }
        tokens keep(n_slots, 1);
        for (int slot = 0; slot < n_slots; ++slot) {
            f.text[slot].push_back(asks[slot].token);
            if (!asks[slot].parents) {
                keep[slot] = 1 + n[slot] / 2;
                f.text[slot].insert(f.text[slot].end(), ids[slot].begin(), ids[slot].begin() + n[slot] / 2);
            }
        }
        CHECK(eagle3_round_commit(f.s, keep.data()) == EAGLE3_OK);
    }
}

// A prompt whole and in chunks: the same logits after it.
void cut_prompts(llama_model * model, bool flash) {
    tokens text(300);
    for (int32_t & t : text) {
        t = pick(3, 300);
    }
    llama_context * ctx = make_context(model, 1, 512, 512, 512, flash);
    std::vector<float> whole;
    for (const size_t size : {text.size(), (size_t) 7, (size_t) 64, (size_t) 100}) {
        llama_memory_clear(llama_get_memory(ctx), true);
        for (size_t at = 0; at < text.size(); at += size) {
            const auto n = (int32_t) std::min(size, text.size() - at);
            CHECK(llama_decode(ctx, llama_batch_get_one(&text[at], n)) == 0);
        }
        if (whole.empty()) {
            const float * l = llama_get_logits_ith(ctx, -1);
            whole.assign(l, l + llama_vocab_n_tokens(llama_model_get_vocab(model)));
        }
        CHECK(same_bits(ctx, -1, whole));
    }
    llama_free(ctx);
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 2 ? argv[1] : "";
    const char * head      = argc > 3 ? argv[3] : nullptr;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argc > 2 ? argv[2] : "", llama_model_default_params());
    if (what == "rooms" && head && model) {
        near_the_end(model, head, 2, MAX_ROWS);
        near_the_end(model, head, 4, 16);
        planned_shares(model, head);
        full_slots(model, head);
        probable_paths(model, head);
    } else if (what == "many" && head && model) {
        many_slots(model, head);
    } else if (what == "bits" && model) {
        all_rows(model, 1, 12);
        all_rows(model, 3, 12);
        all_rows(model, 8, 6);
    } else if (what == "prompts" && model) {
        cut_prompts(model, true);
        cut_prompts(model, false);
    } else {
        fprintf(stderr, "usage: slots_test rooms|many|bits|prompts TARGET.gguf [HEAD.gguf]\n");
        return 2;
    }
    llama_model_free(model);
    puts("ok");
    return 0;
}
