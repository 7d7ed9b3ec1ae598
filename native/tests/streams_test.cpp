// Few rows of slots that lie apart, without flash attention: attention multiplies with the caches of those
// that take part, and each row has the bits that it has when its slot is decoded alone: streams_test
// TARGET.gguf
#include "check.hpp"

#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int N_SLOT = 16;

int64_t streams_attended = 0;  // by the first layer

bool evaluated(ggml_tensor * t, bool ask, void * /*data*/) {
    const bool is_first = std::strcmp(t->name, "kq-0") == 0;
    if (!ask && is_first) {
        streams_attended += t->ne[3];
    }
    return !ask || is_first;
}

using part = std::pair<int, int>;  // a slot and its rows

llama_token token_of(int slot, int i) {
    return 3 + (slot * 31 + i * 7) % 50;
}

struct world {
    llama_context * ctx;
    int n_vocab;

    world(llama_model * model, int n_slot) {
        llama_context_params p = llama_context_default_params();
        p.n_ctx                = 64 * n_slot;
        p.n_seq_max            = n_slot;
        p.n_batch = p.n_ubatch = 64;
        p.kv_unified           = false;
        p.flash_attn_type      = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        p.n_threads = p.n_threads_batch = 1;
        p.cb_eval                       = evaluated;
        ctx                             = llama_init_from_model(model, p);
        n_vocab                         = llama_vocab_n_tokens(llama_model_get_vocab(model));
        CHECK(ctx != nullptr);
    }
    ~world() { llama_free(ctx); }
    world(const world &)             = delete;
    world & operator=(const world &) = delete;

    // Tokens `from` on of each slot's text, as many as its rows; `as` is the slot whose text the first one
    // has.
    std::vector<float> decode(const std::vector<part> & parts, int from, int as = -1) {
        llama_batch batch = llama_batch_init(64, 0, 1);
        for (const auto & [slot, n_row] : parts) {
            for (int i = 0; i < n_row; ++i) {
                const int r        = batch.n_tokens++;
                batch.token[r]     = token_of(as < 0 ? slot : as, from + i);
                batch.pos[r]       = from + i;
                batch.n_seq_id[r]  = 1;
                batch.seq_id[r][0] = slot;
                batch.logits[r]    = 1;
            }
        }
        CHECK(llama_decode(ctx, batch) == 0);
        std::vector<float> out;
        for (int r = 0; r < batch.n_tokens; ++r) {
            const float * row = llama_get_logits_ith(ctx, r);
            out.insert(out.end(), row, row + n_vocab);
        }
        llama_batch_free(batch);
        return out;
    }
};

// most: of streams that the first layer's attention may read.
void check(llama_model * model, const std::vector<part> & parts, int64_t most) {
    world together(model, N_SLOT);
    for (const part & p : parts) {
        together.decode({{p.first, 5}}, 0);
    }
    streams_attended              = 0;
    const std::vector<float> rows = together.decode(parts, 5);
    const int64_t n_attended      = streams_attended;
    size_t at                     = 0;
    for (const auto & [slot, n_row] : parts) {
        world alone(model, 1);
        alone.decode({{0, 5}}, 0, slot);
        const std::vector<float> want = alone.decode({{0, n_row}}, 5, slot);
        CHECK(std::equal(want.begin(), want.end(), rows.begin() + (ptrdiff_t) at));
        at += want.size();
    }
    if (n_attended < (int64_t) parts.size() || n_attended > most) {
        std::fprintf(stderr, "%zu slots: attention reads the caches of %lld, at most %lld should be\n",
            parts.size(), (long long) n_attended, (long long) most);
        std::exit(1);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc > 1);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr);
    check(model, {{0, 3}, {15, 1}}, 2);
    check(model, {{15, 2}, {0, 1}, {1, 5}}, 3);
    check(model, {{3, 1}, {4, 4}, {5, 1}}, 3);
    check(model, {{0, 1}, {4, 2}, {8, 3}, {12, 1}}, 4);
    check(model, {{0, 1}, {2, 2}, {4, 3}, {6, 1}, {8, 1}, {15, 2}}, 8);  // two narrow gaps are closed
    llama_model_free(model);
    std::puts("ok");
}
