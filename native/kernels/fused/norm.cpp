#include "fused/norm.hpp"

#include "tensors.hpp"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <cmath>
#include <cstring>

namespace eagle3::kernels {

namespace {

// The sum of squares is one of doubles, as upstream's is, but in so many lanes, the same for every processor.
constexpr int N_LANE = 16;
// Larger vectors would lie in memory where a register is no larger than these.
typedef float floats __attribute__((vector_size(2 * sizeof(float))));
typedef double doubles __attribute__((vector_size(2 * sizeof(double))));

double sum_of_squares(const float * x, int64_t n) {
    doubles sums[N_LANE / 2] = {};
    int64_t i                = 0;
    for (; i + N_LANE <= n; i += N_LANE) {
        for (int pair = 0; pair < N_LANE / 2; ++pair) {
            floats v;
            std::memcpy(&v, x + i + 2 * pair, sizeof(v));
            sums[pair] += __builtin_convertvector(v * v, doubles);
        }
    }
    doubles both{};
    for (const doubles & s : sums) {
        both += s;
    }
    double sum = both[0] + both[1];
    for (; i < n; ++i) {
        sum += (double) (x[i] * x[i]);
    }
    return sum;
}

bool is_of_floats(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
}

// The factors that a row is multiplied by.
const ggml_tensor * factors_of(const norm & of) {
    return of.mul->src[of.mul->src[0] == of.rms];
}

bool fits(const norm & of) {
    const ggml_tensor *x = of.rms->src[0], *w = factors_of(of);
    if (!is_of_floats(x) || !is_of_floats(of.mul) || !is_of_floats(w) || w->ne[0] != x->ne[0]) {
        return false;
    }
    if (!of.add) {
        return true;
    }
    // A thread writes the product's row before others have read theirs of the addends.
    const auto is_apart = [&](const ggml_tensor * t) {
        return !overlap(of.mul, t) || (of.mul->data == t->data && ggml_are_same_stride(of.mul, t));
    };
    const ggml_tensor *a = of.add->src[0], *b = of.add->src[1];
    return x == of.add && is_of_floats(a) && is_of_floats(b) && ggml_are_same_shape(a, x) &&
           ggml_are_same_shape(b, x) && is_apart(a) && is_apart(b) && is_apart(x);
}

}  // namespace

bool norm_at(const ggml_cgraph * graph, int at, norm & out) {
    static constexpr ggml_op OPS[] = {GGML_OP_RMS_NORM, GGML_OP_MUL};
    const bool adds                = graph->nodes[at]->op == GGML_OP_ADD;
    if (!ggml_can_fuse(graph, at + adds, OPS, 2)) {
        return false;
    }
    out = {adds ? graph->nodes[at] : nullptr, graph->nodes[at + adds], graph->nodes[at + adds + 1]};
    return fits(out);
}

void compute(const norm & of, const ggml_compute_params * params) {
    const ggml_tensor *x = of.rms->src[0], *w = factors_of(of);
    const int64_t n = x->ne[0];
    float eps;
    std::memcpy(&eps, of.rms->op_params, sizeof(eps));
    GGML_ASSERT(eps >= 0.0f);
    for (int64_t row = params->ith; row < ggml_nrows(x); row += params->nth) {
        auto * from = (float *) row_at(x, row);
        if (of.add) {
            const auto *a = (const float *) row_at(of.add->src[0], row),
                       *b = (const float *) row_at(of.add->src[1], row);
            for (int64_t i = 0; i < n; ++i) {
                from[i] = a[i] + b[i];
            }
        }
        const float mean  = (float) (sum_of_squares(from, n) / (double) n);
        const float scale = 1.0f / sqrtf(mean + eps);
        const auto * by   = (const float *) row_at(w, row, x);
        auto * to         = (float *) row_at(of.mul, row);
        for (int64_t i = 0; i < n; ++i) {
            to[i] = from[i] * scale * by[i];
        }
    }
}

}  // namespace eagle3::kernels
