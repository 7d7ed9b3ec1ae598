// Sums of values, each times what its score is after the exponential.
#pragma once

#include "attention/units.hpp"

#include <algorithm>

namespace eagle3::kernels::attention {

// Adds D registers, from d on, of the values of cells `from` to `to` of the block, each times its number in
// each of N units.
template <int N, int D>
EAGLE3_INLINE void add_some_values(
    const float * block, int n_register, int d, const unit * units, int i, int from, int to) {
    floats sum[N][D];
#pragma GCC unroll unrolled(16)
    for (int u = 0; u < N; ++u) {
#pragma GCC unroll unrolled(16)
        for (int r = 0; r < D; ++r) {
            sum[u][r] = get(units[u].out + 2 + (d + r) * LANES);
        }
    }
#pragma GCC unroll unrolled(4)
    for (int c = from; c < to; ++c) {
        floats value[D];
#pragma GCC unroll unrolled(16)
        for (int r = 0; r < D; ++r) {
            value[r] = get(block + (c * n_register + d + r) * LANES);
            if (N > 1) {
                keep(value[r]);
            }
        }
#pragma GCC unroll unrolled(16)
        for (int u = 0; u < N; ++u) {
            const floats by = every(units[u].scores[i + c]);
#pragma GCC unroll unrolled(16)
            for (int r = 0; r < D; ++r) {
                sum[u][r] = multiply_add(value[r], by, sum[u][r]);
            }
        }
    }
#pragma GCC unroll unrolled(16)
    for (int u = 0; u < N; ++u) {
#pragma GCC unroll unrolled(16)
        for (int r = 0; r < D; ++r) {
            put(units[u].out + 2 + (d + r) * LANES, sum[u][r]);
        }
    }
}

// Adds as many registers at a time as stay registers.
template <int N, int NV>
EAGLE3_INLINE void add_values_of(
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

// Adds for N units at once, as far as all of them see the cells.
template <int N, int NV>
EAGLE3_INLINE void add_values(const float * block, int n_register, const unit * units, int n_unit, int i) {
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

}  // namespace eagle3::kernels::attention
