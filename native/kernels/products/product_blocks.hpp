// Blocks of 32 weights times rows: sums of products in integers, then one multiply-add of floats a block and
// row (two where the format has minima). Floats have one a weight and row.
#pragma once

#include "products/formats.hpp"
#include "products/activations.hpp"

namespace eagle3::kernels {

#if EAGLE3_LANES

// These are blocks of G groups of 16 columns, side by side.
template <int G> struct blocks {
    static constexpr int N_PART = G * lanes::N_PART;

    const block * of_group[G];

    EAGLE3_INLINE const block * of(int part) const { return of_group[part / lanes::N_PART]; }
};
constexpr int in_group(int part) {
    return part % lanes::N_PART;
}

// Blocks have sums of R rows and of the parts of their columns.
template <int R, int G> using block_sums  = lanes::ints[R][blocks<G>::N_PART];
template <int R, int G> using column_sums = lanes::floats[R][blocks<G>::N_PART];

// Row r's sum is less by this for the offset of the weights.
template <typename F, int R, bool HAS_OFFSET = true>
EAGLE3_INLINE lanes::ints offset_of([[maybe_unused]] const row_block<R> & x, [[maybe_unused]] int r) {
    if constexpr (HAS_OFFSET && F::OFFSET != 0) {
        return lanes::every(x.template less<F::OFFSET>()[r]);
    } else {
        return lanes::none();
    }
}

// One instruction multiplies bytes and sums fours of them.
template <typename F, int R, int G>
EAGLE3_INLINE void sum_by_dots(const blocks<G> & w, const row_block<R> & x, block_sums<R, G> & sums) {
    constexpr bool AS_THEY_ARE = F::SIGNED && lanes::DOT_IS_SIGNED;
    for (int r = 0; r < R; ++r) {
        const lanes::ints base = offset_of<F, R, !AS_THEY_ARE>(x, r);
        for (lanes::ints & s : sums[r]) {
            s = base;
        }
    }
#pragma GCC unroll unrolled(8)
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            const lanes::ints bytes = F::bytes(w.of(part), j, in_group(part));
            v[part]                 = F::SIGNED && !AS_THEY_ARE ? lanes::flip(bytes) : bytes;
        }
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll unrolled(4)
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
                sums[r][part] = lanes::dot(sums[r][part], v[part], a);
                EAGLE3_HOLD(sums[r][part]);
            }
        }
    }
}

// Without such an instruction, signed bytes lend their sign to the row's, and two products are joined to 32
// bits at once.
template <typename F, int R, int G>
EAGLE3_INLINE void sum_signed(const blocks<G> & w, const row_block<R> & x, block_sums<R, G> & sums) {
#pragma GCC unroll unrolled(8)
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART], size[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part]    = F::bytes(w.of(part), j, in_group(part));
            size[part] = lanes::size(v[part]);
        }
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll unrolled(4)
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
                const lanes::ints p =
                    lanes::join(lanes::pairs(size[part], lanes::sign(a, v[part])), lanes::ones());
                sums[r][part] = j == 0 ? p : lanes::add(sums[r][part], p);
                EAGLE3_HOLD(sums[r][part]);
            }
        }
    }
}

// Small unsigned bytes are summed in 16 bits for as long as the sums fit.
template <typename F, int R, int G>
EAGLE3_INLINE void sum_unsigned(const blocks<G> & w, const row_block<R> & x, block_sums<R, G> & sums) {
    block_sums<R, G> total;
#pragma GCC unroll unrolled(8)
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part] = F::bytes(w.of(part), j, in_group(part));
        }
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll unrolled(4)
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
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
#pragma GCC unroll unrolled(8)
    for (int r = 0; r < R; ++r) {
        const lanes::ints base = offset_of<F, R>(x, r);
#pragma GCC unroll unrolled(4)
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            sums[r][part] = F::OFFSET ? lanes::add(total[r][part], base) : total[r][part];
        }
    }
}

template <typename F, int R, int G>
EAGLE3_INLINE void add_block(const blocks<G> & w, const row_block<R> & x, column_sums<R, G> & out) {
    block_sums<R, G> sums;
    if constexpr (lanes::HAS_DOT) {
        sum_by_dots<F, R, G>(w, x, sums);
    } else if constexpr (F::SIGNED) {
        sum_signed<F, R, G>(w, x, sums);
    } else {
        sum_unsigned<F, R, G>(w, x, sums);
    }
    lanes::floats scale[blocks<G>::N_PART];
    for (int part = 0; part < blocks<G>::N_PART; ++part) {
        scale[part] = F::scale(w.of(part), in_group(part));
    }
#pragma GCC unroll unrolled(8)
    for (int r = 0; r < R; ++r) {
        const lanes::floats s = lanes::every(x.scale[r]);
#pragma GCC unroll unrolled(4)
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            out[r][part] = lanes::multiply_add(
                lanes::numbers(sums[r][part]), lanes::multiply(scale[part], s), out[r][part]);
            if constexpr (F::HAS_MIN) {
                out[r][part] = lanes::multiply_add(
                    F::minimum(w.of(part), in_group(part)), lanes::every(x.scaled_sum[r]), out[r][part]);
            }
        }
    }
}

// Floats have one multiply-add for each weight and row, in the order of the weights.
template <typename F, int R, int G>
EAGLE3_INLINE void add_floats(const blocks<G> & w, const row_floats<R> & x, column_sums<R, G> & out) {
#pragma GCC unroll unrolled(4)
    for (int i = 0; i < F::BLOCK; ++i) {
        lanes::floats v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part] = F::values(w.of(part), i, in_group(part));
        }
#pragma GCC unroll unrolled(8)
        for (int r = 0; r < R; ++r) {
            const lanes::floats a = lanes::every(x.values[i][r]);
#pragma GCC unroll unrolled(4)
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
                out[r][part] = lanes::multiply_add(v[part], a, out[r][part]);
            }
        }
    }
}

#endif

}  // namespace eagle3::kernels
