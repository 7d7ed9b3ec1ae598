// Which cells a row sees. Hidden cells may lie between them: a draft that is a tree has some (patch 0007).
#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace eagle3::kernels::attention {

// One maximum and one sum are taken of at most so many cells. The number is fixed, so that neither the number
// of threads nor the padded length of the cache changes a result.
constexpr int SPAN = 512;
constexpr int STEP = 16;  // cells whose keys or values are widened together

// Returns row i1 of the mask, of head i2 and stream i3. It is null where there is no mask, and no cell is
// hidden.
const ggml_fp16_t * mask_row(const ggml_tensor * op, int64_t i1, int64_t i2, int64_t i3);

// Counts how many of n_kv cells a row sees.
int64_t count_seen(const ggml_fp16_t * mask, int64_t n_kv);

// Finds the n-th cell that a row sees, counted from 0. It is n_kv if the row sees fewer.
int64_t seen_cell(const ggml_fp16_t * mask, int64_t n_kv, int64_t n);

// Lists the cells that a row sees from `cell` on, at most n_most, and the last one again up to a multiple of
// STEP. Returns their number, and moves `cell` behind them.
int list_cells(const ggml_fp16_t * mask, int64_t & cell, int64_t n_kv, int32_t * cells, int64_t n_most);

// Lists what the mask adds to the scores of n cells, and then -INFINITY up to a multiple of STEP.
void list_added(const ggml_fp16_t * mask, const int32_t * cells, int n, float * added);

// These are cells that a row sees, as list_cells() and list_added() give them.
struct seen {
    const int32_t * cells;
    const float * added;
    int n;
};

// Lists what rows see of a span once for all heads that share a mask. A thread may have one at a time.
class span_cells {
  public:
    explicit span_cells(const ggml_tensor * op);
    void begin(int64_t i3, int64_t span);
    seen of(int64_t i1);

  private:
    const ggml_tensor * op_;
    int64_t i3_ = 0, span_ = 0;
    struct row {
        int n        = 0;
        int64_t span = -1, i3 = -1;  // that is listed
        int64_t after = 0;           // the cell behind these
    };
    std::vector<row> rows_;
};

}  // namespace eagle3::kernels::attention
