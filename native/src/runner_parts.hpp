// A graph that is built once for a shape and kept. runner_graph.cpp builds it, runner.cpp runs it.
#pragma once

#include "runner.hpp"

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

struct runner::built {
    pass_shape shape;
    uint64_t used = 0;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    ggml_backend_sched_ptr sched;
    ggml_tensor *tokens = nullptr, *x = nullptr, *pos = nullptr, *cells = nullptr,
                *out_rows = nullptr;  // inputs
    attention inner, last;            // of all rows, in the layers before the last one; of those with outputs
    ggml_tensor *g = nullptr, *state = nullptr, *logits = nullptr, *ids = nullptr,
                *probs = nullptr;  // outputs
};

}  // namespace eagle3
