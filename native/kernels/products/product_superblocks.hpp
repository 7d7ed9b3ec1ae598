// Superblocks of 256 weights times rows.
#pragma once

#include "products/product_blocks.hpp"

#include <utility>

namespace eagle3::kernels {

#if EAGLE3_LANES

// These are a superblock's scales, unpacked for all rows.
struct super_scales {
    int8_t scales[16][COLUMNS], minima[8][COLUMNS];
};

// Begins a sum with its first vector, less the offset where this keeps it short.
template <typename F, int R>
EAGLE3_INLINE lanes::ints start_sum(lanes::ints v, lanes::ints a,
    [[maybe_unused]] const row_superblock<R> & x, [[maybe_unused]] int j, [[maybe_unused]] int r) {
    if constexpr (lanes::RUNS_ARE_SHORT && F::OFFSET != 0) {
        static_assert(F::N_DOT == 2, "an offset is that of eight bytes");
        return lanes::dot(lanes::every(x.offsets[j / 2][r]), v, a);
    } else {
        return lanes::start(v, a);
    }
}

// A run of 32 weights is summed in 16 bits for as long as the sums fit, then times its scale in 32.
template <typename F, int R, int G, int I>
EAGLE3_INLINE void sum_run(const blocks<G> & w, int g, const row_superblock<R> & x,
    const super_scales (&of_group)[G], block_sums<R, G> & total) {
    constexpr int N_OF_SCALE = 64 / F::N_SCALE;  // vectors that have one scale
    constexpr int N_FIT = lanes::RUNS_ARE_WIDE ? N_OF_SCALE : lanes::RUNS_ARE_SHORT ? F::N_DOT : F::N_FIT;
    const int s         = F::GROUP * g + I;
    block_sums<R, G> sums;
    lanes::ints scale[blocks<G>::N_PART];
#pragma GCC unroll unrolled(8)
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part] = F::template bytes<I>(w.of(part), g, j, in_group(part));
            if (j % N_OF_SCALE == 0) {
                const auto & scales    = of_group[part / lanes::N_PART].scales;
                const int8_t * of_part = scales[(8 * s + j) / N_OF_SCALE] + in_group(part) * lanes::WIDTH;
                scale[part]            = lanes::scale(of_part);
            }
        }
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[8 * s + j][r]);
#pragma GCC unroll unrolled(4)
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
                sums[r][part] = j % N_FIT == 0 ? start_sum<F, R>(v[part], a, x, 8 * s + j, r)
                                               : lanes::go_on(sums[r][part], v[part], a);
                EAGLE3_HOLD(sums[r][part]);
                if ((j + 1) % N_FIT == 0) {
                    total[r][part] = lanes::close<N_FIT == 8>(total[r][part], sums[r][part], scale[part]);
                }
            }
        }
    }
}

template <typename F, int R, int G, int... I>
EAGLE3_INLINE void sum_runs(const blocks<G> & w, const row_superblock<R> & x,
    const super_scales (&of_group)[G], block_sums<R, G> & total, std::integer_sequence<int, I...> /*runs*/) {
    constexpr size_t N_STEP = 8 / F::GROUP, N_LINE = (COLUMNS * file_bytes<F>() / N_STEP + 63) / 64;
#pragma GCC unroll 1
    for (int g = 0; g < (int) N_STEP; ++g) {
        for (const block * of_group : w.of_group) {
            for (size_t i = 0; i < N_LINE; ++i) {
                __builtin_prefetch(of_group + NEAR + 64 * (g * N_LINE + i));
            }
        }
        (sum_run<F, R, G, I>(w, g, x, of_group, total), ...);
    }
}

// Multiplies pairs of a column's numbers with pairs of each row's sums.
template <int N, int R, int N_SUM>
EAGLE3_INLINE void times_sums(
    const int8_t (*numbers)[COLUMNS], const int32_t (&sums)[N_SUM][R], int part, lanes::ints (&out)[R]) {
#pragma GCC unroll unrolled(8)
    for (int i = 0; i < N; ++i) {
        const lanes::ints two =
            lanes::weights(numbers[2 * i] + part * lanes::WIDTH, numbers[2 * i + 1] + part * lanes::WIDTH);
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            out[r] = lanes::add_joined(i == 0 ? lanes::none() : out[r], two, lanes::every(sums[i][r]));
        }
    }
}

template <typename F, int R, int G>
EAGLE3_INLINE void add_superblock(const blocks<G> & w, const row_superblock<R> & x,
    const super_scales (&of_group)[G], column_sums<R, G> & out) {
    block_sums<R, G> total;
#pragma GCC unroll unrolled(8)
    for (int r = 0; r < R; ++r) {
        for (lanes::ints & t : total[r]) {
            t = lanes::none();
        }
    }
    sum_runs<F, R, G>(w, x, of_group, total, std::make_integer_sequence<int, F::GROUP>());
#pragma GCC unroll unrolled(4)
    for (int part = 0; part < blocks<G>::N_PART; ++part) {
        const super_scales & s    = of_group[part / lanes::N_PART];
        const lanes::floats scale = F::scale(w.of(part), in_group(part));
        if constexpr (F::OFFSET != 0 && !lanes::RUNS_ARE_SHORT) {
            static_assert(F::OFFSET == 32, "one shift");
            lanes::ints sums[R];
            times_sums<8>(s.scales, x.offsets, in_group(part), sums);
#pragma GCC unroll unrolled(8)
            for (int r = 0; r < R; ++r) {
                total[r][part] = lanes::subtract_times_32(total[r][part], sums[r]);
            }
        }
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            out[r][part] = lanes::multiply_add(lanes::numbers(total[r][part]),
                lanes::multiply(scale, lanes::every(x.scale[r])), out[r][part]);
        }
        if constexpr (F::HAS_MIN) {
            const lanes::floats minimum = lanes::negative(F::minimum(w.of(part), in_group(part)));
            lanes::ints sums[R];
            times_sums<4>(s.minima, x.sums_of_32, in_group(part), sums);
#pragma GCC unroll unrolled(8)
            for (int r = 0; r < R; ++r) {
                out[r][part] = lanes::multiply_add(lanes::numbers(sums[r]),
                    lanes::multiply(minimum, lanes::every(x.scale[r])), out[r][part]);
            }
        }
    }
}

#endif

}  // namespace eagle3::kernels
