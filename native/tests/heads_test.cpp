// Loads every head named on standard input for one target, and drafts with those that load; run under the
// sanitizers.
//     heads_test TARGET.gguf < paths    prints a line a file: the status, then the message or the number of
//     drafts
#include "asks.hpp"
#include "llama.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

static int drafts(llama_context * ctx, eagle3_head * head) {
    eagle3_session * s = nullptr;
    int n              = eagle3_session_open(ctx, head, 1, &s);
    if (n == EAGLE3_OK) {
        const std::vector<int32_t> prompt = {5, 6, 7, 8, 9};
        n                                 = eagle3_prefill(s, 0, prompt.data(), (int32_t) prompt.size(), 0);
        n                                 = n == EAGLE3_OK ? draft(s, ask_for(0, 10, EAGLE3_CHAIN, 4)) : n;
        n = n >= 0 && eagle3_round_decode(s) == EAGLE3_OK && commit(s, 1) == EAGLE3_OK
                ? draft(s, ask_for(0, 11, EAGLE3_TREE, 8, 2, 3))
                : n;
    }
    eagle3_session_close(s);
    llama_memory_clear(llama_get_memory(ctx), true);
    return n;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: heads_test TARGET.gguf < paths\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model    = llama_model_load_from_file(argv[1], llama_model_default_params());
    llama_context_params p = llama_context_default_params();
    p.n_ctx                = 64;
    p.n_batch              = 64;
    p.n_threads = p.n_threads_batch = 1;
    llama_context * ctx             = llama_init_from_model(model, p);

    std::string path;
    while (std::getline(std::cin, path)) {
        const auto start   = std::chrono::steady_clock::now();
        eagle3_head * head = nullptr;
        int status         = eagle3_head_open(path.c_str(), model, &head);
        if (status == EAGLE3_OK) {
            status = drafts(ctx, head);
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        printf("%d %.3f %s\n", status, took.count(), status < 0 ? eagle3_last_error() : "");
        fflush(stdout);
        eagle3_head_close(head);
    }
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
