// Where a tensor's rows lie.
#pragma once

#include "ggml.h"

namespace eagle3::kernels {

// Row i of all rows of t. A tensor with fewer in a dimension begins again there.
inline char * row_at(const ggml_tensor * t, int64_t i, const ggml_tensor * shape) {
    const int64_t i1 = i % shape->ne[1], i2 = i / shape->ne[1] % shape->ne[2],
                  i3 = i / shape->ne[1] / shape->ne[2];
    return (char *) t->data + i1 % t->ne[1] * t->nb[1] + i2 % t->ne[2] * t->nb[2] + i3 % t->ne[3] * t->nb[3];
}
inline char * row_at(const ggml_tensor * t, int64_t i) {
    return row_at(t, i, t);
}

inline bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const auto *a_data = (const char *) a->data, *b_data = (const char *) b->data;
    return a_data < b_data + ggml_nbytes(b) && b_data < a_data + ggml_nbytes(a);
}

}  // namespace eagle3::kernels
