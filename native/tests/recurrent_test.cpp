// What a recurrent or hybrid memory takes back: as many tokens as it says, with the logits of plain decoding
// afterwards, bit for bit. Nothing changes where it refuses.
//     recurrent_test TARGET.gguf
#include "check.hpp"

#include "llama-ext.h"

#include <memory>
#include <random>

namespace {

constexpr int N_PROMPT = 5, N_RS = 4, N_CTX = 128;

struct freed {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};
using context = std::unique_ptr<llama_context, freed>;

context open(llama_model * model, int n_seq, int n_rs, int n_ubatch = 32, bool unified = false) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = N_CTX * n_seq;
    p.n_batch              = 64;
    p.n_ubatch             = n_ubatch;
    p.n_seq_max            = n_seq;
    p.n_rs_seq             = n_rs;
    p.kv_unified           = unified;
    p.n_threads = p.n_threads_batch = 1;
    context ctx(llama_init_from_model(model, p));
    CHECK(ctx != nullptr);
    return ctx;
}

struct row {
    int token, pos, seq;
};

// All rows have logits. Returns llama_decode's code.
int decode(llama_context * ctx, const std::vector<row> & rows) {
    llama_batch batch = llama_batch_init((int) rows.size(), 0, 1);
    for (const row & r : rows) {
        const int i        = batch.n_tokens++;
        batch.token[i]     = r.token;
        batch.pos[i]       = r.pos;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = r.seq;
        batch.logits[i]    = 1;
    }
    const int code = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return code;
}

// The logits behind each text, decoded token by token without snapshots.
class plain_logits {
  public:
    explicit plain_logits(llama_model * model)
        : ctx_(open(model, 1, 0)), n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {}

    const std::vector<float> & after(const tokens & text) {
        if (!known_.count(text)) {
            if (held_.size() > text.size() || !std::equal(held_.begin(), held_.end(), text.begin())) {
                llama_memory_clear(llama_get_memory(ctx_.get()), true);
                held_.clear();
            }
            while (held_.size() < text.size()) {
                CHECK(decode(ctx_.get(), {{text[held_.size()], (int) held_.size(), 0}}) == 0);
                held_.push_back(text[held_.size()]);
                const float * l = llama_get_logits_ith(ctx_.get(), 0);
                known_[held_].assign(l, l + n_vocab_);
            }
        }
        return known_.at(text);
    }

  private:
    context ctx_;
    int n_vocab_;
    tokens held_;
    std::map<tokens, std::vector<float>> known_;
};

struct world {
    llama_model * model;
    plain_logits & plain;
    context ctx;
    std::map<int, tokens> text = {};  // of each sequence
    int n_made                 = 0;

    llama_memory_t mem() const { return llama_get_memory(ctx.get()); }
    int back(int seq) const { return llama_memory_seq_rows_back(mem(), seq); }

    // Decodes n new tokens of each sequence together; their logits are plain decoding's.
    void go_on(const std::map<int, int> & counts) {
        std::vector<row> rows;
        for (const auto & [seq, n] : counts) {
            for (int i = 0; i < n; ++i) {
                rows.push_back({3 + n_made++ * 37 % 100, (int) text[seq].size(), seq});
                text[seq].push_back(rows.back().token);
            }
        }
        CHECK(decode(ctx.get(), rows) == 0);
        for (size_t i = 0; i < rows.size(); ++i) {
            const tokens & all = text[rows[i].seq];
            CHECK(same_bits(ctx.get(), (int) i, plain.after({all.begin(), all.begin() + rows[i].pos + 1})));
        }
    }

    // Takes n tokens back where the memory says that it can, and is refused where it says that it cannot.
    bool take_back(int seq, int n) {
        const int can = back(seq), held = (int) text[seq].size();
        const bool done = llama_memory_seq_rm(mem(), seq, held - n, -1);
        CHECK(done == (n <= can || n == held));
        text[seq].resize(held - (done ? n : 0));
        CHECK(llama_memory_seq_pos_max(mem(), seq) == (llama_pos) text[seq].size() - 1);
        CHECK(back(seq) == (n == held ? 0 : can - (done ? n : 0)));
        return done;
    }

    void begin(int n_seq, int n_prompt = N_PROMPT) {
        llama_memory_clear(mem(), true);
        text.clear();
        n_made = 0;
        for (int seq = 0; seq < n_seq; ++seq) {
            CHECK(back(seq) == 0);
            go_on({{seq, n_prompt}});
        }
    }
};

// Its memory serves one sequence if it is unified, and counts tokens: its positions are a text's.
bool is_deepseek4(const llama_model * model) {
    char arch[32] = {};
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
    return strcmp(arch, "deepseek4") == 0;
}

// Every number of tokens of every batch, all of them included.
void every_rollback(world & w) {
    for (int m = 1; m <= N_RS + 2; ++m) {
        for (int r = 0; r <= m + 1; ++r) {
            w.begin(1);
            w.go_on({{0, m}});
            CHECK(w.back(0) == std::min(m, N_RS));
            CHECK(w.take_back(0, r) == (r <= std::min(m, N_RS)));
            w.go_on({{0, 1}});
            w.go_on({{0, 2}});
        }
    }
}

void rollbacks_that_add_up(world & w) {
    for (const tokens & parts : {tokens{1, 1, 1, 1}, {2, 2}, {1, 3}, {3, 1}, {1, 1, 2}, {1, 1}, {2, 1}}) {
        w.begin(1);
        w.go_on({{0, N_RS}});
        for (const int r : parts) {
            CHECK(w.take_back(0, r));
        }
        CHECK(!w.take_back(0, w.back(0) + 1));
        w.go_on({{0, 2}});
        CHECK(w.back(0) == 2);
    }
}

// States of earlier batches are gone, although their planes are not overwritten.
void what_is_stale(world & w) {
    for (const int m : {1, 2}) {
        w.begin(1);
        w.go_on({{0, N_RS + 1}});
        w.go_on({{0, m}});
        CHECK(!w.take_back(0, m + 1) && !w.take_back(0, N_RS) && w.take_back(0, m));
        CHECK(!w.take_back(0, 1));
        w.go_on({{0, 1}});
        CHECK(w.take_back(0, 1));
        w.go_on({{0, 3}});
    }
    w.begin(1);
    w.go_on({{0, 3}});
    CHECK(w.take_back(0, 3 + N_PROMPT));  // all of it
    w.go_on({{0, 2}});
    w.go_on({{0, 2}});
}

// A batch of several micro-batches: only the last one counts, and it has the last N_RS + 1 tokens.
void several_micro_batches(world & w, llama_model * model) {
    world small{model, w.plain, open(model, 1, N_RS, N_RS + 3)};
    for (const int m : {N_RS + 4, 2 * N_RS + 7, 3 * N_RS + 10}) {
        for (const int r : {1, N_RS}) {
            small.begin(1);
            small.go_on({{0, m}});
            CHECK(small.back(0) == N_RS && !small.take_back(0, N_RS + 1) && small.take_back(0, r));
            small.go_on({{0, 2}});
        }
    }
}

// Saved with r tokens taken back, and restored: there, or as another sequence. Nothing can be taken back.
void saved_and_restored(world & w, llama_state_seq_flags flags) {
    for (const int r : {0, 3}) {
        const int to = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY ? 0 : r % 2;
        w.begin(1);
        w.go_on({{0, 3}});
        CHECK(w.take_back(0, r));
        std::vector<uint8_t> state(llama_state_seq_get_size_ext(w.ctx.get(), 0, flags));
        CHECK(llama_state_seq_get_data_ext(w.ctx.get(), state.data(), state.size(), 0, flags) > 0);
        const tokens saved = w.text[0];
        w.go_on({{0, 1}});
        w.go_on({{0, 4}});
        CHECK(llama_state_seq_set_data_ext(w.ctx.get(), state.data(), state.size(), to, flags) > 0);
        w.text[to] = saved;
        CHECK(llama_memory_seq_rm(w.mem(), to, (llama_pos) saved.size(), -1));
        CHECK(w.back(to) == 0 && !w.take_back(to, 1));
        w.go_on({{to, 1}});
        CHECK(w.take_back(to, 1));
        w.go_on({{to, 2}});
    }
}

// A copy of a sequence with a pending rollback: both go on from where it was, whichever is first.
void copied(world & w) {
    for (const int r : {0, 2}) {
        for (const int first : {0, 1}) {
            w.begin(1);
            w.go_on({{0, 3}});
            CHECK(w.take_back(0, r));
            llama_memory_seq_cp(w.mem(), 0, 1, -1, -1);
            w.text[1] = w.text[0];
            CHECK(w.back(1) == 0 && !w.take_back(1, 1));
            w.go_on({{first, 2}});
            CHECK(w.back(first) == 2);
            w.go_on({{1 - first, 3}});
            CHECK(w.take_back(first, 2) && w.take_back(1 - first, 1));
            w.go_on({{0, 1}, {1, 2}});
        }
    }
}

// Sequences with different numbers of tokens, in changing company, each of which takes back what it can.
void many_sequences(world & w, unsigned seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int n) {
        return (int) (random() % (unsigned) n);
    };
    w.begin(3);
    for (const int seq : {1, 2, 0}) {  // their states lie in this order
        CHECK(w.take_back(seq, N_PROMPT));
    }
    for (const int seq : {1, 2, 0}) {
        w.go_on({{seq, 3}});
    }
    for (int round = 0; round < 14; ++round) {
        std::map<int, int> counts;
        for (int seq = 0; seq < 3; ++seq) {
            if (draw(3) > 0) {
                counts[seq] = 1 + draw(N_RS + 2);
            }
        }
        w.go_on(counts);
        for (int seq = 0; seq < 3; ++seq) {
            CHECK(!counts.count(seq) || w.back(seq) == std::min(counts[seq], N_RS));
            w.take_back(seq, std::min(draw(N_RS + 2), (int) w.text[seq].size() - 1));
            w.take_back(seq, draw(2));
        }
    }
}

// In a unified cache a sequence's state moves when those around it are decoded. Older ones do not move with
// it.
void states_that_move(llama_model * model, plain_logits & plain) {
    for (const int r : {0, 2}) {
        world w{model, plain, open(model, 3, N_RS, 32, true)};
        w.begin(3);
        w.go_on({{1, 3}});
        CHECK(w.take_back(1, r));
        w.go_on({{0, 2}, {2, 2}});
        CHECK(!w.take_back(1, w.back(1) + 1) && w.take_back(1, w.back(1)));
        w.go_on({{0, 1}, {1, 1}, {2, 1}});
        w.go_on({{0, 1}, {1, 2}, {2, 1}});
    }
}

// A decode that fails has written no states, or not all of them.
void a_decode_that_fails(world & w) {
    w.begin(2);
    w.go_on({{0, 3}});
    int asked = 0;
    llama_set_abort_callback(w.ctx.get(), [](void * n) { return ++*(int *) n > 40; }, &asked);
    const int end = (int) w.text[0].size();
    CHECK(decode(w.ctx.get(), {{7, end, 0}, {9, end + 1, 0}}) == 2);
    llama_set_abort_callback(w.ctx.get(), nullptr, nullptr);
    CHECK(w.back(0) == 0 && !llama_memory_seq_rm(w.mem(), 0, end, -1));
    CHECK(llama_memory_seq_rm(w.mem(), 0, -1, -1));
    w.text[0].clear();
    w.go_on({{0, 4}, {1, 4}});
    CHECK(w.take_back(0, 3) && w.take_back(1, 3));
    w.go_on({{0, 1}, {1, 2}});
}

// Only tokens whose positions follow each other are counted: those of an image do not.
void positions_that_do_not_count(world & w) {
    w.begin(1);
    CHECK(decode(w.ctx.get(), {{7, 5, 0}, {9, 5, 0}, {11, 6, 0}, {13, 7, 0}}) == 0);
    CHECK(w.back(0) == 2);
    const bool can_jump = decode(w.ctx.get(), {{7, 9, 0}, {9, 10, 0}}) == 0;
    CHECK(w.back(0) == (can_jump ? 1 : 2));
}

// A context whose micro-batches are too small for its snapshots has fewer of them.
void small_micro_batches(llama_model * model, plain_logits & plain) {
    for (const auto & [n_ubatch, n_rs] : std::map<int, int>{{1, 0}, {2, 0}, {3, 1}, {7, 5}, {8, 6}, {9, 6}}) {
        world w{model, plain, open(model, 1, 6, n_ubatch)};
        CHECK((int) llama_n_rs_seq(w.ctx.get()) == n_rs);
        w.begin(1);
        w.go_on({{0, 8}});
        CHECK(w.take_back(0, n_rs));
        w.go_on({{0, 3}});
    }
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr);
    {
        plain_logits plain(model);
        world w{model, plain, open(model, 3, N_RS)};
        every_rollback(w);
        rollbacks_that_add_up(w);
        what_is_stale(w);
        several_micro_batches(w, model);
        saved_and_restored(w, LLAMA_STATE_SEQ_FLAGS_NONE);
        saved_and_restored(w, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        copied(w);
        many_sequences(w, 1);
        a_decode_that_fails(w);
        if (!is_deepseek4(model)) {
            states_that_move(model, plain);
            positions_that_do_not_count(w);
        }
        small_micro_batches(model, plain);
    }
    llama_model_free(model);
    puts("ok");
    return 0;
}
