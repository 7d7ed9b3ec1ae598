#include "attention/batch.hpp"

#include <algorithm>
#include <vector>

namespace eagle3::kernels::attention {

namespace {

thread_local float all_scores[batch::MOST][SPAN];
thread_local std::vector<float> space;  // two times sixteen cells, then padded copies

head head_of(const ggml_tensor * x, int64_t i2, int64_t i3) {
    return {(const char *) x->data + i2 * x->nb[2] + i3 * x->nb[3], x->nb[1], x->type, (int) x->ne[0]};
}

float parameter(const ggml_tensor * op, int i) {
    float x;
    std::memcpy(&x, (const float *) op->op_params + i, sizeof(x));
    return x;
}

// A head forgets so fast (ALiBi).
float slope_of(const ggml_tensor * q, float max_bias, int64_t i2) {
    const int64_t n_head_log2 = int64_t(1) << (int) floor(log2(q->ne[2]));
    return i2 < n_head_log2 ? powf(powf(2.0f, -max_bias / n_head_log2), i2 + 1)
                            : powf(powf(2.0f, -max_bias / 2.0f / n_head_log2), 2 * (i2 - n_head_log2) + 1);
}

// Counts how many of a unit's first cells are these, too.
int count_same(const unit & u, const seen & cells) {
    const int n_both = std::min(u.n, cells.n);
    if (u.cells == cells.cells) {
        return n_both;
    }
    int n = 0;
    for (; n + STEP <= n_both; n += STEP) {
        int32_t differ = 0;
        for (int i = n; i < n + STEP; ++i) {
            differ |= u.cells[i] ^ cells.cells[i];
        }
        if (differ) {
            break;
        }
    }
    return n;
}

}  // namespace

batch::batch(const ggml_tensor * op)
    : op_(op), attend_(attend_of(op)), scale_(parameter(op, 0)), max_bias_(parameter(op, 1)),
      softcap_(parameter(op, 2)) {
    const ggml_tensor *k = op->src[1], *v = op->src[2];
    const int64_t nk = head_of(k, 0, 0).registers() * LANES, nv = head_of(v, 0, 0).registers() * LANES;
    pad_k_ = nk == k->ne[0] ? 0 : nk;
    pad_v_ = nv == v->ne[0] ? 0 : 2 + nv;
    space.resize(16 + 2 * STEP * std::max(nk, nv) + MOST * (pad_k_ + pad_v_));
    block_  = space.data() + (64 - (uintptr_t) space.data() % 64) % 64 / sizeof(float);
    padded_ = space.data() + space.size() - MOST * (pad_k_ + pad_v_);
    if (softcap_ != 0.0f) {
        scale_ /= softcap_;
    }
}

void batch::add(int64_t i1, int64_t i2, int64_t i3, const seen & cells, bool first, float * out) {
    const ggml_tensor *q = op_->src[0], *k = op_->src[1];
    const int64_t kv = i2 / (q->ne[2] / k->ne[2]);
    if (n_ == MOST || (n_ > 0 && (kv != kv_ || i3 != i3_))) {
        run();
    }
    if (cells.n == 0) {
        std::fill_n(out, 2 + op_->src[2]->ne[0], 0.0f);
        out[0] = -INFINITY;
        if (first) {
            add_sink(i2, out);
        }
        return;
    }
    kv_             = kv;
    i3_             = i3;
    first_          = first;
    heads_[n_]      = i2;
    results_[n_]    = out;
    const char * at = (const char *) q->data + i1 * q->nb[1] + i2 * q->nb[2] + i3 * q->nb[3];
    units_[n_] = {(const float *) at, cells.cells, cells.n, n_ > 0 ? count_same(units_[n_ - 1], cells) : 0,
        cells.added, all_scores[n_], out};
    if (max_bias_ > 0.0f) {
        add_slope(units_[n_], i2);
    }
    pad(units_[n_]);
    ++n_;
}

// What the mask adds, times the head's slope, takes the place of the scores.
void batch::add_slope(unit & u, int64_t i2) const {
    const float slope = slope_of(op_->src[0], max_bias_, i2);
    for (int c = 0; c < GGML_PAD(u.n, STEP); ++c) {
        u.scores[c] = slope * u.added[c];
    }
    u.added = u.scores;
}

void batch::pad(unit & u) const {
    float * padded = padded_ + n_ * (pad_k_ + pad_v_);
    if (pad_k_) {
        std::fill(std::copy_n(u.q, op_->src[1]->ne[0], padded), padded + pad_k_, 0.0f);
        u.q = padded;
    }
    if (pad_v_) {
        u.out = padded + pad_k_;
    }
}

void batch::run() {
    const ggml_tensor *q = op_->src[0], *k = op_->src[1], *v = op_->src[2];
    const int64_t k3 = i3_ / (q->ne[3] / k->ne[3]);
    if (n_ > 0) {
        attend_(units_, n_, head_of(k, kv_, k3), head_of(v, kv_, k3), scale_, softcap_, block_);
    }
    for (int u = 0; u < n_; ++u) {
        if (pad_v_) {
            std::copy_n(units_[u].out, 2 + v->ne[0], results_[u]);
        }
        if (first_) {
            add_sink(heads_[u], results_[u]);
        }
    }
    n_ = 0;
}

// A sink is one more score, of a cell without values.
void batch::add_sink(int64_t i2, float * out) const {
    if (!op_->src[4]) {
        return;
    }
    const float s = ((const float *) op_->src[4]->data)[i2];
    if (s > out[0]) {
        const float less = expf(out[0] - s);
        out[0]           = s;
        out[1]           = out[1] * less + 1.0f;
        ggml_vec_scale_f32(op_->src[2]->ne[0], out + 2, less);
    } else {
        out[1] += expf(s - out[0]);
    }
}

}  // namespace eagle3::kernels::attention
