#include "attention/results.hpp"

#include "attention/cells.hpp"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace eagle3::kernels::attention {

int64_t width_of(const ggml_tensor * op) {
    return 2 + op->src[2]->ne[0];
}

void clear(float * result, int64_t width) {
    std::fill_n(result, width, 0.0f);
    result[0] = -INFINITY;
}

// It is one function for all callers, so that they round alike.
[[gnu::noinline]] void add_result(float * result, const float * part, int64_t width) {
    if (part[1] == 0.0f) {
        return;
    }
    if (result[1] == 0.0f) {
        std::copy_n(part, width, result);
        return;
    }
    const float max      = fmaxf(result[0], part[0]);
    const float scale    = result[0] == max ? 1.0f : expf(result[0] - max);
    const float by       = part[0] == max ? 1.0f : expf(part[0] - max);
    float * values       = result + 2;
    const float * others = part + 2;
    for (int64_t d = 0; d < width - 2; ++d) {
        values[d] = values[d] * scale + others[d] * by;
    }
    result[1] = result[1] * scale + part[1] * by;
    result[0] = max;
}

const ggml_fp16_t * mask_of(const ggml_tensor * op, int64_t row) {
    const place p(op->src[0], row);
    return mask_row(op, p.i1, p.i2, p.i3);
}

void write_row(ggml_tensor * op, int64_t row, float * result) {
    if (result[1] != 0.0f) {
        ggml_vec_scale_f32(op->src[2]->ne[0], result + 2, 1.0f / result[1]);
    }
    const place p(op->src[0], row);
    std::memcpy((char *) op->data + ((p.i3 * op->ne[2] + p.i1) * op->ne[1] + p.i2) * op->nb[1], result + 2,
        op->nb[1]);
}

}  // namespace eagle3::kernels::attention
