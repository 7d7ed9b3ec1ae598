// Logits that stay on a device, here on the CPU, which pretends to be one: rows that are read when they are
// wanted, what was found in them, and what samplers take. Run under the sanitizers.
//     logits_stay_test TARGET.gguf HEAD.gguf
//
// The program's own copies of three functions of ggml stand before the library's, and lie when told to.
#include "asks.hpp"
#include "check.hpp"
#include "target/deferral.hpp"
#include "sampling/sampling.hpp"
#include "sampling/thoughts.hpp"

#include "ggml-backend.h"

#include <dlfcn.h>

#include <cmath>
#include <random>

namespace {

ggml_backend_buffer_t device_buffer = nullptr;  // libllama is told that it is no host memory, but a GPU's

template <typename F> F * real(const char * name) {
    return (F *) dlsym(RTLD_NEXT, name);
}

bool is_llama(void * caller) {
    Dl_info info;
    return dladdr(caller, &info) != 0 && strstr(info.dli_fname, "libllama") != nullptr;
}

}  // namespace

extern "C" {
bool ggml_backend_buffer_is_host(ggml_backend_buffer_t b) {
    static const auto own = real<decltype(ggml_backend_buffer_is_host)>("ggml_backend_buffer_is_host");
    return (b != device_buffer || b == nullptr || !is_llama(__builtin_return_address(0))) && own(b);
}
ggml_backend_dev_t ggml_backend_buft_get_device(ggml_backend_buffer_type_t type) {
    static const auto own = real<decltype(ggml_backend_buft_get_device)>("ggml_backend_buft_get_device");
    const bool lies       = device_buffer && is_llama(__builtin_return_address(0));
    return lies ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : own(type);
}
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t dev) {
    static const auto own = real<decltype(ggml_backend_dev_type)>("ggml_backend_dev_type");
    return device_buffer && is_llama(__builtin_return_address(0)) ? GGML_BACKEND_DEVICE_TYPE_GPU : own(dev);
}
}

namespace {

constexpr int N_CTX = 256;

std::mt19937 rng(1);

int up_to(int most) {
    return (int) (rng() % most);
}

// The target, and its output matrix, which tests change.
struct target {
    llama_model * model;
    ggml_tensor * output;
    int n_vocab;
    std::vector<float> weights;

    explicit target(const char * path) {
        llama_model_params p = llama_model_default_params();
        p.load_mode          = LLAMA_LOAD_MODE_NONE;
        p.use_extra_bufts    = false;  // the weights lie as in the file
        model                = llama_model_load_from_file(path, p);
        CHECK(model != nullptr);
        output  = const_cast<ggml_tensor *>(llama_model_get_tensor(model, "output.weight"));
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        CHECK(output->type == GGML_TYPE_F32 && output->ne[1] == n_vocab);
        weights.resize(ggml_nelements(output));
        ggml_backend_tensor_get(output, weights.data(), 0, ggml_nbytes(output));
    }
    ~target() { llama_model_free(model); }
    target(const target &)             = delete;
    target & operator=(const target &) = delete;

    float * row(int token) { return weights.data() + token * output->ne[0]; }
    void put() { ggml_backend_tensor_set(output, weights.data(), 0, ggml_nbytes(output)); }
};

// While one lives, logits stay.
struct device {
    explicit device(const target & t) { device_buffer = t.output->buffer; }
    ~device() { device_buffer = nullptr; }
    device(const device &)             = delete;
    device & operator=(const device &) = delete;
};

tokens some_tokens(int n, int n_vocab) {
    tokens out(n);
    for (int & t : out) {
        t = 3 + up_to(n_vocab - 3);
    }
    return out;
}

// Decodes these tokens at the start of the text; those from `first` to `end` have logits.
void decode_rows(llama_context * ctx, const tokens & text, int first, int end) {
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1));
    const int n   = (int) text.size();
    llama_batch b = llama_batch_init(n, 0, 1);
    b.n_tokens    = n;
    for (int i = 0; i < n; ++i) {
        b.token[i]     = text[i];
        b.pos[i]       = i;
        b.n_seq_id[i]  = 1;
        b.seq_id[i][0] = 0;
        b.logits[i]    = i >= first && i < end;
    }
    CHECK(llama_decode(ctx, b) == 0);
    llama_batch_free(b);
}

std::vector<float> row_of(llama_context * ctx, int row, int n_vocab) {
    const float * x = llama_get_logits_ith(ctx, row);
    CHECK(x != nullptr);
    return std::vector<float>(x, x + n_vocab);
}

bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// What was found in a row is right, or nothing is said of it. Returns whether the likeliest token is known.
bool found_right(llama_context * ctx, int row, const std::vector<float> & x, int n_largest) {
    const bool nan = std::any_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
    const int best = (int) (std::max_element(x.begin(), x.end()) - x.begin());  // the first of them
    const bool one = !nan && std::count(x.begin(), x.end(), x[best]) == 1;

    const int likeliest = llama_get_likeliest_ith(ctx, row);
    CHECK(likeliest == (one && n_largest > 0 ? best : LLAMA_TOKEN_NULL));
    llama_token_data out[LLAMA_MAX_LARGEST];
    const int n = (int) llama_get_largest_ith(ctx, row, out);
    CHECK(n == (n_largest > 1 && !nan ? n_largest : 0));
    std::vector<float> sorted = x, values;
    std::vector<int> ids;
    for (int i = 0; i < n; ++i) {
        CHECK(out[i].logit == x[out[i].id]);
        values.push_back(out[i].logit);
        ids.push_back(out[i].id);
    }
    if (!nan) {
        std::sort(sorted.rbegin(), sorted.rend());
        std::sort(values.rbegin(), values.rend());
        CHECK(std::equal(values.begin(), values.end(), sorted.begin()));
    }
    std::sort(ids.begin(), ids.end());
    CHECK(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
    return likeliest != LLAMA_TOKEN_NULL;
}

// Rows of batches of every kind are those of a context that reads them all, in any order.
void rows_are_read_when_wanted(target & t) {
    llama_context * ctx   = make_context(t.model, 1, N_CTX, 128, 64);
    llama_context * plain = make_context(t.model, 1, N_CTX, 128, 64);
    for (int i = 0; i < 120; ++i) {
        const int n     = std::vector<int>{1, 2, 3, 4, 16, 63, 64, 65, 128}[up_to(9)];
        const int kind  = up_to(4);  // the last row's logits, those of any part, or all
        const int first = kind == 0 ? n - 1 : kind < 3 ? up_to(n) : 0;
        const int end   = kind == 1 || kind == 2 ? first + 1 + up_to(n - first) : n;
        const bool on   = up_to(8) > 0;
        const int k     = std::vector<int>{0, 1, 2, 128}[up_to(4)];
        const auto text = some_tokens(n, t.n_vocab);
        const device here(t);
        decode_rows(plain, text, first, end);
        {
            const eagle3::logits_stay stays(ctx, on, k);
            decode_rows(ctx, text, first, end);
        }
        const bool stay = on && first >= (n - 1) / 64 * 64;  // all in the last micro-batch
        CHECK(llama_has_logits_ith(ctx, first) && llama_has_logits_ith(ctx, -1));
        CHECK(llama_logits_stay_ith(ctx, -1) == stay && llama_logits_stay_ith(ctx, first) == stay);
        CHECK(end == n || (!llama_has_logits_ith(ctx, end) && !llama_logits_stay_ith(ctx, end)));
        for (int row = first; row < end; ++row) {
            found_right(ctx, row, row_of(plain, row, t.n_vocab), stay ? k : 0);
        }
        if (up_to(3) == 0) {
            const int from = up_to(end - first), some = up_to(end - first);
            llama_read_logits(ctx, from, some);
            CHECK(!some || from || !llama_logits_stay_ith(ctx, first));
        }
        if (up_to(3) == 0) {
            CHECK(memcmp(llama_get_logits(ctx), llama_get_logits(plain),
                      (size_t) (end - first) * t.n_vocab * sizeof(float)) == 0);
        }
        for (int j = 0; j < 8; ++j) {
            const int row = first + up_to(end - first);
            CHECK(same(row_of(ctx, row, t.n_vocab), row_of(plain, row, t.n_vocab)));
            CHECK(!llama_logits_stay_ith(ctx, row));
        }
        CHECK(llama_get_logits_ith(ctx, n) == nullptr);
    }
    llama_free(ctx);
    llama_free(plain);
}

// After a decode that fails, rows that were read are there, and others are not.
void a_decode_that_fails(target & t) {
    llama_context * ctx = make_context(t.model, 1, N_CTX, 128, 64);
    const device here(t);
    llama_set_logits_stay(ctx, true, 1);
    decode_rows(ctx, {5, 6, 7}, 0, 3);
    CHECK(llama_get_logits_ith(ctx, 1) != nullptr);
    llama_batch none = {};
    CHECK(llama_decode(ctx, none) != 0);
    CHECK(llama_get_logits_ith(ctx, 1) != nullptr && llama_get_logits_ith(ctx, 0) == nullptr);
    CHECK(!llama_has_logits_ith(ctx, 0) && !llama_logits_stay_ith(ctx, 0));
    CHECK(llama_get_likeliest_ith(ctx, 0) == LLAMA_TOKEN_NULL);
    decode_rows(ctx, {5, 6, 7}, 0, 3);
    CHECK(llama_get_logits_ith(ctx, 0) != nullptr);
    llama_free(ctx);
}

// -- samplers ---------------------------------------------------------------------------------------------

llama_sampler * some_chain(const target & t) {
    llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    const auto pick       = [](std::vector<float> of) {
        return of[up_to((int) of.size())];
    };
    const auto add = [&](llama_sampler * s) {
        llama_sampler_chain_add(chain, s);
    };
    if (up_to(4) == 0) {  // tokens that were not found may get in, and all have a chance
        add(llama_sampler_init_penalties(0, 64, 1, 0, pick({0.5f, 5})));
        add(llama_sampler_init_top_k(128 - up_to(20)));
        add(llama_sampler_init_temp(50));
        add(llama_sampler_init_dist(rng()));
        return chain;
    }
    if (up_to(3) > 0) {
        add(llama_sampler_init_penalties(
            0, up_to(70), pick({1, 1, 1.1f, 2, 0.8f}), pick({0, 0, 0.7f, -0.5f}), pick({0, 0, 1.5f})));
    }
    if (up_to(4) == 0) {
        add(llama_sampler_init_temp(pick({0.5f, 2})));
    }
    const llama_vocab * vocab = llama_model_get_vocab(t.model);
    if (up_to(4) == 0) {  // after some tokens of thoughts, two digits must come
        const std::vector<llama_token> digits = {3 + '5', 3 + '0'};
        add(eagle3::make_thoughts({vocab, "<", {"\x01"}, true, up_to(9), digits}, nullptr));
    }
    if (up_to(3) == 0) {
        add(llama_sampler_init_grammar(
            vocab, up_to(2) ? "root ::= [ -~]*" : "root ::= ([0-9]+ [a-f]?)*", "root"));
    }
    if (up_to(6) > 0) {
        add(llama_sampler_init_top_k(std::vector<int>{1, 2, 40, 40, 64, 100, 127, 128, 300, 0}[up_to(10)]));
    }
    if (up_to(3) == 0) {
        add(llama_sampler_init_typical(pick({0.5f, 0.9f}), 1));
    }
    if (up_to(2) == 0) {
        add(llama_sampler_init_top_p(pick({0.5f, 0.95f}), 1));
        add(llama_sampler_init_min_p(pick({0, 0.05f, 0.3f}), 1));
    }
    add(llama_sampler_init_temp(pick({0, 0.3f, 1, 5})));
    add(up_to(5) > 0 ? llama_sampler_init_dist(rng()) : llama_sampler_init_greedy());
    return chain;
}

// A sampler that goes on from what was found takes what its copy takes from whole rows, token by token.
// Returns how often it could.
int samplers_agree(target & t) {
    llama_context * ctx   = make_context(t.model, 1, N_CTX, 128, 64);
    llama_context * plain = make_context(t.model, 1, N_CTX, 128, 64);
    int n_found           = 0;
    for (int i = 0; i < 150; ++i) {
        llama_sampler * chain = up_to(8) > 0 ? some_chain(t) : llama_sampler_init_greedy();
        llama_sampler * copy  = llama_sampler_clone(chain);
        const int n_largest   = eagle3::n_largest_for(chain);
        CHECK(n_largest == 0 || n_largest == 1 || n_largest == 128);
        for (int j = 0; j < 6; ++j) {
            const tokens text = some_tokens(1 + up_to(5), t.n_vocab);
            const int n       = (int) text.size();
            const device here(t);
            const eagle3::logits_stay stays(ctx, true, up_to(4) > 0 ? n_largest : up_to(2) * 128);
            decode_rows(ctx, text, 0, n);
            decode_rows(plain, text, 0, n);
            for (int row = 0; row < n; ++row) {
                int token        = -1;
                const bool found = eagle3::sample_found(ctx, chain, row, token);
                CHECK(!found || llama_logits_stay_ith(ctx, row));
                CHECK(found || token == -1);
                CHECK((found ? token : eagle3::sample(ctx, chain, row)) == eagle3::sample(plain, copy, row));
                CHECK(!eagle3::sample_found(plain, copy, row, token));
                n_found += found;
            }
        }
        llama_sampler_free(chain);
        llama_sampler_free(copy);
    }
    llama_free(ctx);
    llama_free(plain);
    return n_found;
}

// -- rounds -----------------------------------------------------------------------------------------------

// What rounds say with a sampler, in chains and trees of the head's.
tokens said(target & t, const char * head_path, const llama_sampler * like, bool on_device, bool tree) {
    llama_context * ctx  = make_context(t.model, 1, N_CTX, 128, 64);
    eagle3_head * head   = nullptr;
    eagle3_session * s   = nullptr;
    const tokens prompt  = {1, 60, 70, 80, 90};
    llama_sampler * mine = llama_sampler_clone(like);
    CHECK(eagle3_head_open(head_path, t.model, &head) == 0);
    CHECK(eagle3_session_open(ctx, head, 1, &s) == 0);
    device_buffer = on_device ? t.output->buffer : nullptr;
    CHECK(eagle3_prefill(s, 0, prompt.data(), (int) prompt.size(), 0) == 0);
    tokens text = {eagle3_sample(s, mine, -1)};
    while (text.size() < 60) {
        int32_t out[EAGLE3_MAX_ROWS];
        CHECK(decode(s, tree ? ask_for(0, text.back(), EAGLE3_TREE, 12, 3, 4)
                             : ask_for(0, text.back(), EAGLE3_CHAIN, 3)) >= 0);
        const int n = verify(s, mine, out);
        CHECK(n > 0);
        for (int i = 0; i < n; ++i) {
            CHECK(llama_get_logits_ith(ctx, eagle3_verified_row(s, 0, i)) != nullptr);
        }
        CHECK(commit(s, n) == 0);
        text.insert(text.end(), out, out + n);
    }
    device_buffer = nullptr;
    eagle3_session_close(s);
    eagle3_head_close(head);
    llama_sampler_free(mine);
    llama_free(ctx);
    text.resize(60);
    return text;
}

void rounds_say_the_same(target & t, const char * head) {
    for (int i = 0; i < 12; ++i) {
        llama_sampler * chain = some_chain(t);
        CHECK(said(t, head, chain, true, i % 2) == said(t, head, chain, false, i % 2));
        llama_sampler_free(chain);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 3);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    target t(argv[1]);
    rows_are_read_when_wanted(t);
    a_decode_that_fails(t);
    CHECK(samplers_agree(t) > 500);
    rounds_say_the_same(t, argv[2]);

    // each logit twice: which of the two a device finds first is its own affair
    for (int i = 1; i < t.n_vocab; i += 2) {
        std::copy_n(t.row(i - 1), t.output->ne[0], t.row(i));
    }
    t.put();
    rows_are_read_when_wanted(t);
    samplers_agree(t);  // few can go on: penalties make some of them differ
    rounds_say_the_same(t, argv[2]);

    // infinite logits, some NaN, nothing but NaN
    t.row(7)[0] = INFINITY;
    t.put();
    rows_are_read_when_wanted(t);
    t.row(9)[0] = NAN;
    t.put();
    rows_are_read_when_wanted(t);
    for (int i = 0; i < t.n_vocab; ++i) {
        t.row(i)[0] = NAN;
    }
    t.put();
    rows_are_read_when_wanted(t);
    printf("ok\n");
}
