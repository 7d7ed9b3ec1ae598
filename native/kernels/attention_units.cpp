#include "attention_units.hpp"

#include "ggml-quants.h"

#include <algorithm>

namespace eagle3::kernels::attention {

namespace {

// What is always inlined is a part of attend_units(), where the number of registers is known.

// N: the head's registers, all of them full, or 0 for any number.
template <int N, typename T>
[[gnu::always_inline]] inline void widen(const head & x, const int32_t * cells, int n_register, float * out) {
    const int n_full = N ? N : x.n / LANES;
    for (int c = 0; c < STEP; ++c) {
        const T * from = (const T *) (x.data + cells[c] * x.stride);
        float * to     = out + c * n_register * LANES;
#pragma GCC unroll 16
        for (int d = 0; d < n_full; ++d) {
            put(to + d * LANES, widened(from + d * LANES));
        }
        if (N == 0 && n_full < n_register) {
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
template <int N>
[[gnu::always_inline]] inline void widen(const head & x, const int32_t * cells, int n_register, float * out) {
    switch (x.type) {
    case GGML_TYPE_F16:
        return widen<N, ggml_fp16_t>(x, cells, n_register, out);
    case GGML_TYPE_BF16:
        return widen<N, ggml_bf16_t>(x, cells, n_register, out);
    case GGML_TYPE_F32:
        return widen<N, float>(x, cells, n_register, out);
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
// foresees them: first from memory to the second-level cache, which can wait for more lines at once than the
// first-level one, then from there.
constexpr int FAR = 192, NEAR = 64;
enum class level { FIRST, SECOND };

// Asks for sixteen cells of a unit, from cell i on.
template <level TO> [[gnu::always_inline]] inline void prefetch(const head & x, const unit & w, int i) {
    const size_t n_byte = ggml_row_size(x.type, x.n);
    for (int c = i; c < std::min(i + STEP, w.n); ++c) {
        const char * from = x.data + w.cells[c] * x.stride;
        for (size_t b = 0; b < n_byte; b += 64) {
            __builtin_prefetch(from + b, 0, TO == level::FIRST ? 3 : 2);
        }
    }
}

bool same_cells(const int32_t * a, const int32_t * b) {
    return a == b || (a && std::memcmp(a, b, STEP * sizeof(int32_t)) == 0);
}

// Calls f with units that see the same sixteen cells, how many they are, and the number of the first of these
// cells, which are in block. values: those of the same cells if x is their keys, which are needed after them;
// null if x is the values.
template <int N, typename F>
[[gnu::always_inline]] inline void each_step(const unit * units, int n_unit, const head & x,
    const head * values, int n_register, float * block, F && f) {
    int n_most = 0;
    for (int u = 0; u < n_unit; ++u) {
        n_most = std::max(n_most, units[u].n);
    }
    for (int i = 0; i < NEAR; i += STEP) {
        prefetch<level::FIRST>(x, units[0], i);
    }
    for (int i = NEAR; values && i < FAR; i += STEP) {
        prefetch<level::SECOND>(x, units[0], i);
    }
    for (int i = 0; i < n_most; i += STEP) {
        const int32_t * at = nullptr;  // of the last unit that has such cells
        const auto sees_at = [&](int u) {
            return u < n_unit && i < units[u].n &&
                   (i < units[u].n_same || same_cells(at, units[u].cells + i));
        };
        for (int u = 0, n; u < n_unit; u += n) {
            n = 1;
            if (i >= units[u].n) {
                continue;
            }
            if (!sees_at(u)) {
                at = units[u].cells + i;
                prefetch<level::FIRST>(x, units[u], i + NEAR);
                if (values) {
                    prefetch<level::SECOND>(x, units[u], i + FAR);
                    prefetch<level::SECOND>(*values, units[u], i);
                }
                widen<N>(x, at, n_register, block);
            }
            while (sees_at(u + n)) {
                ++n;
            }
            f(units + u, n, i);
        }
    }
}

// A register of scores from products of queries and keys: of sixteen cells from number i on.
[[gnu::always_inline]] inline void put_scores(
    floats sums, const unit & w, int i, float scale, float softcap) {
    floats s = sums * every(scale);
    if (softcap != 0.0f) {
        for (int l = 0; l < LANES; ++l) {
            s[l] = softcap * tanhf(s[l]);
        }
    }
    put(w.scores + i, s + get(w.added + i));
}

// Adds to the scores of sixteen cells, of N units at once: each register of the block is read once for them.
template <int N>
[[gnu::always_inline]] inline void add_some_scores(
    const float * block, int n_register, const unit * units, int i, float scale, float softcap) {
    constexpr int N_CELL = std::min(N == 1 ? CELLS : 4, LANES);
    for (int j = 0; j < STEP; j += LANES) {
        floats fours[N][LANES / 4];
#pragma GCC unroll 4
        for (int c0 = 0; c0 < LANES; c0 += N_CELL) {
            const float * b     = block + (j + c0) * n_register * LANES;
            floats x[N][N_CELL] = {};
#pragma GCC unroll 16
            for (int d = 0; d < n_register; ++d) {
#pragma GCC unroll 16
                for (int c = 0; c < N_CELL; ++c) {
                    floats key = get(b + (c * n_register + d) * LANES);
                    if (N > 1) {
                        keep(key);
                    }
#pragma GCC unroll 4
                    for (int u = 0; u < N; ++u) {
                        const floats part = get(units[u].q + d * LANES);
                        x[u][c]           = d == 0 ? key * part : multiply_add(key, part, x[u][c]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int u = 0; u < N; ++u) {
#pragma GCC unroll 4
                for (int c = 0; c < N_CELL; c += 4) {
                    fours[u][(c0 + c) / 4] = sums_of_four(x[u] + c);
                }
            }
        }
#pragma GCC unroll 4
        for (int u = 0; u < N; ++u) {
            put_scores(sums_of(fours[u]), units[u], i + j, scale, softcap);
        }
    }
}

// So many units make it worth it to turn the keys of sixteen cells over: a register then has one number of
// each cell, and no score is a sum of lanes.
constexpr int WORTH_TURNING = 12;

// The numbers of sixteen cells, number by number.
[[gnu::always_inline]] inline void turn(const float * block, int n_register, float * turned) {
    const size_t n = (size_t) n_register * LANES;
    for (size_t d = 0; d < n; d += 4) {
        turn_four(block + d, n, turned + d * STEP);
    }
}

// As add_some_scores, from keys that are turned over: products are added in the order in which it adds lanes.
template <int N>
[[gnu::always_inline]] inline void add_turned_scores(
    const float * turned, int n_register, const unit * units, int i, float scale, float softcap) {
    floats fours[N][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; ++four) {
        floats x[N][4] = {};
#pragma GCC unroll 16
        for (int d = 0; d < n_register; ++d) {
#pragma GCC unroll 4
            for (int lane = 0; lane < 4; ++lane) {
                const int at = d * LANES + 4 * four + lane;
                floats key   = get(turned + at * STEP);
                keep(key);
#pragma GCC unroll 4
                for (int u = 0; u < N; ++u) {
                    const floats part = every(units[u].q[at]);
                    x[u][lane]        = d == 0 ? key * part : multiply_add(key, part, x[u][lane]);
                }
            }
        }
#pragma GCC unroll 4
        for (int u = 0; u < N; ++u) {
            fours[u][four] = (x[u][0] + x[u][2]) + (x[u][1] + x[u][3]);
        }
    }
#pragma GCC unroll 4
    for (int u = 0; u < N; ++u) {
        put_scores((fours[u][0] + fours[u][1]) + (fours[u][2] + fours[u][3]), units[u], i, scale, softcap);
    }
}

// turned: space for turned keys.
[[gnu::always_inline]] inline void add_scores(const float * block, float * turned, int n_register,
    const unit * units, int n_unit, int i, float scale, float softcap) {
    int u = 0;
    if (TURNS && n_unit >= WORTH_TURNING) {
        turn(block, n_register, turned);
        for (; u + 4 <= n_unit; u += 4) {
            add_turned_scores<4>(turned, n_register, units + u, i, scale, softcap);
        }
    }
    for (; MANY_REGISTERS && u + 2 <= n_unit; u += 2) {
        add_some_scores<2>(block, n_register, units + u, i, scale, softcap);
    }
    for (; u < n_unit; ++u) {
        add_some_scores<1>(block, n_register, units + u, i, scale, softcap);
    }
}

// Joins the lanes of a register: of two halves, then of what is left.
template <typename F> [[gnu::always_inline]] inline float joined(floats v, F && f) {
    float x[LANES];
    put(x, v);
#pragma GCC unroll 4
    for (int n = LANES / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < n; ++i) {
            x[i] = f(x[i], x[i + n]);
        }
    }
    return x[0];
}

[[gnu::always_inline]] inline float maximum(const float * x, int n) {
    floats most = every(-INFINITY);
    for (int i = 0; i < n; i += LANES) {
        const floats v = get(x + i);
        most           = most > v ? most : v;
    }
    return joined(most, [](float a, float b) { return a > b ? a : b; });
}

// Replaces scores by the exponentials of what they are above m, and sums these.
[[gnu::always_inline]] inline float exponentials(float * x, int n, float m) {
    floats sum = {};
    for (int i = 0; i < n; i += LANES) {
        const floats p = exponential(get(x + i) - every(m));
        put(x + i, p);
        sum += p;
    }
    return joined(sum, [](float a, float b) { return a + b; });
}

// D registers, from d on, of the values of cells `from` to `to` of the block, each by its number in N units.
template <int N, int D>
[[gnu::always_inline]] inline void add_some_values(
    const float * block, int n_register, int d, const unit * units, int i, int from, int to) {
    floats sum[N][D];
#pragma GCC unroll 16
    for (int u = 0; u < N; ++u) {
#pragma GCC unroll 16
        for (int r = 0; r < D; ++r) {
            sum[u][r] = get(units[u].out + 2 + (d + r) * LANES);
        }
    }
#pragma GCC unroll 4
    for (int c = from; c < to; ++c) {
        floats value[D];
#pragma GCC unroll 16
        for (int r = 0; r < D; ++r) {
            value[r] = get(block + (c * n_register + d + r) * LANES);
            if (N > 1) {
                keep(value[r]);
            }
        }
#pragma GCC unroll 16
        for (int u = 0; u < N; ++u) {
            const floats by = every(units[u].scores[i + c]);
#pragma GCC unroll 16
            for (int r = 0; r < D; ++r) {
                sum[u][r] = multiply_add(value[r], by, sum[u][r]);
            }
        }
    }
#pragma GCC unroll 16
    for (int u = 0; u < N; ++u) {
#pragma GCC unroll 16
        for (int r = 0; r < D; ++r) {
            put(units[u].out + 2 + (d + r) * LANES, sum[u][r]);
        }
    }
}

// As many registers at a time as stay registers.
template <int N, int NV>
[[gnu::always_inline]] inline void add_values_of(
    const float * block, int n_register, const unit * units, int i, int from, int to) {
    constexpr int MOST = CELLS / N, D = NV && NV < MOST ? NV : MOST;
    int d = 0;
    for (; d + D <= n_register; d += D) {
        add_some_values<N, D>(block, n_register, d, units, i, from, to);
    }
    for (; d + 4 <= n_register; d += 4) {
        add_some_values<N, 4>(block, n_register, d, units, i, from, to);
    }
    for (; d < n_register; ++d) {
        add_some_values<N, 1>(block, n_register, d, units, i, from, to);
    }
}

// N units at once, as far as all of them see the cells.
template <int N, int NV>
[[gnu::always_inline]] inline void add_values(
    const float * block, int n_register, const unit * units, int n_unit, int i) {
    const auto n_seen = [&](int u) {
        return std::min(STEP, units[u].n - i);
    };
    int first = 0;
    for (; first + N <= n_unit; first += N) {
        int n = STEP;
        for (int u = first; u < first + N; ++u) {
            n = std::min(n, n_seen(u));
        }
        if (n == STEP) {
            add_values_of<N, NV>(block, n_register, units + first, i, 0, STEP);
        } else {
            add_values_of<N, NV>(block, n_register, units + first, i, 0, n);
        }
        for (int u = first; u < first + N; ++u) {
            if (n_seen(u) > n) {
                add_values_of<1, NV>(block, n_register, units + u, i, n, n_seen(u));
            }
        }
    }
    if constexpr (N > 1) {
        add_values<N / 2, NV>(block, n_register, units + first, n_unit - first, i);
    }
}

// NK, NV: registers of a head's keys and values, 0 for any number.
template <int NK, int NV>
void attend_units(const unit * units, int n_unit, const head & k, const head & v, float scale, float softcap,
    float * block) {
    const int nk = NK ? NK : k.registers(), nv = NV ? NV : v.registers();
    float * turned = block + STEP * LANES * std::max(nk, nv);
    each_step<NK>(units, n_unit, k, &v, nk, block,
        [&](const unit * same, int n, int i) { add_scores(block, turned, nk, same, n, i, scale, softcap); });
    for (int u = 0; u < n_unit; ++u) {
        const unit & w = units[u];
        w.out[0]       = maximum(w.scores, w.n);
        w.out[1]       = exponentials(w.scores, w.n, w.out[0]);
        for (int d = 0; d < nv; ++d) {
            put(w.out + 2 + d * LANES, floats{});
        }
    }
    constexpr int N = !MANY_REGISTERS ? 1 : NV && 4 * NV <= CELLS ? 4 : 2;
    each_step<NV>(units, n_unit, v, nullptr, nv, block,
        [&](const unit * same, int n, int i) { add_values<N, NV>(block, nv, same, n, i); });
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
