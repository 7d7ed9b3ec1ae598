#include "attention/cells.hpp"

#include "simd-mappings.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace eagle3::kernels::attention {

namespace {

constexpr ggml_fp16_t HIDDEN = 0xFC00;  // -INFINITY
constexpr int64_t RUN        = 64;      // cells that are counted together

// kept, as each layer of a decode needs them
thread_local std::vector<int32_t> span_list;
thread_local std::vector<float> span_added;
constexpr int64_t N_LIST = SPAN + STEP;  // for a row

int count_run(const ggml_fp16_t * mask) {
    int n = 0;
    for (int i = 0; i < RUN; ++i) {
        n += mask[i] != HIDDEN;
    }
    return n;
}

bool is_seen(const ggml_fp16_t * mask, int64_t cell) {
    return !mask || mask[cell] != HIDDEN;
}

}  // namespace

const ggml_fp16_t * mask_row(const ggml_tensor * op, int64_t i1, int64_t i2, int64_t i3) {
    const ggml_tensor * mask = op->src[3];
    return mask ? (const ggml_fp16_t *) ((const char *) mask->data + i1 * mask->nb[1] +
                                         i2 % mask->ne[2] * mask->nb[2] + i3 % mask->ne[3] * mask->nb[3])
                : nullptr;
}

int64_t count_seen(const ggml_fp16_t * mask, int64_t n_kv) {
    if (!mask) {
        return n_kv;
    }
    int64_t n = 0, cell = 0;
    for (; cell + RUN <= n_kv; cell += RUN) {
        n += count_run(mask + cell);
    }
    for (; cell < n_kv; ++cell) {
        n += mask[cell] != HIDDEN;
    }
    return n;
}

int64_t seen_cell(const ggml_fp16_t * mask, int64_t n_kv, int64_t n) {
    if (!mask) {
        return std::min(n, n_kv);
    }
    int64_t cell = 0;
    for (; cell + RUN <= n_kv; cell += RUN) {
        const int seen = count_run(mask + cell);
        if (seen > n) {
            break;
        }
        n -= seen;
    }
    for (; cell < n_kv; ++cell) {
        if (mask[cell] != HIDDEN && n-- == 0) {
            break;
        }
    }
    return cell;
}

int list_cells(const ggml_fp16_t * mask, int64_t & cell, int64_t n_kv, int32_t * cells, int64_t n_most) {
    int n = 0;
    while (cell < n_kv && n < n_most) {
        const int64_t end = std::min(cell + RUN, n_kv);
        const int n_seen  = end - cell < RUN ? -1 : mask ? count_run(mask + cell) : (int) RUN;
        if (n_seen == 0) {
            cell = end;
        } else if (n_seen == RUN && n + RUN <= n_most) {
            std::iota(cells + n, cells + n + RUN, (int32_t) cell);
            n += RUN;
            cell = end;
        }
        for (; n_seen != 0 && cell < end && n < n_most; ++cell) {
            cells[n] = (int32_t) cell;
            n += is_seen(mask, cell);
        }
    }
    for (int i = n; i % STEP != 0; ++i) {
        cells[i] = cells[n - 1];
    }
    return n;
}

void list_added(const ggml_fp16_t * mask, const int32_t * cells, int n, float * added) {
    if (!mask) {
        std::fill_n(added, n, 0.0f);
    } else if (n > 0 && cells[n - 1] - cells[0] == n - 1) {
        ggml_cpu_fp16_to_fp32(mask + cells[0], added, n);
    } else {
        for (int c = 0; c < n; ++c) {
            added[c] = GGML_CPU_FP16_TO_FP32(mask[cells[c]]);
        }
    }
    std::fill(added + n, added + GGML_PAD(n, STEP), -INFINITY);
}

span_cells::span_cells(const ggml_tensor * op) : op_(op), rows_(op->src[0]->ne[1]) {
    span_list.resize(rows_.size() * N_LIST);
    span_added.resize(rows_.size() * N_LIST);
}

void span_cells::begin(int64_t i3, int64_t span) {
    i3_   = i3;
    span_ = span;
}

seen span_cells::of(int64_t i1) {
    int32_t * cells = span_list.data() + i1 * N_LIST;
    float * added   = span_added.data() + i1 * N_LIST;
    row & r         = rows_[i1];
    if (r.i3 != i3_ || r.span != span_) {
        const ggml_fp16_t * mask = mask_row(op_, i1, 0, i3_);
        const int64_t n_kv       = op_->src[1]->ne[1];
        const bool follows       = r.i3 == i3_ && r.span == span_ - 1;
        r.after                  = follows ? r.after : seen_cell(mask, n_kv, span_ * SPAN);
        r.span                   = span_;
        r.i3                     = i3_;
        r.n                      = list_cells(mask, r.after, n_kv, cells, SPAN);
        list_added(mask, cells, r.n, added);
    }
    return {cells, added, r.n};
}

}  // namespace eagle3::kernels::attention
