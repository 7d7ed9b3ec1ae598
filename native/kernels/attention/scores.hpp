// The scores of units: products of queries and keys, their maximum and their exponentials.
#pragma once

#include "attention/units.hpp"

#include <algorithm>

namespace eagle3::kernels::attention {

// Makes a register of scores from products of queries and keys, of cells from number i on.
EAGLE3_INLINE void put_scores(floats sums, const unit & w, int i, float scale, float softcap) {
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
EAGLE3_INLINE void add_some_scores(
    const float * block, int n_register, const unit * units, int i, float scale, float softcap) {
    constexpr int N_CELL = std::min(N == 1 ? CELLS : 4, LANES);
    for (int j = 0; j < STEP; j += LANES) {
        floats fours[N][LANES / 4];
#pragma GCC unroll unrolled(4)
        for (int c0 = 0; c0 < LANES; c0 += N_CELL) {
            const float * b     = block + (j + c0) * n_register * LANES;
            floats x[N][N_CELL] = {};
#pragma GCC unroll unrolled(16)
            for (int d = 0; d < n_register; ++d) {
#pragma GCC unroll unrolled(16)
                for (int c = 0; c < N_CELL; ++c) {
                    floats key = get(b + (c * n_register + d) * LANES);
                    if (N > 1) {
                        keep(key);
                    }
#pragma GCC unroll unrolled(4)
                    for (int u = 0; u < N; ++u) {
                        const floats part = get(units[u].q + d * LANES);
                        x[u][c]           = d == 0 ? key * part : multiply_add(key, part, x[u][c]);
                    }
                }
            }
#pragma GCC unroll unrolled(4)
            for (int u = 0; u < N; ++u) {
#pragma GCC unroll unrolled(4)
                for (int c = 0; c < N_CELL; c += 4) {
                    fours[u][(c0 + c) / 4] = sums_of_four(x[u] + c);
                }
            }
        }
#pragma GCC unroll unrolled(4)
        for (int u = 0; u < N; ++u) {
            put_scores(sums_of(fours[u]), units[u], i + j, scale, softcap);
        }
    }
}

// With so many units it is faster to turn the keys of sixteen cells over: a register then has one number of
// each cell, and no score is a sum of lanes.
constexpr int WORTH_TURNING = 12;

// Turns the numbers of sixteen cells over, so that they lie number by number.
EAGLE3_INLINE void turn(const float * block, int n_register, float * turned) {
    const size_t n = (size_t) n_register * LANES;
    for (size_t d = 0; d < n; d += 4) {
        turn_four(block + d, n, turned + d * STEP);
    }
}

// Does the same with keys that are turned over. Products are added in the order in which add_some_scores()
// adds lanes.
template <int N>
EAGLE3_INLINE void add_turned_scores(
    const float * turned, int n_register, const unit * units, int i, float scale, float softcap) {
    floats fours[N][4];
#pragma GCC unroll unrolled(4)
    for (int four = 0; four < 4; ++four) {
        floats x[N][4] = {};
#pragma GCC unroll unrolled(16)
        for (int d = 0; d < n_register; ++d) {
#pragma GCC unroll unrolled(4)
            for (int lane = 0; lane < 4; ++lane) {
                const int at = d * LANES + 4 * four + lane;
                floats key   = get(turned + at * STEP);
                keep(key);
#pragma GCC unroll unrolled(4)
                for (int u = 0; u < N; ++u) {
                    const floats part = every(units[u].q[at]);
                    x[u][lane]        = d == 0 ? key * part : multiply_add(key, part, x[u][lane]);
                }
            }
        }
#pragma GCC unroll unrolled(4)
        for (int u = 0; u < N; ++u) {
            fours[u][four] = (x[u][0] + x[u][2]) + (x[u][1] + x[u][3]);
        }
    }
#pragma GCC unroll unrolled(4)
    for (int u = 0; u < N; ++u) {
        put_scores((fours[u][0] + fours[u][1]) + (fours[u][2] + fours[u][3]), units[u], i, scale, softcap);
    }
}

// Adds to the scores of all units that see the cells. turned is space for turned keys.
EAGLE3_INLINE void add_scores(const float * block, float * turned, int n_register, const unit * units,
    int n_unit, int i, float scale, float softcap) {
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
template <typename F> EAGLE3_INLINE float joined(floats v, F && f) {
    float x[LANES];
    put(x, v);
#pragma GCC unroll unrolled(4)
    for (int n = LANES / 2; n > 0; n /= 2) {
#pragma GCC unroll unrolled(8)
        for (int i = 0; i < n; ++i) {
            x[i] = f(x[i], x[i + n]);
        }
    }
    return x[0];
}

EAGLE3_INLINE float maximum(const float * x, int n) {
    floats most = every(-INFINITY);
    for (int i = 0; i < n; i += LANES) {
        const floats v = get(x + i);
        most           = most > v ? most : v;
    }
    return joined(most, [](float a, float b) { return a > b ? a : b; });
}

// Replaces scores by the exponentials of what they are above m, and sums these.
EAGLE3_INLINE float exponentials(float * x, int n, float m) {
    floats sum = {};
    for (int i = 0; i < n; i += LANES) {
        const floats p = exponential(get(x + i) - every(m));
        put(x + i, p);
        sum += p;
    }
    return joined(sum, [](float a, float b) { return a + b; });
}

}  // namespace eagle3::kernels::attention
