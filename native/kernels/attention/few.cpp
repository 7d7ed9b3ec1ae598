#include "attention/rows.hpp"

#include "attention/cells.hpp"
#include "attention/results.hpp"
#include "ggml-cpu-impl.h"
#include "ops.h"

#include <algorithm>
#include <vector>

namespace eagle3::kernels::attention {

namespace {

int64_t spans_of(const ggml_tensor * op) {
    return (op->src[1]->ne[1] + SPAN - 1) / SPAN;
}

// How many results of a row the work buffer has places for. With fewer places than spans, results are added
// as they come: the first place then holds the sum of the spans so far.
int64_t places_of(const ggml_tensor * op) {
    constexpr int64_t MOST_BYTES = 8 << 20;
    const int64_t bytes          = ggml_nrows(op->src[0]) * width_of(op) * (int64_t) sizeof(float);
    return std::min(std::max<int64_t>(MOST_BYTES / bytes, 2), spans_of(op));
}

// The results in the work buffer, by row and place.
struct results {
    float * first;
    int64_t n_place, width;

    results(const ggml_compute_params * params, const ggml_tensor * op)
        : first((float *) params->wdata + params->nth * scratch_of(op)), n_place(places_of(op)),
          width(width_of(op)) {}

    float * of(int64_t row, int64_t at) const { return first + (row * n_place + at) * width; }
};

// Spans that are computed before results are added. at: the place of the first one.
struct run {
    int64_t from, to, at;

    int64_t place(int64_t span) const { return at + span - from; }
};

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

    const std::vector<int64_t> & n_span() const { return n_span_; }  // by stream

    // What thread ith computes of a run of spans, in turn.
    std::vector<part> of(const run & spans, int ith, int nth) const {
        std::vector<part> parts;
        int64_t total = 0, base = 0;
        for (int64_t span = spans.from; span < spans.to; ++span) {
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

// A thread's share of a run of spans. whole: rows have no other span, and are written at once.
void attend_run(const ggml_compute_params * params, ggml_tensor * op, batch & units, span_cells & cells,
    const std::vector<shares::part> & parts, const run & spans, bool whole) {
    const int64_t n_row = op->src[0]->ne[1], n_head = op->src[0]->ne[2];
    const results all(params, op);
    for (const shares::part & p : parts) {
        const auto row_of = [&](int64_t i1, int64_t i2) {
            return (p.i3 * n_head + i2) * n_row + i1;
        };
        const auto result = [&](int64_t i1, int64_t i2) {
            return all.of(row_of(i1, i2), spans.place(p.span));
        };
        cells.begin(p.i3, p.span);
        each_unit(op, n_row, p.from, p.to, [&](int64_t i1, int64_t i2) {
            units.add(i1, i2, p.i3, cells.of(i1), p.span == 0, result(i1, i2));
        });
        units.run();
        if (whole) {
            each_unit(op, n_row, p.from, p.to,
                [&](int64_t i1, int64_t i2) { write_row(op, row_of(i1, i2), result(i1, i2)); });
        }
    }
}

// The same by upstream's kernel, which takes one cell after the other.
void attend_run_cell_by_cell(const ggml_compute_params * params, ggml_tensor * op,
    eagle3_attend_cells attend_cells, const run & spans) {
    const int64_t n_span = spans.to - spans.from, n_kv = op->src[1]->ne[1];
    const results all(params, op);
    for (int64_t job = params->ith; job < ggml_nrows(op->src[0]) * n_span; job += params->nth) {
        const int64_t row = job / n_span, span = spans.from + job % n_span;
        const ggml_fp16_t * mask = mask_of(op, row);
        const int64_t from       = span == 0 ? 0 : seen_cell(mask, n_kv, span * SPAN);  // sinks count at 0
        const int64_t to         = seen_cell(mask, n_kv, (span + 1) * SPAN);
        attend_cells(params, op, (int) row, (int) row + 1, from, to, all.of(0, spans.place(span)),
            all.n_place * all.width);
    }
}

// Adds the results of a run of spans to the sums in the first places. n_span: of each stream. last: rows are
// written.
void add_run(const ggml_compute_params * params, ggml_tensor * op, const std::vector<int64_t> & n_span,
    const run & spans, bool last) {
    const results all(params, op);
    for (int64_t row = params->ith; row < ggml_nrows(op->src[0]); row += params->nth) {
        float * sum = all.of(row, 0);
        if (spans.from == 0 && sum[1] == 0.0f) {
            clear(sum, all.width);
        }
        const int64_t to = std::min(spans.to, n_span[place(op->src[0], row).i3]);
        for (int64_t span = std::max<int64_t>(spans.from, 1); span < to; ++span) {
            add_result(sum, all.of(row, spans.place(span)), all.width);
        }
        if (last) {
            write_row(op, row, sum);
        }
    }
}

// Calls attend with runs of spans, and adds their results. n_span: of each stream.
template <typename F>
void each_run(
    const ggml_compute_params * params, ggml_tensor * op, const std::vector<int64_t> & n_span, F && attend) {
    const int64_t n_most = *std::max_element(n_span.begin(), n_span.end()), n_place = places_of(op);
    for (run spans = {0, 0, 0}; spans.to < n_most;) {
        const int64_t at = spans.to > 0;  // the first place holds the sum
        spans            = {spans.to, std::min(spans.to + n_place - at, n_most), at};
        attend(spans);
        ggml_barrier(params->threadpool);
        add_run(params, op, n_span, spans, spans.to == n_most);
        if (spans.to < n_most) {
            ggml_barrier(params->threadpool);  // before the places are used again
        }
    }
}

}  // namespace

void attend_few_rows(const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells) {
    batch units(op);
    if (!units.has_kernel()) {
        const std::vector<int64_t> n_span(op->src[0]->ne[3], spans_of(op));
        each_run(params, op, n_span,
            [&](const run & spans) { attend_run_cell_by_cell(params, op, attend_cells, spans); });
        return;
    }
    const shares all(op);
    span_cells cells(op);
    const auto attend = [&](const run & spans, bool whole) {
        attend_run(params, op, units, cells, all.of(spans, params->ith, params->nth), spans, whole);
    };
    if (*std::max_element(all.n_span().begin(), all.n_span().end()) == 1) {
        attend({0, 1, 0}, true);
    } else {
        each_run(params, op, all.n_span(), [&](const run & spans) { attend(spans, false); });
    }
}

size_t work_of_results(const ggml_tensor * op) {
    return sizeof(float) * ggml_nrows(op->src[0]) * places_of(op) * width_of(op);
}

int64_t scratch_of(const ggml_tensor * op) {
    return op->src[1]->ne[0] + 2 * op->src[2]->ne[0] + (int64_t) CACHE_LINE_SIZE_F32;
}

}  // namespace eagle3::kernels::attention
