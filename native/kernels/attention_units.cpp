#include "attention_units.hpp"

#include "ggml-quants.h"

#include <algorithm>

namespace eagle3::kernels::attention {

namespace {

// What is always inlined is a part of attend_units(), where the number of registers is known.

template <typename T>
[[gnu::always_inline]] inline void widen(const head & x, const int32_t * cells, int n_register, float * out) {
    const int n_full = x.n / LANES;
    for (int c = 0; c < STEP; ++c) {
        const T * from = (const T *) (x.data + cells[c] * x.stride);
        float * to     = out + c * n_register * LANES;
        for (int d = 0; d < n_full; ++d) {
            put(to + d * LANES, widened(from + d * LANES));
        }
        if (n_full < n_register) {
            T rest[LANES] = {};
            std::memcpy(rest, from + n_full * LANES, (x.n - n_full * LANES) * sizeof(T));
            put(to + n_full * LANES, widened(rest));
        }
    }
}

// Blocks of quantised numbers, to the floats that upstream makes of them.

[[gnu::always_inline]] inline void widen_block(const block_q8_0 & b, float * out) {
    const floats scale = every(GGML_CPU_FP16_TO_FP32(b.d));
    for (int d = 0; d < QK8_0; d += LANES) {
        put(out + d, widened(get(b.qs + d)) * scale);
    }
}

[[gnu::always_inline]] inline void widen_block(const block_q4_0 & b, float * out) {
    const floats scale = every(GGML_CPU_FP16_TO_FP32(b.d));
    for (int d = 0; d < QK4_0 / 2; d += LANES) {
        const small_ints both = get((const int8_t *) b.qs + d);
        put(out + d, widened((both & 15) - 8) * scale);
        put(out + QK4_0 / 2 + d, widened(((both >> 4) & 15) - 8) * scale);
    }
}

template <typename T>
[[gnu::always_inline]] inline void widen_blocks(
    const head & x, const int32_t * cells, int n_register, float * out) {
    for (int c = 0; c < STEP; ++c) {
        const T * from = (const T *) (x.data + cells[c] * x.stride);
        float * to     = out + c * n_register * LANES;
        for (int d = 0; d < n_register * LANES; d += 32) {
            widen_block(*from++, to + d);
        }
    }
}

// The keys or values of sixteen cells. Blocks of the other types have 32 numbers as well.
[[gnu::always_inline]] inline void widen(const head & x, const int32_t * cells, int n_register, float * out) {
    switch (x.type) {
    case GGML_TYPE_F16:
        return widen<ggml_fp16_t>(x, cells, n_register, out);
    case GGML_TYPE_BF16:
        return widen<ggml_bf16_t>(x, cells, n_register, out);
    case GGML_TYPE_F32:
        return widen<float>(x, cells, n_register, out);
    case GGML_TYPE_Q8_0:
        return widen_blocks<block_q8_0>(x, cells, n_register, out);
    case GGML_TYPE_Q4_0:
        return widen_blocks<block_q4_0>(x, cells, n_register, out);
    default:
        for (int c = 0; c < STEP; ++c) {
            ggml_get_type_traits(x.type)->to_float(
                x.data + cells[c] * x.stride, out + c * n_register * LANES, x.n);
        }
    }
}

// Cells that lie apart are asked for so many before they are needed, because no prefetcher of the hardware
// foresees them.
constexpr int AHEAD = 64;

// Asks for sixteen cells of a unit, from cell i on.
[[gnu::always_inline]] inline void prefetch(const head & x, const unit & w, int i) {
    const size_t n_byte = ggml_row_size(x.type, x.n);
    for (int c = i; c < std::min(i + STEP, w.n); ++c) {
        const char * from = x.data + w.cells[c] * x.stride;
        for (size_t b = 0; b < n_byte; b += 64) {
            __builtin_prefetch(from + b);
        }
    }
}

bool same_cells(const int32_t * a, const int32_t * b) {
    return a == b || (a && std::memcmp(a, b, STEP * sizeof(int32_t)) == 0);
}

// Calls f for each unit and each sixteen cells of it, with these in block.
template <typename F>
[[gnu::always_inline]] inline void each_step(
    const unit * units, int n_unit, const head & x, int n_register, float * block, F && f) {
    int n_most = 0;
    for (int u = 0; u < n_unit; ++u) {
        n_most = std::max(n_most, units[u].n);
    }
    for (int i = 0; i < AHEAD; i += STEP) {
        prefetch(x, units[0], i);
    }
    for (int i = 0; i < n_most; i += STEP) {
        const int32_t * at = nullptr;
        for (int u = 0; u < n_unit; ++u) {
            const unit & w = units[u];
            if (i >= w.n) {
                continue;
            }
            if (!same_cells(at, w.cells + i)) {
                at = w.cells + i;
                prefetch(x, w, i + AHEAD);
                widen(x, at, n_register, block);
            }
            f(w, i);
        }
    }
}

// Adds to the scores of sixteen cells.
[[gnu::always_inline]] inline void add_scores(
    const float * block, int n_register, const float * q, float scale, float softcap, float * scores) {
    for (int j = 0; j < STEP; j += CELLS) {
        const float * b = block + j * n_register * LANES;
        floats x[CELLS];
        for (int c = 0; c < CELLS; ++c) {
            x[c] = get(b + c * n_register * LANES) * get(q);
        }
        for (int d = 1; d < n_register; ++d) {
            const floats part = get(q + d * LANES);
            for (int c = 0; c < CELLS; ++c) {
                x[c] = multiply_add(get(b + (c * n_register + d) * LANES), part, x[c]);
            }
        }
        for (int c = 0; c < CELLS; c += LANES) {
            float * at = scores + j + c;
            floats s   = sums(x + c) * every(scale);
            if (softcap != 0.0f) {
                for (int l = 0; l < LANES; ++l) {
                    s[l] = softcap * tanhf(s[l]);
                }
            }
            put(at, s + get(at));  // -INFINITY beyond n
        }
    }
}

float maximum(const float * x, int n) {
    floats most = every(-INFINITY);
    for (int i = 0; i < n; i += LANES) {
        const floats v = get(x + i);
        most           = most > v ? most : v;
    }
    float m = most[0];
    for (int i = 1; i < LANES; ++i) {
        m = m > most[i] ? m : most[i];
    }
    return m;
}

// Replaces scores by the exponentials of what they are above m, and sums these.
[[gnu::always_inline]] inline float exponentials(float * x, int n, float m) {
    floats sum = {};
    for (int i = 0; i < n; i += LANES) {
        const floats p = exponential(get(x + i) - every(m));
        put(x + i, p);
        sum += p;
    }
    float s = 0.0f;
    for (int i = 0; i < LANES; ++i) {
        s += sum[i];
    }
    return s;
}

// N registers of the values of n cells, each by its number in p.
template <int N>
[[gnu::always_inline]] inline void add_some_values(
    const float * block, int width, const float * p, int n, float * out) {
    floats sum[N];
    for (int d = 0; d < N; ++d) {
        sum[d] = get(out + d * LANES);
    }
    for (int c = 0; c < n; ++c) {
        const floats pc = every(p[c]);
        for (int d = 0; d < N; ++d) {
            sum[d] = multiply_add(get(block + c * width + d * LANES), pc, sum[d]);
        }
    }
    for (int d = 0; d < N; ++d) {
        put(out + d * LANES, sum[d]);
    }
}

// As many registers at a time as stay registers.
[[gnu::always_inline]] inline void add_values(
    const float * block, int n_register, const float * p, int n, float * out) {
    const int width = n_register * LANES;
    int d           = 0;
    for (; d + 8 <= n_register; d += 8) {
        add_some_values<8>(block + d * LANES, width, p, n, out + d * LANES);
    }
    for (; d + 4 <= n_register; d += 4) {
        add_some_values<4>(block + d * LANES, width, p, n, out + d * LANES);
    }
    for (; d < n_register; ++d) {
        add_some_values<1>(block + d * LANES, width, p, n, out + d * LANES);
    }
}

// NK, NV: registers of a head's keys and values, 0 for any number.
template <int NK, int NV>
void attend_units(const unit * units, int n_unit, const head & k, const head & v, float scale, float softcap,
    float * block) {
    const int nk = NK ? NK : k.registers(), nv = NV ? NV : v.registers();
    each_step(units, n_unit, k, nk, block,
        [&](const unit & w, int i) { add_scores(block, nk, w.q, scale, softcap, w.scores + i); });
    for (int u = 0; u < n_unit; ++u) {
        const unit & w = units[u];
        w.out[0]       = maximum(w.scores, w.n);
        w.out[1]       = exponentials(w.scores, w.n, w.out[0]);
        std::fill_n(w.out + 2, nv * LANES, 0.0f);
    }
    each_step(units, n_unit, v, nv, block, [&](const unit & w, int i) {
        add_values(block, nv, w.scores + i, std::min(STEP, w.n - i), w.out + 2);
    });
}

// Quantised heads are of whole blocks, and so of whole registers.
bool is_widened(const ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 || ggml_get_type_traits(x->type)->to_float != nullptr;
}

}  // namespace

attend attend_of(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    if (!is_widened(k) || !is_widened(v) || q->type != GGML_TYPE_F32 || k->ne[2] != v->ne[2] ||
        k->ne[3] != v->ne[3] || (mask && mask->ne[2] != 1)) {
        return nullptr;
    }
    constexpr int R = 16 / LANES;  // registers of sixteen floats
    if (k->ne[0] == v->ne[0]) {
        switch (k->ne[0]) {
        case 64:
            return attend_units<4 * R, 4 * R>;
        case 80:
            return attend_units<5 * R, 5 * R>;
        case 96:
            return attend_units<6 * R, 6 * R>;
        case 128:
            return attend_units<8 * R, 8 * R>;
        case 256:
            return attend_units<16 * R, 16 * R>;
        }
    }
    return attend_units<0, 0>;
}

}  // namespace eagle3::kernels::attention
