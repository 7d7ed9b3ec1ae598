// Graphs that are kept, of the target's small batches and of the head's passes: shapes that come and go
// beyond what the budgets hold give the bits of graphs that were just made, in memory that does not grow.
// What cannot be had is done without. And logits on demand, of which only the rows that are wanted take
// memory. Run under the sanitizers.
//     kept_graphs_test TARGET.gguf HEAD.gguf
//
// The program's own copies of two functions of ggml stand before the library's and fail when told to.
#include "check.hpp"
#include "target/deferral.hpp"
#include "head/head_source.hpp"
#include "session/session.hpp"
#include "planner/tuning.hpp"

#include "../ggml/src/ggml-backend-impl.h"  // ggml_backend_sched_borrow

#include <dlfcn.h>

#include <numeric>
#include <random>
#include <string>

namespace {

struct {
    int graphs       = 0;         // the next so many graphs that are laid out do not fit
    size_t too_large = SIZE_MAX;  // no buffer of this size or a larger one is to be had
    int n_hit        = 0;
} failing;

template <typename F> F * real(const char * name) {
    return (F *) dlsym(RTLD_NEXT, name);
}

}  // namespace

extern "C" {
bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    if (failing.graphs > 0) {
        --failing.graphs;
        ++failing.n_hit;
        return false;
    }
    return real<decltype(ggml_backend_sched_alloc_graph)>("ggml_backend_sched_alloc_graph")(sched, graph);
}
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    if (size >= failing.too_large) {
        ++failing.n_hit;
        return nullptr;
    }
    return real<decltype(ggml_backend_buft_alloc_buffer)>("ggml_backend_buft_alloc_buffer")(type, size);
}
}

namespace {

constexpr int N_CTX = 1024;

std::mt19937 rng(1);

int up_to(int most) {
    return (int) (rng() % most);
}

// -- schedulers that share buffers -----------------------------------------------------------------------

// x + x for n numbers.
struct doubling {
    ggml_context_ptr ctx{ggml_init({4 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})};
    ggml_tensor * x;
    ggml_cgraph * gf = ggml_new_graph(ctx.get());

    explicit doubling(int n) : x(ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n)) {
        ggml_set_input(x);
        ggml_build_forward_expand(gf, ggml_add(ctx.get(), x, x));
    }

    bool is_right(ggml_backend_sched_t sched) const {
        std::vector<float> in(x->ne[0], 1.5f), out(in);
        ggml_backend_tensor_set(x, in.data(), 0, ggml_nbytes(x));
        CHECK(ggml_backend_sched_graph_compute(sched, gf) == GGML_STATUS_SUCCESS);
        ggml_backend_tensor_get(ggml_graph_node(gf, -1), out.data(), 0, ggml_nbytes(x));
        return out == std::vector<float>(in.size(), 3.0f);
    }
};

// What does not fit is refused; what lies in buffers that were replaced is stale, and right after another
// layout.
void shared_buffers() {
    const ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_t backends[] = {cpu.get()};
    const auto scheduler      = [&] {
        return ggml_backend_sched_ptr(ggml_backend_sched_new(backends, nullptr, 1, 64, false, false));
    };
    const ggml_backend_sched_ptr owner = scheduler(), small = scheduler(), other = scheduler();
    ggml_backend_sched_borrow(small.get(), owner.get());
    ggml_backend_sched_borrow(other.get(), owner.get());
    CHECK(ggml_backend_sched_is_stale(small.get()) && !ggml_backend_sched_is_stale(owner.get()));
    const doubling refused(100);
    CHECK(!ggml_backend_sched_alloc_graph(small.get(), refused.gf));  // there are no buffers yet
    CHECK(ggml_backend_sched_reserve(owner.get(), doubling(1000).gf));
    const doubling a(1000), b(10), large(100000), again(1000);
    ggml_backend_sched_reset(small.get());
    CHECK(ggml_backend_sched_alloc_graph(small.get(), a.gf) && a.is_right(small.get()));
    CHECK(ggml_backend_sched_alloc_graph(other.get(), b.gf) && b.is_right(other.get()) &&
          a.is_right(small.get()));
    CHECK(!ggml_backend_sched_is_stale(small.get()) && !ggml_backend_sched_is_stale(other.get()));
    CHECK(ggml_backend_sched_get_buffer_size(small.get(), cpu.get()) == 0);
    ggml_backend_sched_reset(owner.get());
    CHECK(ggml_backend_sched_alloc_graph(owner.get(), large.gf) && large.is_right(owner.get()));
    CHECK(ggml_backend_sched_is_stale(small.get()) && ggml_backend_sched_is_stale(other.get()));
    ggml_backend_sched_reset(small.get());
    CHECK(ggml_backend_sched_alloc_graph(small.get(), again.gf) && again.is_right(small.get()));
    CHECK(!ggml_backend_sched_is_stale(small.get()) && large.is_right(owner.get()));
}

// -- the target -------------------------------------------------------------------------------------------

// Decodes these tokens from pos on, all with logits or only the last, and returns these; empty if it failed.
std::vector<float> decode(llama_context * ctx, int pos, const tokens & text, bool all) {
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, pos, -1));
    const int n   = (int) text.size();
    llama_batch b = llama_batch_init(n, 0, 1);
    b.n_tokens    = n;
    for (int i = 0; i < n; ++i) {
        b.token[i]     = text[i];
        b.pos[i]       = pos + i;
        b.n_seq_id[i]  = 1;
        b.seq_id[i][0] = 0;
        b.logits[i]    = all || i + 1 == n;
    }
    const int rc = llama_decode(ctx, b);
    llama_batch_free(b);
    const int n_vocab   = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    const float * first = rc == 0 ? llama_get_logits(ctx) : nullptr;
    return first ? std::vector<float>(first, first + (size_t) n_vocab * (all ? n : 1)) : std::vector<float>();
}

int64_t target_compute(llama_context * ctx) {
    eagle3_session * s = nullptr;
    eagle3_memory m    = {};
    CHECK(eagle3_session_open(ctx, nullptr, 1, &s) == EAGLE3_OK);
    CHECK(eagle3_memory_get(s, &m) == EAGLE3_OK && eagle3_memory_get(s, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(m.target_weights > 0 && m.target_cache > 0 && m.target_compute > 0);
    CHECK(m.head_weights == 0 && m.head_cache == 0 && m.head_compute == 0);
    eagle3_session_close(s);
    return m.target_compute;
}

// Batches of every size, at the start of the text and far into it, between decodes of other sizes.
void small_batches(llama_model * model, bool flash) {
    llama_context * kept = make_context(model, 1, N_CTX, 128, 128, flash);
    setenv("LLAMA_GRAPH_REUSE_DISABLE", "1", 1);
    llama_context * made = make_context(model, 1, N_CTX, 128, 128, flash);
    unsetenv("LLAMA_GRAPH_REUSE_DISABLE");
    const int64_t before = target_compute(kept);
    CHECK(target_compute(made) == before);
    tokens text(N_CTX);
    for (int & t : text) {
        t = 3 + up_to(200);
    }
    for (int pos = 0; pos + 128 <= N_CTX; pos += 128) {
        const tokens piece(text.begin() + pos, text.begin() + pos + 128);
        CHECK(decode(kept, pos, piece, false) == decode(made, pos, piece, false));
    }
    // far into the text, then at its start, in a context that is the same but for this
    for (int i = 0; i < 160; ++i) {
        const int n = 1 + i % 64, pos = i < 80 ? N_CTX - 70 : 5;
        const bool all = i % 5 != 0;
        const tokens piece(text.begin(), text.begin() + n);
        const bool small            = n <= (all ? 64 : 16);
        failing.graphs              = small && i % 11 == 0;  // it does not fit: the main scheduler has to do
        const std::vector<float> is = decode(kept, pos, piece, all);
        failing.graphs              = 0;
        CHECK(!is.empty() && is == decode(made, pos, piece, all));
    }
    CHECK(failing.n_hit > 3);
    const int64_t total = target_compute(kept);
    CHECK(total > before);
    CHECK(total - before <= 16 * (int64_t(1) << 20));  // 16 graphs of a model as small as this
    // not even the main one can: an error, and everything goes on behind it
    failing.graphs = 2;
    CHECK(decode(kept, 5, {3, 4, 5}, true).empty());
    failing.graphs = 0;
    CHECK(decode(kept, 5, {3, 4, 5}, true) == decode(made, 5, {3, 4, 5}, true));
    llama_free(kept);
    llama_free(made);
}

// Some rows of the output matrix, in pieces, have the bits that all have with the layers; into the context,
// or into rows of the caller's, which the context then does not have.
void logits_on_demand(llama_model * model) {
    constexpr int N     = 8;
    llama_context * ctx = make_context(model, 1, N_CTX, 128, 128);
    const int n_vocab   = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const tokens text   = {100, 137, 174, 211, 248, 285, 2, 39};
    CHECK(!decode(ctx, 0, {5, 6, 7}, false).empty());
    const std::vector<float> whole = decode(ctx, 3, text, true);
    const auto row                 = [&](int i) {
        return whole.data() + (size_t) i * n_vocab;
    };
    for (const int n : {1, 3, N}) {
        const eagle3::deferral deferred(ctx, true);
        decode(ctx, 3, text, true);
        std::vector<float> own((size_t) n * n_vocab);
        eagle3::compute_logits(ctx, N - n, n, own.data());
        CHECK(memcmp(own.data(), row(N - n), own.size() * sizeof(float)) == 0);
        for (int i = 0; i < N; ++i) {
            CHECK(llama_get_logits_ith(ctx, i) == nullptr);
        }
        for (int i = 0; i < N; i += n) {
            eagle3::compute_logits(ctx, i, std::min(n, N - i));
            CHECK(i + n >= N || llama_get_logits_ith(ctx, i + n) == nullptr);
        }
        for (int i = 0; i < N; ++i) {
            CHECK(memcmp(llama_get_logits_ith(ctx, i), row(i), n_vocab * sizeof(float)) == 0);
        }
        try {
            eagle3::compute_logits(ctx, 0, N + 1);
            CHECK(!"more rows than there are");
        } catch (const eagle3::error & e) {
            CHECK(e.status == EAGLE3_E_ARGUMENT);
        }
    }
    llama_free(ctx);
}

// -- the head ---------------------------------------------------------------------------------------------

struct outputs {
    std::vector<float> state, probs;
    std::vector<int32_t> ids;

    bool operator==(const outputs & o) const { return state == o.state && probs == o.probs && ids == o.ids; }
};

struct setup {
    const eagle3::head & h;
    llama_context * ctx;

    eagle3::runner runner() const { return {h, 2, N_CTX, ctx}; }
};

// n rows of a slot behind `pos` positions, the last n_out with outputs.
outputs run(eagle3::runner & r, const eagle3::head & h, int slot, int pos, int n, int n_out, int k) {
    std::vector<int32_t> ids(n);
    std::iota(ids.begin(), ids.end(), 3 + pos % 50);
    std::vector<float> x((size_t) n * h.n_embd);
    for (size_t i = 0; i < x.size(); ++i) {
        x[i] = (float) ((i * 7 + pos) % 13) / 13.0f - 0.5f;
    }
    outputs out;
    out.state.resize((size_t) n_out * h.n_embd);
    out.probs.resize((size_t) n_out * k);
    out.ids.resize((size_t) n_out * k);
    eagle3::pass p;
    p.rows  = eagle3::pass::chain(slot, ids.data(), pos, 0, n, n_out);
    p.x     = x.data();
    p.state = out.state.data();
    p.probs = out.probs.data();
    p.ids   = out.ids.data();
    p.k     = k;
    r.run(p);
    return out;
}

// The same pass over a head that has no graphs yet, with the same cache behind it.
outputs run_anew(
    const eagle3::runner & like, const setup & with, int slot, int pos, int n, int n_out, int k) {
    eagle3::runner fresh = with.runner();
    std::vector<uint8_t> cells(like.cells_size(0, pos));
    like.cells_get(slot, 0, pos, cells.data());
    fresh.cells_set(slot, 0, pos, cells.data());
    return run(fresh, with.h, slot, pos, n, n_out, k);
}

void head_passes(const setup & with) {
    const eagle3::head & h = with.h;
    eagle3::runner r       = with.runner();
    size_t most            = 0;
    for (int i = 0; i < 400; ++i) {
        const int n = 1 + (i * 5) % 64, slot = i % 2, pos = i % 4 == 0 ? 900 - n : (i * 37) % 700;
        const int n_out = i % 6 == 0 ? 1 : n, k = 1 + i % 3;
        const outputs expected = i % 8 == 0 ? run_anew(r, with, slot, pos, n, n_out, k) : outputs();
        const outputs got      = run(r, h, slot, pos, n, n_out, k);
        CHECK(i % 8 != 0 || got == expected);
        most = i == 199 ? r.compute_bytes() : most;
    }
    CHECK(r.n_built() > 2 * r.n_graphs());  // many had to go
    CHECK(r.compute_bytes() <= most + eagle3::MOST_GRAPH_BYTES);
    const size_t buffer = r.buffer_bytes();
    CHECK(r.compute_bytes() - buffer <= eagle3::MOST_GRAPH_BYTES);
    // a pass of more rows than a round has leaves nothing
    const outputs large = run(r, h, 0, 0, 300, 300, 1);
    CHECK(large == run(r, h, 0, 0, 300, 300, 1) && r.buffer_bytes() == buffer);
    // what was used last is still there
    const size_t n_built = r.n_built();
    for (int i = 0; i < 20; ++i) {
        run(r, h, i % 2, 3, 2 + i % 3, 1, 1);
    }
    CHECK(r.n_built() <= n_built + 6);
}

// There is memory for the pass, but not for the largest of its kind.
void head_in_little_memory(const setup & with) {
    const eagle3::head & h = with.h;
    const outputs expected = [&] {
        eagle3::runner r = with.runner();
        return run(r, h, 0, 0, 33, 33, 2);
    }();
    const int n_hit = failing.n_hit;
    for (size_t limit = 64 << 20; failing.n_hit == n_hit; limit -= limit / 20) {
        eagle3::runner again = with.runner();
        failing.too_large    = limit;
        CHECK(run(again, h, 0, 0, 33, 33, 2) == expected);
        failing.too_large = SIZE_MAX;
    }
    eagle3::runner r = with.runner();
    // none at all: an error; and with memory again, the pass
    failing.too_large = 1;
    try {
        run(r, h, 0, 0, 33, 33, 2);
        CHECK(!"a pass without memory");
    } catch (const eagle3::error & e) {
        CHECK(e.status == EAGLE3_E_MEMORY);
    }
    failing.too_large = SIZE_MAX;
    CHECK(run(r, h, 0, 0, 33, 33, 2) == expected);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: kept_graphs_test TARGET.gguf HEAD.gguf\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr);
    shared_buffers();
    small_batches(model, true);
    small_batches(model, false);
    logits_on_demand(model);
    {
        const auto head     = eagle3::load_head(argv[2], model);
        llama_context * ctx = make_context(model, 1, N_CTX, 64, 64);
        head_passes({*head, ctx});
        head_in_little_memory({*head, ctx});
        llama_free(ctx);
    }
    llama_model_free(model);
    printf("ok\n");
    return 0;
}
