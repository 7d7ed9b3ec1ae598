#include "attention/rows.hpp"

#include "attention/cells.hpp"
#include "attention/results.hpp"
#include "ggml-cpu-impl.h"

#include <algorithm>
#include <vector>

namespace eagle3::kernels::attention {

namespace {

// The rows of a tile are computed together, so that keys and values which all of them see are widened once.
class tile {
  public:
    tile(ggml_tensor * op, int64_t n_most)
        : op_(op), n_kv_(op->src[1]->ne[1]), n_head_(op->src[0]->ne[2]), width_(width_of(op)),
          cells_(n_most * (n_kv_ + STEP)), added_(cells_.size()), n_cells_(n_most),
          parts_(n_most * n_head_ * width_), sums_(parts_.size()) {}

    // Computes rows first to first + n of a stream.
    void attend(batch & units, int64_t first, int64_t n, int64_t i3) {
        int n_most = 0;
        for (int64_t r = 0; r < n; ++r) {
            const ggml_fp16_t * mask = mask_row(op_, first + r, 0, i3);
            int64_t from             = 0;
            n_cells_[r]              = list_cells(mask, from, n_kv_, cells_of(r), n_kv_);
            list_added(mask, cells_of(r), n_cells_[r], added_of(r));
            n_most = std::max(n_most, n_cells_[r]);
        }
        for (int64_t u = 0; u < n * n_head_; ++u) {
            clear(sums_.data() + u * width_, width_);
        }
        for (int from = 0; from == 0 || from < n_most; from += SPAN) {
            add_span(units, first, n, i3, from);
        }
        for (int64_t u = 0; u < n * n_head_; ++u) {
            const int64_t r = u / n_head_, i2 = u % n_head_;
            write_row(op_, (i3 * n_head_ + i2) * op_->src[0]->ne[1] + first + r, sums_.data() + u * width_);
        }
    }

  private:
    int32_t * cells_of(int64_t r) { return cells_.data() + r * (n_kv_ + STEP); }
    float * added_of(int64_t r) { return added_.data() + r * (n_kv_ + STEP); }

    // Adds a span of the cells that each row sees, from number `from` on.
    void add_span(batch & units, int64_t first, int64_t n, int64_t i3, int from) {
        each_unit(op_, n, 0, n * n_head_, [&](int64_t r, int64_t i2) {
            const seen cells = {
                cells_of(r) + from, added_of(r) + from, std::clamp(n_cells_[r] - from, 0, SPAN)};
            units.add(first + r, i2, i3, cells, from == 0, parts_.data() + (r * n_head_ + i2) * width_);
        });
        units.run();
        for (int64_t u = 0; u < n * n_head_; ++u) {
            add_result(sums_.data() + u * width_, parts_.data() + u * width_, width_);
        }
    }

    ggml_tensor * op_;
    int64_t n_kv_, n_head_, width_;
    std::vector<int32_t> cells_;
    std::vector<float> added_;
    std::vector<int> n_cells_;
    std::vector<float> parts_, sums_;  // by row and head
};

// False for shapes without a kernel.
bool attend_in_tiles(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1];
    batch units(op);
    if (!units.has_kernel()) {
        return false;
    }
    // rows of a tile: as many as a batch holds, but every thread gets several tiles
    const int64_t most   = std::clamp<int64_t>(batch::MOST / (q->ne[2] / k->ne[2]), 1, 4);
    const int64_t size   = std::clamp<int64_t>(q->ne[1] * q->ne[3] / (4 * params->nth), 1, most);
    const int64_t n_tile = (q->ne[1] + size - 1) / size;  // in a stream
    tile rows(op, size);
    for (int64_t job = params->ith; job < n_tile * q->ne[3]; job += params->nth) {
        const int64_t first = job % n_tile * size;
        rows.attend(units, first, std::min(size, q->ne[1] - first), job / n_tile);
    }
    return true;
}

// Does the same over a cache that upstream's kernel alone reads. False where upstream has tiles.
bool attend_many_cell_by_cell(
    const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells) {
    if (!ggml_is_quantized(op->src[1]->type) && !ggml_is_quantized(op->src[2]->type)) {
        return false;
    }
    const int64_t n_kv = op->src[1]->ne[1], width = width_of(op), n_row = ggml_nrows(op->src[0]);
    const int64_t share = (n_row + params->nth - 1) / params->nth;
    std::vector<float> part(width), sum(width);
    for (int64_t row = share * params->ith; row < std::min(share * (params->ith + 1), n_row); ++row) {
        clear(sum.data(), width);
        for (int64_t from = 0, span = 1; from == 0 || from < n_kv; ++span) {
            const int64_t to = seen_cell(mask_of(op, row), n_kv, span * SPAN);
            attend_cells(params, op, (int) row, (int) row + 1, from, to, part.data(), 0);
            add_result(sum.data(), part.data(), width);
            from = to;
        }
        write_row(op, row, sum.data());
    }
    return true;
}

}  // namespace

bool attend_many_rows(
    const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells) {
    return attend_in_tiles(params, op) || attend_many_cell_by_cell(params, op, attend_cells);
}

}  // namespace eagle3::kernels::attention
