// The steps behind a pass: each continues what the one before found, and the host learns of all of them at
// once. What a row sees is known before only in part: the text, and its own cell. The cells of the rows that
// it follows come from their rows of the mask.
#include "head/runner_builder.hpp"

#include <cmath>

namespace eagle3 {

void runner::builder::look_ahead() const {
    const pass_shape & s = b.shape;
    const int n_rows     = s.out.n * s.width;
    b.base               = input(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.n_kv, 1, s.n_slots));
    b.zeros              = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, n_rows));
    if (s.width > 1 && s.ahead > 1) {
        b.parents = input(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, (int64_t) s.width * s.k));
    }
    for (int i = 0; i < s.ahead; ++i) {
        b.steps.emplace_back();
        step &last = b.steps[i], &next = b.steps[i + 1];
        next.n_rows = next.n_out = n_rows;
        next.pos                 = ids(n_rows);
        next.cells               = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows));
        next.state_rows          = ids(n_rows);
        next.own                 = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows));
        next.last.pos            = next.pos;
        if (!s.whole) {
            next.last.row   = ids((int64_t) s.width * s.n_slots);
            next.last.place = ids(n_rows);
        }
        i > 0 && s.width > 1 ? choose(next, last) : go_on(next, last);
        // Each row sees its own cell, too.
        const int64_t n_mask = (int64_t) s.n_kv * s.width * s.n_slots;
        next.mask      = ggml_set_rows(ctx, ggml_reshape_2d(ctx, next.mask, 1, n_mask), b.zeros, next.own);
        next.mask      = ggml_reshape_4d(ctx, next.mask, s.n_kv, s.width, 1, s.n_slots);
        next.last.mask = ggml_cast(ctx, next.mask, GGML_TYPE_F16);
        next.inner     = next.last;
        forward(next, next.x, ggml_reshape_1d(ctx, ggml_get_rows(ctx, h.d2t_ids, next.tokens), n_rows));
    }
}

// The step continues the most probable ids, or in a tree all ids of the pass.
void runner::builder::go_on(step & next, const step & last) const {
    const pass_shape & s = b.shape;
    const int64_t w = s.width, n = s.out.n;
    next.tokens = ggml_reshape_1d(ctx, w > 1 ? last.ids : last.best, w * n);
    next.x      = last.state;
    next.mask   = last.mask ? last.mask : b.base;
    if (w > 1) {
        next.x     = ggml_reshape_3d(ctx, next.x, h.n_embd, 1, n);
        next.x     = ggml_reshape_2d(ctx, ggml_repeat_4d(ctx, next.x, h.n_embd, w, n, 1), h.n_embd, w * n);
        next.mask  = ggml_repeat_4d(ctx, b.base, s.n_kv, w, s.n_slots, 1);
        next.reach = last.probs;
    }
}

// The step continues those ids of the step before whose paths are most probable: of each output as many as it
// has rows.
void runner::builder::choose(step & next, const step & last) const {
    const pass_shape & s = b.shape;
    const int64_t w = s.width, n = s.out.n;
    ggml_tensor * all = ggml_mul(
        ctx, ggml_reshape_2d(ctx, last.probs, s.k, w * n), ggml_reshape_2d(ctx, last.reach, 1, w * n));
    next.chosen      = output(ggml_top_k(ctx, ggml_reshape_2d(ctx, all, s.k * w, n), (int) w));  // [w, n]
    next.reach       = ggml_get_rows(ctx, ggml_reshape_3d(ctx, all, 1, s.k * w, n), next.chosen);
    next.tokens      = ggml_get_rows(ctx, ggml_reshape_3d(ctx, last.ids, 1, s.k * w, n), next.chosen);
    next.tokens      = ggml_reshape_1d(ctx, next.tokens, w * n);
    ggml_tensor * of = ggml_get_rows(ctx, b.parents, ggml_reshape_1d(ctx, next.chosen, w * n));
    of               = ggml_reshape_2d(ctx, of, w, n);
    next.x    = ggml_get_rows(ctx, ggml_reshape_3d(ctx, last.state, h.n_embd, w, n), of);  // [n_embd, w, n]
    next.x    = ggml_reshape_2d(ctx, next.x, h.n_embd, w * n);
    next.mask = ggml_get_rows(ctx, ggml_reshape_3d(ctx, last.mask, s.n_kv, w, n), of);
}

// -- inputs -----------------------------------------------------------------------------------------------

// Returns the number of rows of each of the steps.
int runner::rows_of(const built & b, int step) {
    return b.shape.out.n * (step > 0 ? b.shape.width : 1);
}

void runner::set_ahead(const built & b, const pass & p) {
    const pass_shape & s = b.shape;
    const int n = rows_of(b, 1), w = s.width;
    std::vector<float> base((size_t) s.n_kv * s.n_slots, -INFINITY);
    for (int i = 0; i < n; i += w) {
        const pass_row & r = p.ahead[i];
        const auto begin   = base.begin() + (size_t) (r.slot - s.slot) * s.n_kv;
        std::fill(begin + r.from, begin + r.base, 0.0f);
    }
    set(b.base, base.data());
    set(b.zeros, std::vector<float>(n, 0.0f).data());
    if (b.parents) {
        std::vector<int32_t> parents;
        for (int i = 0; i < w * s.k; ++i) {
            parents.push_back(i / s.k);
        }
        set(b.parents, parents.data());
    }
    for (int step = 0; step < s.ahead; ++step) {
        std::vector<int32_t> pos, state, place, row((size_t) w * s.n_slots, 0);
        std::vector<int64_t> cells, own;
        for (int i = 0; i < n; ++i) {
            const pass_row & r = p.ahead[(size_t) step * n + i];
            pos.push_back(r.pos);
            state.push_back(r.state);
            place.push_back((r.slot - s.slot) * w + i % w);
            row[place[i]] = i;
            cells.push_back((int64_t) r.slot * n_ctx_ + r.cell);
            own.push_back((int64_t) place[i] * s.n_kv + r.cell);
        }
        const runner::step & to = b.steps[1 + step];
        set(to.pos, pos.data());
        set(to.state_rows, state.data());
        set(to.cells, cells.data());
        set(to.own, own.data());
        set(to.last.row, row.data());
        set(to.last.place, place.data());
    }
}

}  // namespace eagle3
