// A graph that is built once for a shape and kept. runner_graph.cpp builds it, runner.cpp runs it.
#pragma once

#include "head/runner.hpp"

namespace eagle3 {

constexpr int KV_PAD = 256;  // a graph serves this many positions before the next one is built

inline int pad(int n, int to) {
    return (n + to - 1) / to * to;
}

// This is what some of the rows need to attend: their positions, what they see, and, for rows of several
// slots, the row in each place of the rectangle and each row's place.
struct runner::attention {
    ggml_tensor *pos = nullptr, *mask = nullptr, *row = nullptr, *place = nullptr;
};

// This is a pass's tensors, or those of a step behind it.
struct runner::step {
    int n_rows = 0, n_out = 0;
    bool out_last       = true;
    ggml_tensor *tokens = nullptr, *x = nullptr, *x_rows = nullptr, *pos = nullptr, *cells = nullptr,
                *out_rows = nullptr, *state_rows = nullptr,
                *own = nullptr;  // inputs; own: see runner_ahead.cpp
    attention inner, last;       // all rows, in the layers before the last one; rows with outputs
    ggml_tensor *g = nullptr, *state = nullptr, *logits = nullptr, *best = nullptr, *ids = nullptr,
                *probs = nullptr, *chosen = nullptr;  // outputs
    ggml_tensor *mask = nullptr, *reach = nullptr;    // made by a step behind the pass: for the next one
};

struct runner::built {
    pass_shape shape;
    uint64_t used = 0;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    ggml_backend_sched_ptr sched;
    std::vector<step> steps;                                            // the pass, and those behind it
    ggml_tensor *base = nullptr, *zeros = nullptr, *parents = nullptr;  // inputs of the steps behind it
    std::vector<ggml_tensor *> inputs, outputs;                         // they lie in the io buffer
    ggml_tensor *in = nullptr, *out = nullptr;                          // all of them, as bytes
    ggml_backend_buffer_ptr io;                                         // for a graph that is not kept
};

}  // namespace eagle3
