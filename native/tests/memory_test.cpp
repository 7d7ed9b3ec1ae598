// Memory that runs out, at every place where a call asks for it, and computations that fail: the code is what
// the header says, the slots hold what eagle3_n_past says, and the text goes on with the bits of plain
// decoding. Run under the sanitizers.
//     memory_test TARGET.gguf HEAD.gguf
//
// The program's own operator new, and its own copies of some functions of llama.cpp and ggml, stand before
// the libraries'. They pass every call on, but for the one that is to fail.
#include "asks.hpp"
#include "check.hpp"
#include "replaced_new.hpp"

#include "ggml-backend.h"
#include "gguf.h"

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <string>

namespace {

// What fails, of this thread: the n-th request from now on, counted from 1; 0: none.
struct {
    long memory = 0, buffer = 0, backend = 0, compute = 0, head_compute = 0;
    bool hit = false;
} failing;

// While llama.cpp decodes and while ggml lays out a graph, operator new does not fail: they are not made for
// it. That a buffer cannot be had is something they report.
int sheltered = 0;
bool decoding = false;  // nor do buffers: a context whose decode did not get one is not to be used again

struct shelter {
    shelter() { ++sheltered; }
    ~shelter() { --sheltered; }
};

// stays: those after it fail too. ggml asks for a buffer again where it did not get one.
bool fails(long & n, bool stays = false) {
    if (n == 0 || n > 1) {
        n -= n > 1;
        return false;
    }
    n           = stays;
    failing.hit = true;
    return true;
}

void * take(size_t size) {
    return !sheltered && fails(failing.memory) ? nullptr : malloc(size ? size : 1);
}

template <typename F> F * real(const char * name) {
    return (F *) dlsym(RTLD_NEXT, name);
}

}  // namespace

extern "C" {
// ggml loses what it has so far when an exception passes through it.
const char * __lsan_default_suppressions() {
    return "leak:ggml_backend_cpu_init\nleak:ggml_backend_cpu_buffer_type_alloc_buffer\n";
}
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    return !decoding && fails(failing.buffer, true)
               ? nullptr
               : real<decltype(ggml_backend_buft_alloc_buffer)>("ggml_backend_buft_alloc_buffer")(type, size);
}
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params) {
    return fails(failing.backend)
               ? nullptr
               : real<decltype(ggml_backend_dev_init)>("ggml_backend_dev_init")(device, params);
}
int32_t llama_decode(llama_context * ctx, llama_batch batch) {
    const shelter here;
    decoding = true;
    const std::unique_ptr<bool, void (*)(bool *)> until_then(&decoding, [](bool * b) { *b = false; });
    return real<decltype(llama_decode)>("llama_decode")(ctx, batch);
}
gguf_context * gguf_init_from_file(const char * path, gguf_init_params params) {
    const shelter here;
    return real<decltype(gguf_init_from_file)>("gguf_init_from_file")(path, params);
}
bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    const shelter here;
    return real<decltype(ggml_backend_sched_alloc_graph)>("ggml_backend_sched_alloc_graph")(sched, graph);
}
bool ggml_backend_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    const shelter here;
    return real<decltype(ggml_backend_sched_reserve)>("ggml_backend_sched_reserve")(sched, graph);
}
ggml_status ggml_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    if (fails(failing.compute)) {
        return GGML_STATUS_FAILED;
    }
    const shelter here;
    return real<decltype(ggml_backend_graph_compute)>("ggml_backend_graph_compute")(backend, graph);
}
ggml_status ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    if (!decoding && fails(failing.head_compute)) {
        return GGML_STATUS_FAILED;
    }
    const shelter here;
    return real<decltype(ggml_backend_sched_graph_compute_async)>("ggml_backend_sched_graph_compute_async")(
        sched, graph);
}
}

namespace {

constexpr int N_SLOTS = 2, N_CTX = 256;

struct world {
    llama_model * model;
    llama_context * ctx;
    eagle3_head * head     = nullptr;
    eagle3_session * s     = nullptr;
    llama_sampler * greedy = llama_sampler_init_greedy();
    plain_decodes plain;
    std::vector<tokens> text;
    const char * head_path;
    long * request = nullptr;  // which of `failing` a step arms, just before its call
    long number    = 0;
    std::string at;  // what has failed

    void arm() { *request = number; }

    world(llama_model * m, const char * path)
        : model(m), ctx(make_context(m, N_SLOTS, N_CTX, 64, 64)), plain(m, N_CTX), text(N_SLOTS),
          head_path(path) {
        CHECK(eagle3_head_open(path, m, &head) == EAGLE3_OK);
    }

    // A new session, which has no graphs yet: each pass of the head asks for buffers.
    void open() {
        eagle3_session_close(s);
        s = nullptr;
        CHECK(eagle3_session_open(ctx, head, N_SLOTS, &s) == EAGLE3_OK);
        llama_memory_clear(llama_get_memory(ctx), false);
        eagle3_costs c = {};
        for (int n = 1; n <= 64; ++n) {
            c.layers[n] = 1e-3f * (1.0f + 0.01f * n);
            c.output[n] = 1e-4f * n;
            c.head[n]   = 1e-6f;
        }
        CHECK(eagle3_plan_set(s, &c) == EAGLE3_OK);
    }
    ~world() {
        eagle3_session_close(s);
        eagle3_head_close(head);
        llama_sampler_free(greedy);
        llama_free(ctx);
    }

    void begin() {
        for (int slot = 0; slot < N_SLOTS; ++slot) {
            text[slot].clear();
            for (int i = 0; i < 5 + slot; ++i) {
                text[slot].push_back(3 + (7 * slot + 5 * i) % 100);
            }
            CHECK(eagle3_rewind(s, slot, 0) == EAGLE3_OK);
            CHECK(eagle3_prefill(s, slot, text[slot].data(), (int) text[slot].size(), 0) == EAGLE3_OK);
        }
    }

    int draft(int kind) {
        int32_t n[N_SLOTS];
        const eagle3_ask asks[N_SLOTS] = {
            ask_for(0, 9, kind, 6, 3, kind == EAGLE3_CHAIN ? 1 : 3), ask_for(1, 9, kind, 6, 3, 2)};
        return eagle3_round_draft(s, asks, N_SLOTS, n);
    }

    int verify() {
        llama_sampler * const samplers[N_SLOTS] = {greedy, greedy};
        int32_t out[N_SLOTS * 64], counts[N_SLOTS];
        const int rc = eagle3_round_verify(s, samplers, out, counts);
        return rc == EAGLE3_OK ? std::min({0, counts[0], counts[1]}) : rc;
    }

    int commit() {
        const int32_t keep[N_SLOTS] = {1, 1};
        return eagle3_round_commit(s, keep);
    }

    // What the session says of its slots holds for the target, whatever has failed; and the slots go on.
    // more: what a call may have added to slot 0, of which some tokens are in.
    void check(const tokens & more) {
        const int32_t none[N_SLOTS] = {};
        CHECK(eagle3_round_commit(s, none) == EAGLE3_OK);
        for (int slot = 0; slot < N_SLOTS; ++slot) {
            const int n_past = eagle3_n_past(s, slot), n_more = n_past - (int) text[slot].size();
            if (llama_memory_seq_pos_max(llama_get_memory(ctx), slot) != n_past - 1 ||
                !(n_more == 0 || n_more == (int) more.size())) {
                fprintf(stderr, "%s: slot %d of %d, not %d\n", at.c_str(), slot, n_past,
                    llama_memory_seq_pos_max(llama_get_memory(ctx), slot) + 1);
                exit(1);
            }
            text[slot].insert(text[slot].end(), more.begin(), more.begin() + n_more);
        }
        for (int turn = 0; turn < 2;
            ++turn) {  // the head drafts from the second round on, if it had to start over
            const int n = draft(EAGLE3_CHAIN);
            CHECK(turn == 0 ? n >= 0 : n > 0);
            CHECK(eagle3_round_decode(s) == EAGLE3_OK && verify() == EAGLE3_OK);
            for (int slot = 0; slot < N_SLOTS; ++slot) {
                text[slot].push_back(9);
                CHECK(same_bits(ctx, eagle3_verified_row(s, slot, 0), plain.after(text[slot], 1)));
            }
            CHECK(commit() == EAGLE3_OK);
        }
    }
};

struct step {
    const char * name;
    std::function<void(world &)> before;  // gets ready for it
    std::function<int64_t(world &)> run;
    tokens more;  // what it adds to a slot's text
};

std::vector<step> steps() {
    const auto nothing = [](world &) {
    };
    const auto drafted = [](int kind) {
        return [=](world & w) {
            CHECK(w.draft(kind) >= 0);
        };
    };
    const auto decoded = [](int kind) {
        return [=](world & w) {
            CHECK(w.draft(kind) >= 0 && eagle3_round_decode(w.s) == EAGLE3_OK);
        };
    };
    const auto verified = [=](int kind) {
        return [=](world & w) {
            decoded(kind)(w);
            CHECK(w.verify() == EAGLE3_OK);
        };
    };
    std::vector<step> all = {{"prefill", nothing,
        [](world & w) {
            static const tokens more(70 - 8, 30);
            w.arm();
            return (int64_t) eagle3_prefill(w.s, 0, more.data(), (int) more.size(), 0);
        },
        tokens(70 - 8, 30)}};
    for (const int kind : {EAGLE3_CHAIN, EAGLE3_TREE, EAGLE3_PLANNED}) {
        all.push_back({"draft", nothing, [=](world & w) { return w.arm(), (int64_t) w.draft(kind); }, {}});
        all.push_back({"decode", drafted(kind),
            [](world & w) { return w.arm(), (int64_t) eagle3_round_decode(w.s); }, {}});
        all.push_back({"verify", decoded(kind), [](world & w) { return w.arm(), (int64_t) w.verify(); }, {}});
        all.push_back(
            {"commit", verified(kind), [](world & w) { return w.arm(), (int64_t) w.commit(); }, {9}});
        all.push_back({"rewind", verified(kind),
            [](world & w) { return w.arm(), (int64_t) eagle3_rewind(w.s, 0, (int) w.text[0].size()); }, {}});
    }
    all.push_back({"state", nothing,
        [](world & w) {
            static std::vector<uint8_t> state(1 << 16);
            w.arm();
            const int64_t n = eagle3_state_get(w.s, 0, state.data(), (int64_t) state.size());
            return n < 0 ? n : eagle3_state_set(w.s, 0, state.data(), n);
        },
        {}});
    all.push_back({"measure_target", nothing,
        [](world & w) {
            float seconds = 0.0f;
            w.arm();
            return (int64_t) eagle3_measure_target(w.s, 0, 4, &seconds);
        },
        {}});
    all.push_back({"open", nothing,
        [](world & w) {
            eagle3_head * head = nullptr;
            w.arm();
            const int64_t rc = eagle3_head_open(w.head_path, w.model, &head);
            CHECK((rc == EAGLE3_OK) == (head != nullptr));
            eagle3_head_close(head);
            return rc;
        },
        {}});
    all.push_back({"close and open", nothing,
        [](world & w) {
            eagle3_session_close(w.s);
            w.s = nullptr;
            w.arm();
            const int64_t rc = eagle3_session_open(w.ctx, w.head, N_SLOTS, &w.s);
            failing          = {0, 0, 0, 0, 0, failing.hit};
            CHECK((rc == EAGLE3_OK) == (w.s != nullptr));
            if (rc != EAGLE3_OK) {
                CHECK(eagle3_session_open(w.ctx, w.head, N_SLOTS, &w.s) == EAGLE3_OK);
            }
            for (int slot = 0; slot < N_SLOTS; ++slot) {
                CHECK(eagle3_state_reset(w.s, slot, (int) w.text[slot].size()) == EAGLE3_OK);
            }
            return rc;
        },
        {}});
    return all;
}

// Each request of each step fails once: the first, the second, and so on until none is left. Unless all are
// asked for, the steps from one to the next grow behind the tenth, and each call takes others.
int every_request(world & w, long & of, const std::vector<int> & codes, bool all) {
    int n_failed = 0;
    for (const step & c : steps()) {
        for (long n = 1;; n += all ? 1 : 1 + (n + n_failed % 5) / 10) {
            w.open();
            w.begin();
            c.before(w);
            failing          = {};
            w.request        = &of;
            w.number         = n;
            const int64_t rc = c.run(w);
            const bool hit   = failing.hit;
            failing          = {};
            if (rc < 0 && std::find(codes.begin(), codes.end(), (int) rc) == codes.end()) {
                fprintf(
                    stderr, "%s, request %ld: %lld (%s)\n", c.name, n, (long long) rc, eagle3_last_error());
                exit(1);
            }
            CHECK(hit || rc >= 0);
            w.at = c.name + (" " + std::to_string(n));
            w.check(c.more);
            n_failed += rc < 0;
            if (!hit) {
                break;
            }
        }
    }
    return n_failed;
}

}  // namespace

int main(int argc, char ** argv) {
    const bool all = argc == 4 && !strcmp(argv[3], "all");
    if (argc != 3 && !all) {
        fprintf(stderr, "usage: memory_test TARGET.gguf HEAD.gguf [all]\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    CHECK(model != nullptr);
    {
        world w(model, argv[2]);
        CHECK(every_request(w, failing.memory, {EAGLE3_E_MEMORY}, all) > 60);
        CHECK(every_request(w, failing.buffer, {EAGLE3_E_MEMORY}, all) > 5);
        CHECK(every_request(w, failing.backend, {EAGLE3_E_MEMORY}, all) == 1);  // of the head
        CHECK(every_request(w, failing.compute, {EAGLE3_E_DECODE}, all) > 0);   // of the output matrix
        CHECK(every_request(w, failing.head_compute, {EAGLE3_E_INTERNAL}, all) > 5);
    }
    llama_model_free(model);
    puts("ok");
    return 0;
}
