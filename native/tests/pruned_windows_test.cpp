// Rounds over a pruned sliding window (swa_full = false): every row that stays has the bits of plain decoding
// in such a cache, whatever was taken back before, and what cannot be taken back is refused; run under the
// sanitizers.
//     pruned_windows_test CASE TARGET.gguf [N_SLOTS N_ROUNDS]    CASE: chains, trees, or failures; see main
#include "asks.hpp"
#include "check.hpp"
#include "script.hpp"

#include "llama-ext.h"

#include <memory>
#include <random>
#include <stdexcept>
#include <string>

namespace {

constexpr int N_CTX = 768, N_BATCH = 256, N_UBATCH = 64, MAX_ROWS = 64, N_PROMPT = 100;

std::mt19937 rng(1);
int fails_after = -1;  // tensors, before the evaluation of one fails; none if negative

int pick(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

bool evaluated(ggml_tensor *, bool, void *) {
    if (fails_after >= 0 && fails_after-- == 0) {
        throw std::runtime_error("the callback's");
    }
    return false;  // the tensor itself is not wanted
}

llama_context * pruned(llama_model * model, int n_seq, bool flash, bool callback = false) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = N_CTX * n_seq;
    p.n_batch              = N_BATCH;
    p.n_ubatch             = N_UBATCH;
    p.n_seq_max            = n_seq;
    p.swa_full             = false;
    p.n_threads = p.n_threads_batch = 1;
    p.flash_attn_type               = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.cb_eval                       = callback ? evaluated : nullptr;
    llama_context * ctx             = llama_init_from_model(model, p);
    CHECK(ctx != nullptr);
    return ctx;
}

// One sequence that is decoded plainly: its prompt in batches, then token by token.
struct plain_text {
    llama_context * ctx;
    int n = 0;

    plain_text(llama_model * model, bool flash) : ctx(pruned(model, 1, flash)) {}
    ~plain_text() { llama_free(ctx); }
    plain_text(const plain_text &)             = delete;
    plain_text & operator=(const plain_text &) = delete;

    void add(const int32_t * ids, int count) {
        CHECK(llama_decode(ctx, llama_batch_get_one(const_cast<int32_t *>(ids), count)) == 0);
        n += count;
    }
    void go_back(int to) {
        CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, to, -1));
        n = to;
    }
    std::vector<float> logits() const {
        const float * l = llama_get_logits_ith(ctx, -1);
        return {l, l + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))};
    }
};

struct fixture {
    llama_model * model;
    bool flash;
    llama_context * ctx = nullptr;
    eagle3_session * s  = nullptr;
    std::vector<std::unique_ptr<plain_text>> plain;  // of each slot
    std::vector<std::unique_ptr<script>> scripts;
    tokens least;  // of each slot, the text without which it has no whole window

    fixture(llama_model * m, int n_slots, bool flash_attn, bool callback = false)
        : model(m), flash(flash_attn) {
        least.resize(n_slots);
        open(pruned(m, n_slots, flash, callback), n_slots);
        for (int slot = 0; slot < n_slots; ++slot) {
            plain.push_back(std::make_unique<plain_text>(m, flash));
            scripts.push_back(std::make_unique<script>());
        }
    }
    ~fixture() {
        eagle3_session_close(s);
        llama_free(ctx);
    }
    fixture(const fixture &)             = delete;
    fixture & operator=(const fixture &) = delete;

    void open(llama_context * in, int n_slots) {
        ctx = in;
        CHECK(eagle3_session_open(ctx, nullptr, n_slots, &s) == EAGLE3_OK);
    }

    int size() const { return (int) plain.size(); }
    int n(int slot) const { return plain[slot]->n; }

    void prompt(int slot, int count) {
        tokens ids;
        for (int i = 0; i < count; ++i) {
            ids.push_back(pick(3, 120));
        }
        for (int at = 0; at < count; at += N_UBATCH) {
            const int some = std::min(N_UBATCH, count - at);
            CHECK(eagle3_prefill(s, slot, &ids[at], some, 0) == EAGLE3_OK);
            plain[slot]->add(&ids[at], some);
        }
        CHECK(same_bits(ctx, -1, plain[slot]->logits()));
    }

    void begin(int slot) {
        CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
        plain[slot]->go_back(0);
        least[slot] = 0;
        prompt(slot, N_PROMPT + 7 * slot);
    }

    // As a chat's next turn, which leaves out some of the last answer.
    void go_back(int slot, int by) {
        by = std::min(by, n(slot) - least[slot]);
        CHECK(eagle3_rewind(s, slot, n(slot) - by) == EAGLE3_OK);
        plain[slot]->go_back(n(slot) - by);
    }

    // Everything goes to another context, by the states of all sequences, or by each one's own.
    void move(bool whole) {
        llama_context * to = pruned(model, size(), flash);
        std::vector<uint8_t> data;
        for (int slot = whole ? size() - 1 : 0; slot < size(); ++slot) {
            data.resize(whole ? llama_state_get_size(ctx) : llama_state_seq_get_size(ctx, slot));
            if (whole) {
                data.resize(llama_state_get_data(ctx, data.data(), data.size()));
                CHECK(llama_state_set_data(to, data.data(), data.size()) == data.size());
            } else {
                CHECK(llama_state_seq_get_data(ctx, data.data(), data.size(), slot) == data.size());
                CHECK(llama_state_seq_set_data(to, data.data(), data.size(), slot) == data.size());
            }
        }
        eagle3_session_close(s);
        llama_free(ctx);
        open(to, size());
        for (int slot = 0; slot < size(); ++slot) {
            CHECK(eagle3_state_reset(s, slot, n(slot)) == EAGLE3_OK);
            least[slot] = whole ? least[slot] : n(slot);  // a sequence's state has the window alone
        }
    }
};

// One slot's draft, level by level, and the path of it that its sampler says.
struct slot_draft {
    tokens ids, parents, path;  // path: the draft tokens that stay
    bool tree;

    slot_draft(int most, bool is_tree) : tree(is_tree) {
        const int n = pick(0, most);
        for (int i = 0; i < n; ++i) {
            const int at = i ? parents[i - 1] : -1;  // no parent comes before the last one's
            parents.push_back(!tree ? i - 1 : std::min(i - 1, at + (pick(0, 2) == 0 ? pick(1, 2) : 0)));
            ids.push_back(3 + (i * 37 + n) % 117);  // siblings differ
        }
        const int leaf = pick(-1, n - 1);
        for (int i = leaf; i >= 0; i = parents[i]) {
            path.insert(path.begin(), ids[i]);
        }
    }
};

// A round of some slots. What its rows say is compared in the order of the path that stays.
void round_of(fixture & f, const std::vector<int> & of, bool trees) {
    const int most = MAX_ROWS / (int) of.size() - 1;
    std::vector<slot_draft> drafts;
    std::vector<eagle3_ask> asks;
    std::vector<llama_sampler *> samplers;
    for (size_t i = 0; i < of.size(); ++i) {
        drafts.emplace_back(std::min(most, pick(0, 3) ? 8 : 63), trees);
    }
    for (size_t i = 0; i < of.size(); ++i) {
        const slot_draft & d = drafts[i];
        asks.push_back(ask_given(
            of[i], pick(3, 120), d.ids.data(), (int) d.ids.size(), trees ? d.parents.data() : nullptr));
        script & told = *f.scripts[of[i]];
        told.says     = d.path;
        told.says.push_back(1);  // none of the draft tokens
        told.next = 0;
        samplers.push_back(told.sampler);
    }
    tokens drafted(of.size()), out(of.size() * MAX_ROWS), counts(of.size());
    CHECK(eagle3_round_draft(f.s, asks.data(), (int) asks.size(), drafted.data()) >= 0);
    CHECK(eagle3_round_decode(f.s) == EAGLE3_OK);
    CHECK(eagle3_round_verify(f.s, samplers.data(), out.data(), counts.data()) == EAGLE3_OK);
    for (size_t i = 0; i < of.size(); ++i) {
        CHECK(drafted[i] == asks[i].n && counts[i] == (int) drafts[i].path.size() + 1);
        plain_text & plain = *f.plain[of[i]];
        for (int k = 0; k < counts[i]; ++k) {
            plain.add(k ? &drafts[i].path[k - 1] : &asks[i].token, 1);
            CHECK(same_bits(f.ctx, eagle3_verified_row(f.s, of[i], k), plain.logits()));
        }
    }
    CHECK(eagle3_round_commit(f.s, counts.data()) == EAGLE3_OK);
}

void rounds(llama_model * model, int n_slots, int n_rounds, bool flash, bool trees) {
    fixture f(model, n_slots, flash);
    int n_full = 0;
    for (int slot = 0; slot < n_slots; ++slot) {
        f.begin(slot);
    }
    for (int r = 0; r < n_rounds; ++r) {
        std::vector<int> of;
        for (int slot = 0; slot < n_slots; ++slot) {
            if (f.n(slot) > N_CTX - MAX_ROWS) {
                f.begin(slot);
                ++n_full;
            }
            if (pick(0, 4) || (slot == n_slots - 1 && of.empty())) {
                of.push_back(slot);
            }
        }
        round_of(f, of, trees && r % 4);
        if (r % 7 == 3) {
            f.go_back(of[0], pick(1, 20));
        }
        if (r % 6 == 5) {
            for (const int slot : of) {
                f.prompt(slot, pick(1, 63));
            }
        }
        if (r % 40 == 39) {
            f.move(r % 80 == 39);
        }
    }
    CHECK(n_full > 0 || n_rounds < 100);
}

// Where the window is gone, a known text is decoded again. Of one that the session does not know, going back
// is refused, and nothing has changed.
void refusals(llama_model * model) {
    fixture f(model, 2, true);
    f.begin(0);
    f.begin(1);
    for (const int beyond : {0, 100, 300, 400}) {  // tokens before the last one whose window is whole
        f.begin(0);
        while (f.n(0) < 600) {
            f.prompt(0, 50);
        }
        const int first = llama_memory_seq_pos_min(llama_get_memory(f.ctx), 0);
        const int to    = first + llama_model_n_swa(model) - 2 - beyond;
        CHECK(first > 300 && to > 0 && eagle3_rewind(f.s, 0, to) == EAGLE3_OK);
        CHECK(eagle3_n_past(f.s, 0) == to && eagle3_settle(f.s, 0) == EAGLE3_OK);
        CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), 0) == to - 1);
        round_of(f, {1}, beyond == 100);
    }
    f.begin(0);
    while (f.n(0) < 600) {
        f.prompt(0, 50);
    }
    CHECK(eagle3_state_reset(f.s, 0, f.n(0)) == EAGLE3_OK);  // now it knows nothing of the text
    const int first = llama_memory_seq_pos_min(llama_get_memory(f.ctx), 0);
    CHECK(eagle3_rewind(f.s, 0, first + llama_model_n_swa(model) - 2) == EAGLE3_E_UNSUPPORTED);
    CHECK(eagle3_n_past(f.s, 0) == f.n(0));
    CHECK(llama_memory_seq_pos_min(llama_get_memory(f.ctx), 0) == first);
    CHECK(eagle3_rewind(f.s, 1, 1) == EAGLE3_OK && eagle3_n_past(f.s, 1) == 1);  // its window is whole
    // as far back as there is a window
    f.go_back(0, f.n(0) - (first + (int) llama_model_n_swa(model) - 1));
    round_of(f, {0}, false);
}

// A prompt of several micro-batches fails: the slot goes on as before. If its window is gone, its text is
// decoded again.
void failed_prompts(llama_model * model) {
    fixture f(model, 2, true, true);
    int n_failed = 0;
    for (int after = 0; after < 3000; after += 97) {
        f.begin(0);
        while (f.n(0) < 400) {
            f.prompt(0, 50);
        }
        tokens ids(N_BATCH, 9);
        fails_after    = after;
        const int code = eagle3_prefill(f.s, 0, ids.data(), N_BATCH, 0);
        if (fails_after >= 0) {  // it was shorter
            CHECK(code == EAGLE3_OK);
            fails_after = -1;
            break;
        }
        CHECK(code < 0);
        ++n_failed;
        CHECK(eagle3_n_past(f.s, 0) == f.n(0) && eagle3_settle(f.s, 0) == EAGLE3_OK);
        CHECK(llama_memory_seq_pos_max(llama_get_memory(f.ctx), 0) == f.n(0) - 1);
        round_of(f, {0}, false);
    }
    CHECK(n_failed > 2);
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 2 ? argv[1] : "";
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argc > 2 ? argv[2] : "", llama_model_default_params());
    const int n_slots = argc > 4 ? atoi(argv[3]) : 0, n_rounds = argc > 4 ? atoi(argv[4]) : 0;
    if (what == "chains" && model && n_slots) {
        rounds(model, n_slots, n_rounds, true, false);
        rounds(model, n_slots, n_rounds, false, false);
    } else if (what == "trees" && model && n_slots) {
        rounds(model, n_slots, n_rounds, true, true);
    } else if (what == "failures" && model) {
        refusals(model);
        failed_prompts(model);
    } else {
        fprintf(stderr, "usage: pruned_windows_test chains|trees|failures TARGET.gguf [N_SLOTS N_ROUNDS]\n");
        return 2;
    }
    llama_model_free(model);
    puts("ok");
    return 0;
}
