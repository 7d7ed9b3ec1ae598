#include "attention.h"

#include "attention_batch.hpp"
#include "attention_cells.hpp"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ops.h"

#include <algorithm>
#include <vector>

namespace eagle3::kernels::attention {

namespace {

// -- results of a row and head over some cells: maximum, sum, values

int64_t width_of(const ggml_tensor * op) {
    return 2 + op->src[2]->ne[0];
}

void clear(float * result, int64_t width) {
    std::fill_n(result, width, 0.0f);
    result[0] = -INFINITY;
}

// Adds that of some cells to that of those before. One function for all callers: the same roundings.
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

// Of row `row` of the queries, counted through the heads.
struct place {
    int64_t i1, i2, i3;  // row, head, stream

    place(const ggml_tensor * q, int64_t row)
        : i1(row % q->ne[1]), i2(row / q->ne[1] % q->ne[2]), i3(row / q->ne[1] / q->ne[2]) {}
};

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

// -- few rows: each row and head over spans of the cells that it sees, which are then added

int64_t spans_of(const ggml_tensor * op) {
    return (op->src[1]->ne[1] + SPAN - 1) / SPAN;
}

// Floats of the work buffer that a thread has for itself, as upstream's kernel takes them.
int64_t scratch_of(const ggml_tensor * op) {
    return op->src[1]->ne[0] + 2 * op->src[2]->ne[0] + (int64_t) CACHE_LINE_SIZE_F32;
}

// The work buffer behind these: results by row, head and span.
float * results_of(const ggml_compute_params * params, const ggml_tensor * op) {
    return (float *) params->wdata + params->nth * scratch_of(op);
}

// What the threads share: the rows and heads of each stream over each span. In the order of spans, then
// streams, each thread takes a run of about equal work.
class shares {
  public:
    explicit shares(const ggml_tensor * op)
        : n_unit_(op->src[0]->ne[1] * op->src[0]->ne[2]), n_seen_(op->src[0]->ne[3]),
          n_span_(n_seen_.size()) {
        for (size_t i3 = 0; i3 < n_seen_.size(); ++i3) {
            for (int64_t i1 = 0; i1 < op->src[0]->ne[1]; ++i1) {
                n_seen_[i3] =
                    std::max(n_seen_[i3], count_seen(mask_row(op, i1, 0, (int64_t) i3), op->src[1]->ne[1]));
            }
            n_span_[i3] = std::max<int64_t>((n_seen_[i3] + SPAN - 1) / SPAN, 1);  // a sink needs one
        }
    }

    // The units, from .. to, of a span and a stream.
    struct part {
        int64_t span, i3, from, to;
    };

    // By stream, and the most of them.
    const std::vector<int64_t> & n_span() const { return n_span_; }
    int64_t n_most() const { return *std::max_element(n_span_.begin(), n_span_.end()); }

    // What thread ith computes, in turn.
    std::vector<part> of(int ith, int nth) const {
        std::vector<part> parts;
        int64_t total = 0, base = 0;
        for (int64_t span = 0, n = n_most(); span < n; ++span) {
            for (size_t i3 = 0; i3 < n_span_.size(); ++i3) {
                if (span < n_span_[i3]) {
                    parts.push_back({span, (int64_t) i3, 0, n_unit_});
                    total += n_unit_ * weight(parts.back());
                }
            }
        }
        const int64_t from = total * ith / nth, to = total * (ith + 1) / nth;
        for (part & p : parts) {
            const int64_t w = weight(p);
            p.from          = std::clamp<int64_t>((from - base + w - 1) / w, 0, n_unit_);
            p.to            = std::clamp<int64_t>((to - base + w - 1) / w, 0, n_unit_);
            base += n_unit_ * w;
        }
        const auto is_empty = [](const part & p) {
            return p.from == p.to;
        };
        parts.erase(std::remove_if(parts.begin(), parts.end(), is_empty), parts.end());
        return parts;
    }

  private:
    // What a row and head costs: its cells, and something for itself.
    int64_t weight(const part & p) const {
        return std::min<int64_t>(n_seen_[p.i3] - p.span * SPAN, SPAN) + 16;
    }

    int64_t n_unit_;
    std::vector<int64_t> n_seen_, n_span_;  // by stream; of the row that sees the most cells
};

// Returns whether the rows are whole: no spans are to be added.
bool attend_few_rows(
    const ggml_compute_params * params, ggml_tensor * op, batch & units, const shares & all) {
    const int64_t n_row = op->src[0]->ne[1], n_head = op->src[0]->ne[2];
    const int64_t n_span = spans_of(op), width = width_of(op);
    const bool is_whole = all.n_most() == 1;
    span_cells cells(op);
    for (const shares::part & p : all.of(params->ith, params->nth)) {
        const auto result = [&](int64_t row) {
            return results_of(params, op) + (row * n_span + p.span) * width;
        };
        cells.begin(p.i3, p.span);
        const auto row_of = [&](int64_t i1, int64_t i2) {
            return (p.i3 * n_head + i2) * n_row + i1;
        };
        each_unit(op, n_row, p.from, p.to, [&](int64_t i1, int64_t i2) {
            units.add(i1, i2, p.i3, cells.of(i1), p.span == 0, result(row_of(i1, i2)));
        });
        units.run();
        if (is_whole) {
            each_unit(op, n_row, p.from, p.to,
                [&](int64_t i1, int64_t i2) { write_row(op, row_of(i1, i2), result(row_of(i1, i2))); });
        }
    }
    return is_whole;
}

void attend_few_cell_by_cell(
    const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells) {
    const int64_t n_span = spans_of(op), n_kv = op->src[1]->ne[1], width = width_of(op);
    for (int64_t job = params->ith; job < ggml_nrows(op->src[0]) * n_span; job += params->nth) {
        const int64_t row = job / n_span, span = job % n_span;
        const ggml_fp16_t * mask = mask_of(op, row);
        const int64_t from       = span == 0 ? 0 : seen_cell(mask, n_kv, span * SPAN);  // sinks count at 0
        const int64_t to         = seen_cell(mask, n_kv, (span + 1) * SPAN);
        attend_cells(params, op, (int) row, (int) row + 1, from, to, results_of(params, op) + span * width,
            n_span * width);
    }
}

// n_span: of each stream.
void add_spans(const ggml_compute_params * params, ggml_tensor * op, const std::vector<int64_t> & n_span) {
    const int64_t n_most = spans_of(op), width = width_of(op);
    float * sum = (float *) params->wdata + params->ith * scratch_of(op);
    for (int64_t row = params->ith; row < ggml_nrows(op->src[0]); row += params->nth) {
        clear(sum, width);
        for (int64_t span = 0; span < n_span[place(op->src[0], row).i3]; ++span) {
            add_result(sum, results_of(params, op) + (row * n_most + span) * width, width);
        }
        write_row(op, row, sum);
    }
}

// -- prompts: each row as few rows are computed

// Rows that are computed together, so that keys and values which all of them see are widened once.
class tile {
  public:
    tile(ggml_tensor * op, int64_t n_most)
        : op_(op), n_kv_(op->src[1]->ne[1]), n_head_(op->src[0]->ne[2]), width_(width_of(op)),
          cells_(n_most * (n_kv_ + STEP)), added_(cells_.size()), n_cells_(n_most),
          parts_(n_most * n_head_ * width_), sums_(parts_.size()) {}

    // Rows first to first + n of a stream.
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

    // The cells from number `from` on of those that each row sees.
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
bool attend_many_rows(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1];
    batch units(op);
    if (!units.has_kernel()) {
        return false;
    }
    // rows of a tile: as many as a batch holds, but every thread gets several tiles
    const int64_t most   = std::clamp<int64_t>(batch::MOST / (q->ne[2] / k->ne[2]), 1, 4);
    const int64_t size   = std::clamp<int64_t>(q->ne[1] * q->ne[3] / (4 * params->nth), 1, most);
    const int64_t n_tile = (q->ne[1] + size - 1) / size;  // of a stream
    tile rows(op, size);
    for (int64_t job = params->ith; job < n_tile * q->ne[3]; job += params->nth) {
        const int64_t first = job % n_tile * size;
        rows.attend(units, first, std::min(size, q->ne[1] - first), job / n_tile);
    }
    return true;
}

// Over a cache that upstream's kernel alone reads. False where upstream has tiles.
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

}  // namespace eagle3::kernels::attention

bool eagle3_attention(
    const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells) {
    using namespace eagle3::kernels::attention;
    GGML_ASSERT(params->wsize >= eagle3_attention_work(op, params->nth));
    if (op->src[0]->ne[1] > GGML_CPU_INVARIANT_ROWS) {
        return attend_many_rows(params, op) || attend_many_cell_by_cell(params, op, attend_cells);
    }
    batch units(op);
    if (units.has_kernel()) {
        const shares all(op);
        if (!attend_few_rows(params, op, units, all)) {
            ggml_barrier(params->threadpool);
            add_spans(params, op, all.n_span());
        }
    } else {
        attend_few_cell_by_cell(params, op, attend_cells);
        ggml_barrier(params->threadpool);
        add_spans(params, op, std::vector<int64_t>(op->src[0]->ne[3], spans_of(op)));
    }
    return true;
}

size_t eagle3_attention_work(const ggml_tensor * op, int n_thread) {
    using namespace eagle3::kernels::attention;
    const ggml_tensor * q  = op->src[0];
    const int64_t n_result = q->ne[1] > GGML_CPU_INVARIANT_ROWS ? 0 : ggml_nrows(q) * spans_of(op);
    return sizeof(float) * (n_result * width_of(op) + n_thread * scratch_of(op));
}
