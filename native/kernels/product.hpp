// The product of 16 columns of a matrix with a tile of rows. A block of 32 weights is summed in integers,
// then scaled: one multiply-add of floats a block and row (two where the format has minima), in the order of
// the blocks, whatever the number of rows. So a row's sums are the same alone and among others.
#pragma once

#include "rows.hpp"

namespace eagle3::kernels {

#if EAGLE3_LANES

// Sums of a block: of R rows and the parts of its columns.
template <int R> using block_sums = lanes::ints[R][lanes::N_PART];

// One instruction multiplies bytes and sums fours of them.
template <typename F, int R>
EAGLE3_INLINE void sum_by_dots(const typename F::block & w, const row_block<R> & x, block_sums<R> & sums) {
    for (int r = 0; r < R; ++r) {
        const lanes::ints base = lanes::every(-F::OFFSET * x.sum[r]);
        for (lanes::ints & s : sums[r]) {
            s = base;
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK / 4; ++j) {
        lanes::ints v[lanes::N_PART];
        for (int part = 0; part < lanes::N_PART; ++part) {
            const lanes::ints bytes = F::bytes(w, j, part);
            v[part]                 = F::SIGNED ? lanes::flip(bytes) : bytes;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll 4
            for (int part = 0; part < lanes::N_PART; ++part) {
                sums[r][part] = lanes::dot(sums[r][part], v[part], a);
                EAGLE3_HOLD(sums[r][part]);
            }
        }
    }
}

// Without it, signed bytes lend their sign to the row's, and two products are joined to 32 bits at once.
template <typename F, int R>
EAGLE3_INLINE void sum_signed(const typename F::block & w, const row_block<R> & x, block_sums<R> & sums) {
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK / 4; ++j) {
        lanes::ints v[lanes::N_PART], size[lanes::N_PART];
        for (int part = 0; part < lanes::N_PART; ++part) {
            v[part]    = F::bytes(w, j, part);
            size[part] = lanes::size(v[part]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll 4
            for (int part = 0; part < lanes::N_PART; ++part) {
                const lanes::ints p =
                    lanes::join(lanes::pairs(size[part], lanes::sign(a, v[part])), lanes::ones());
                sums[r][part] = j == 0 ? p : lanes::add(sums[r][part], p);
                EAGLE3_HOLD(sums[r][part]);
            }
        }
    }
}

// Small unsigned bytes are summed in 16 bits for as long as the sums fit.
template <typename F, int R>
EAGLE3_INLINE void sum_unsigned(const typename F::block & w, const row_block<R> & x, block_sums<R> & sums) {
    block_sums<R> total;
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK / 4; ++j) {
        lanes::ints v[lanes::N_PART];
        for (int part = 0; part < lanes::N_PART; ++part) {
            v[part] = F::bytes(w, j, part);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll 4
            for (int part = 0; part < lanes::N_PART; ++part) {
                const lanes::ints p = lanes::pairs(v[part], a);
                sums[r][part]       = j % F::N_FIT == 0 ? p : lanes::add_pairs(sums[r][part], p);
                EAGLE3_HOLD(sums[r][part]);
                if ((j + 1) % F::N_FIT == 0) {
                    const lanes::ints joined = lanes::join(sums[r][part], lanes::ones());
                    total[r][part] = j + 1 == F::N_FIT ? joined : lanes::add(total[r][part], joined);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const lanes::ints base = lanes::every(-F::OFFSET * x.sum[r]);
#pragma GCC unroll 4
        for (int part = 0; part < lanes::N_PART; ++part) {
            sums[r][part] = F::OFFSET ? lanes::add(total[r][part], base) : total[r][part];
        }
    }
}

template <typename F, int R>
EAGLE3_INLINE void add_block(const typename F::block & w, const row_block<R> & x,
    const lanes::floats (&scale)[lanes::N_PART], lanes::floats (&out)[R][lanes::N_PART]) {
    block_sums<R> sums;
    if constexpr (lanes::HAS_DOT) {
        sum_by_dots<F, R>(w, x, sums);
    } else if constexpr (F::SIGNED) {
        sum_signed<F, R>(w, x, sums);
    } else {
        sum_unsigned<F, R>(w, x, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const lanes::floats s = lanes::every(x.scale[r]);
#pragma GCC unroll 4
        for (int part = 0; part < lanes::N_PART; ++part) {
            out[r][part] = lanes::multiply_add(
                lanes::numbers(sums[r][part]), lanes::multiply(scale[part], s), out[r][part]);
            if constexpr (F::HAS_MIN) {
                out[r][part] = lanes::multiply_add(
                    F::minimum(w, part), lanes::every(x.scale[r] * (float) x.sum[r]), out[r][part]);
            }
        }
    }
}

// 16 columns, n_block blocks long, times a tile of n rows in parts of R: out[row * stride + column]. The
// blocks of the parts behind the first find the weights in the cache.
template <typename F, int R>
void multiply_tile(const void * columns, const void * tile, int n, int n_block, float * out, size_t stride) {
    const auto * w      = (const typename F::block *) columns;
    const auto * x      = (const row_block<R> *) tile;
    const int n_part    = shape_of(n).n_part;
    constexpr int AHEAD = 2048;  // bytes: far enough to arrive in time, near enough to stay
    lanes::floats sums[MOST_ROWS / MOST_AT_ONCE][R][lanes::N_PART];
    for (int p = 0; p < n_part; ++p) {
        for (auto & of_row : sums[p]) {
            for (lanes::floats & s : of_row) {
                s = lanes::zero();
            }
        }
    }
    for (int b = 0; b < n_block; ++b) {
        for (size_t i = 0; i < sizeof(w[b]); i += 64) {
            lanes::prefetch((const char *) &w[b] + AHEAD + i);
        }
        lanes::floats scale[lanes::N_PART];
        for (int part = 0; part < lanes::N_PART; ++part) {
            scale[part] = F::scale(w[b], part);
        }
        for (int p = 0; p < n_part; ++p) {
            const auto * weights = &w[b];
            EAGLE3_FORGET(weights);  // unpacked for all parts at once, they would not fit the registers
            add_block<F, R>(*weights, x[(size_t) p * n_block + b], scale, sums[p]);
        }
    }
    for (int row = 0; row < n; ++row) {
        for (int part = 0; part < lanes::N_PART; ++part) {
            lanes::store(out + row * stride + part * lanes::WIDTH, sums[row / R][row % R][part]);
        }
    }
}

#endif

}  // namespace eagle3::kernels
