// The result of a row and head over some cells that it sees: maximum of the scores, sum of their
// exponentials, values by these. Results of spans are added in the order of the spans.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace eagle3::kernels::attention {

// Floats of a result.
int64_t width_of(const ggml_tensor * op);

void clear(float * result, int64_t width);
// Adds the result of the cells that follow.
void add_result(float * result, const float * part, int64_t width);
// Writes row `row` of the queries, counted through the heads, from its result over all cells.
void write_row(ggml_tensor * op, int64_t row, float * result);

// Where row `row` of the queries lies, counted through the heads.
struct place {
    int64_t i1, i2, i3;  // row, head, stream

    place(const ggml_tensor * q, int64_t row)
        : i1(row % q->ne[1]), i2(row / q->ne[1] % q->ne[2]), i3(row / q->ne[1] / q->ne[2]) {}
};

// Its row of the mask.
const ggml_fp16_t * mask_of(const ggml_tensor * op, int64_t row);

// Calls f with the row and the head of units `from` to `to` of n_row rows: heads of keys, then rows, then
// heads.
template <typename F>
void each_unit(const ggml_tensor * op, int64_t n_row, int64_t from, int64_t to, F && f) {
    const int64_t n_of = op->src[0]->ne[2] / op->src[1]->ne[2];  // heads with the same keys
    int64_t of = from % n_of, row = from / n_of % n_row, kv = from / (n_of * n_row);
    for (int64_t u = from; u < to; ++u) {
        f(row, kv * n_of + of);
        if (++of == n_of) {
            of = 0;
            if (++row == n_row) {
                row = 0;
                ++kv;
            }
        }
    }
}

}  // namespace eagle3::kernels::attention
