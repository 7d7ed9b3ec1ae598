// Gathers rows and heads that share a head of keys, and computes them together.
#pragma once

#include "attention/units.hpp"

#include "ggml.h"

namespace eagle3::kernels::attention {

// A thread may have one at a time, which takes its space.
class batch {
  public:
    static constexpr int MOST = 32;  // rows and heads

    explicit batch(const ggml_tensor * op);
    bool has_kernel() const { return attend_; }
    // Adds row i1 of head i2 and stream i3 over at most SPAN cells. After run() the result is in out. first:
    // with the head's sink; all of a run are, or none is. Those that share a head of keys follow each other.
    void add(int64_t i1, int64_t i2, int64_t i3, const seen & cells, bool first, float * out);
    void run();

  private:
    void add_slope(unit & u, int64_t i2) const;
    void pad(unit & u) const;
    void add_sink(int64_t i2, float * out) const;

    const ggml_tensor * op_;
    attend attend_;
    float scale_, max_bias_, softcap_;
    int64_t kv_ = 0, i3_ = 0;  // the head of keys, and the stream
    int n_      = 0;
    bool first_ = false;
    int64_t heads_[MOST];
    unit units_[MOST];
    float * results_[MOST];
    float *block_, *padded_;  // padded copies of a unit's q and out, where these end within a register
    int64_t pad_k_, pad_v_;   // their sizes; 0 where none is needed
};

}  // namespace eagle3::kernels::attention
