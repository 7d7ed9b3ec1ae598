// The product of 16 columns of a matrix with a tile of rows. A block of 32 weights is summed in integers,
// then scaled: one multiply-add of floats a block and row (two where the format has minima), in the order of
// the blocks, whatever the number of rows. So a row's sums are the same alone and among others.
#pragma once

#include "formats.hpp"
#include "rows.hpp"

#include <type_traits>
#include <utility>

namespace eagle3::kernels {

// Weights are asked for so many bytes ahead that they arrive in time: from memory to the second-level cache,
// which can wait for more lines at once than the first-level one, and from there.
constexpr size_t FAR = 16384, NEAR = 2048;

#if EAGLE3_LANES

// Blocks of G groups of 16 columns, side by side.
template <int G> struct blocks {
    static constexpr int N_PART = G * lanes::N_PART;

    const block * of_group[G];

    EAGLE3_INLINE const block * of(int part) const { return of_group[part / lanes::N_PART]; }
};
constexpr int in_group(int part) {
    return part % lanes::N_PART;
}

// Sums of blocks: of R rows and the parts of their columns.
template <int R, int G> using block_sums  = lanes::ints[R][blocks<G>::N_PART];
template <int R, int G> using column_sums = lanes::floats[R][blocks<G>::N_PART];

// What row r's sum is less for the offset of the weights.
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
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            const lanes::ints bytes = F::bytes(w.of(part), j, in_group(part));
            v[part]                 = F::SIGNED && !AS_THEY_ARE ? lanes::flip(bytes) : bytes;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll 4
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
                sums[r][part] = lanes::dot(sums[r][part], v[part], a);
                EAGLE3_HOLD(sums[r][part]);
            }
        }
    }
}

// Without it, signed bytes lend their sign to the row's, and two products are joined to 32 bits at once.
template <typename F, int R, int G>
EAGLE3_INLINE void sum_signed(const blocks<G> & w, const row_block<R> & x, block_sums<R, G> & sums) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART], size[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part]    = F::bytes(w.of(part), j, in_group(part));
            size[part] = lanes::size(v[part]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll 4
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
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        lanes::ints v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part] = F::bytes(w.of(part), j, in_group(part));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[j][r]);
#pragma GCC unroll 4
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
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const lanes::ints base = offset_of<F, R>(x, r);
#pragma GCC unroll 4
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
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const lanes::floats s = lanes::every(x.scale[r]);
#pragma GCC unroll 4
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

// What unpacking a superblock's scales gives, for all rows.
struct super_scales {
    int8_t scales[16][COLUMNS], minima[8][COLUMNS];
};

// The first vector of a sum, less the offset where this keeps it short.
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

// Superblocks: a run of 32 weights is summed in 16 bits for as long as the sums fit, then times its scale
// in 32.
template <typename F, int R, int G, int I>
EAGLE3_INLINE void sum_run(const blocks<G> & w, int g, const row_superblock<R> & x,
    const super_scales (&of_group)[G], block_sums<R, G> & total) {
    constexpr int N_OF_SCALE = 64 / F::N_SCALE;  // vectors that have one scale
    constexpr int N_FIT = lanes::RUNS_ARE_WIDE ? N_OF_SCALE : lanes::RUNS_ARE_SHORT ? F::N_DOT : F::N_FIT;
    const int s         = F::GROUP * g + I;
    block_sums<R, G> sums;
    lanes::ints scale[blocks<G>::N_PART];
#pragma GCC unroll 8
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
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::ints a = lanes::every(x.bytes[8 * s + j][r]);
#pragma GCC unroll 4
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

// Products of pairs of a column's numbers with pairs of each row's sums.
template <int N, int R, int N_SUM>
EAGLE3_INLINE void times_sums(
    const int8_t (*numbers)[COLUMNS], const int32_t (&sums)[N_SUM][R], int part, lanes::ints (&out)[R]) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        const lanes::ints two =
            lanes::weights(numbers[2 * i] + part * lanes::WIDTH, numbers[2 * i + 1] + part * lanes::WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            out[r] = lanes::add_joined(i == 0 ? lanes::none() : out[r], two, lanes::every(sums[i][r]));
        }
    }
}

// Floats: one multiply-add for each weight and row, in the order of the weights.
template <typename F, int R, int G>
EAGLE3_INLINE void add_floats(const blocks<G> & w, const row_floats<R> & x, column_sums<R, G> & out) {
#pragma GCC unroll 4
    for (int i = 0; i < F::BLOCK; ++i) {
        lanes::floats v[blocks<G>::N_PART];
        for (int part = 0; part < blocks<G>::N_PART; ++part) {
            v[part] = F::values(w.of(part), i, in_group(part));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const lanes::floats a = lanes::every(x.values[i][r]);
#pragma GCC unroll 4
            for (int part = 0; part < blocks<G>::N_PART; ++part) {
                out[r][part] = lanes::multiply_add(v[part], a, out[r][part]);
            }
        }
    }
}

template <typename F, int R, int G>
EAGLE3_INLINE void add_superblock(const blocks<G> & w, const row_superblock<R> & x,
    const super_scales (&of_group)[G], column_sums<R, G> & out) {
    block_sums<R, G> total;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        for (lanes::ints & t : total[r]) {
            t = lanes::none();
        }
    }
    sum_runs<F, R, G>(w, x, of_group, total, std::make_integer_sequence<int, F::GROUP>());
#pragma GCC unroll 4
    for (int part = 0; part < blocks<G>::N_PART; ++part) {
        const super_scales & s    = of_group[part / lanes::N_PART];
        const lanes::floats scale = F::scale(w.of(part), in_group(part));
        if constexpr (F::OFFSET != 0 && !lanes::RUNS_ARE_SHORT) {
            static_assert(F::OFFSET == 32, "one shift");
            lanes::ints sums[R];
            times_sums<8>(s.scales, x.offsets, in_group(part), sums);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                total[r][part] = lanes::subtract_times_32(total[r][part], sums[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            out[r][part] = lanes::multiply_add(lanes::numbers(total[r][part]),
                lanes::multiply(scale, lanes::every(x.scale[r])), out[r][part]);
        }
        if constexpr (F::HAS_MIN) {
            const lanes::floats minimum = lanes::negative(F::minimum(w.of(part), in_group(part)));
            lanes::ints sums[R];
            times_sums<4>(s.minima, x.sums_of_32, in_group(part), sums);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                out[r][part] = lanes::multiply_add(lanes::numbers(sums[r]),
                    lanes::multiply(minimum, lanes::every(x.scale[r])), out[r][part]);
            }
        }
    }
}

// G groups of 16 columns, n_block blocks long, times a tile of n rows in parts of R: out[row * stride +
// column]. The blocks of the parts behind the first find the weights in the cache. PARTS: how many there are,
// so that all sums stay in registers; 0: as many as n rows have, and the sums are in memory.
template <typename F, int R, int G, int PARTS>
EAGLE3_INLINE void multiply_parts(
    const void * columns, const void * tile, int n, int n_block, float * out, size_t stride) {
    constexpr bool SUPER     = F::BLOCK == 256;
    using rows               = std::conditional_t<SUPER, row_superblock<R>,
        std::conditional_t<F::FLOATS, row_floats<R>, row_block<R>>>;
    constexpr size_t N_BYTE  = COLUMNS * file_bytes<F>();
    constexpr int MOST_PARTS = PARTS ? PARTS : MOST_ROWS / MOST_AT_ONCE;
    const auto * x           = (const rows *) tile;
    const int n_part         = PARTS ? PARTS : shape_of(n).n_part;
    blocks<G> w;
    for (int g = 0; g < G; ++g) {
        w.of_group[g] = (const block *) columns + (size_t) g * n_block * N_BYTE;
    }
    column_sums<R, G> sums[MOST_PARTS];
    for (auto & of_part : sums) {
        for (auto & of_row : of_part) {
            for (lanes::floats & s : of_row) {
                s = lanes::zero();
            }
        }
    }
    for (int b = 0; b < n_block; ++b) {
        super_scales scales[G];
        for (int g = 0; g < G; ++g) {
            for (size_t i = 0; i < N_BYTE; i += 64) {
                __builtin_prefetch(w.of_group[g] + FAR + i, 0, 2);
                if constexpr (!SUPER) {  // a superblock has so many lines that its runs ask for them
                    __builtin_prefetch(w.of_group[g] + NEAR + i);
                }
            }
            if constexpr (SUPER) {
                F::unpack(w.of_group[g], scales[g].scales, scales[g].minima);
            }
        }
        const auto add_part = [&](int p) __attribute__((always_inline)) {
            blocks<G> weights = w;
            for (const block *& of_group : weights.of_group) {
                EAGLE3_FORGET(of_group);  // unpacked for all parts at once, they would not fit the registers
            }
            if constexpr (F::FLOATS) {
                add_floats<F, R, G>(weights, x[(size_t) p * n_block + b], sums[p]);
            } else if constexpr (SUPER) {
                add_superblock<F, R, G>(weights, x[(size_t) p * n_block + b], scales, sums[p]);
            } else {
                add_block<F, R, G>(weights, x[(size_t) p * n_block + b], sums[p]);
            }
        };
        if constexpr (PARTS != 0) {
            add_part(0);
            if constexpr (PARTS == 2) {
                add_part(1);
            }
        } else {
            for (int p = 0; p < n_part; ++p) {
                add_part(p);
            }
        }
        for (const block *& of_group : w.of_group) {
            of_group += N_BYTE;
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < MOST_PARTS * R; ++row) {
        for (int part = 0; row < n && part < blocks<G>::N_PART; ++part) {
            lanes::store(out + row * stride + part * lanes::WIDTH, sums[row / R][row % R][part]);
        }
    }
}

// Whether the sums of so many parts fit the registers, beside what a block needs. A superblock needs more.
template <typename F, int R, int G> constexpr bool stay_in_registers(int n_part) {
    constexpr int SHARE = F::BLOCK == 32 ? 2 : 8;  // of the registers
    return n_part * R * blocks<G>::N_PART <= lanes::N_REGISTER / SHARE;
}

template <typename F, int R, int G>
void multiply_tile(const void * columns, const void * tile, int n, int n_block, float * out, size_t stride) {
    const int n_part = shape_of(n).n_part;
    if constexpr (stay_in_registers<F, R, G>(1)) {
        if (n_part == 1) {
            return multiply_parts<F, R, G, 1>(columns, tile, n, n_block, out, stride);
        }
    }
    if constexpr (stay_in_registers<F, R, G>(2) && R > MOST_AT_ONCE / 2) {
        if (n_part == 2) {
            return multiply_parts<F, R, G, 2>(columns, tile, n, n_block, out, stride);
        }
    }
    multiply_parts<F, R, G, 0>(columns, tile, n, n_block, out, stride);
}

#endif

}  // namespace eagle3::kernels
