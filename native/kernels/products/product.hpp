// The product of 16 columns of a matrix with a tile of rows: one multiply-add of floats a block and row (two
// where the format has minima), in the order of the blocks, whatever the number of rows. So a row's sums are
// the same alone and among others.
#pragma once

#include "products/product_blocks.hpp"
#include "products/product_superblocks.hpp"

#include <type_traits>

namespace eagle3::kernels {

#if EAGLE3_LANES

// A format's block of R rows has them as they are rounded for it.
template <typename F, int R>
using rows_of_block = std::conditional_t<F::BLOCK == 256, row_superblock<R>,
    std::conditional_t<F::FLOATS, row_floats<R>, row_block<R>>>;

template <typename F> constexpr size_t block_bytes() {
    return COLUMNS * file_bytes<F>();
}

// Asks for the blocks that come later, and unpacks the scales of superblocks.
template <typename F, int G>
EAGLE3_INLINE void prepare_block(const blocks<G> & w, [[maybe_unused]] super_scales (&scales)[G]) {
    constexpr bool SUPER = F::BLOCK == 256;
    for (int g = 0; g < G; ++g) {
        for (size_t i = 0; i < block_bytes<F>(); i += 64) {
            __builtin_prefetch(w.of_group[g] + FAR + i, 0, 2);
            if constexpr (!SUPER) {  // a superblock has so many lines that its runs ask for them
                __builtin_prefetch(w.of_group[g] + NEAR + i);
            }
        }
        if constexpr (SUPER) {
            F::unpack(w.of_group[g], scales[g].scales, scales[g].minima);
        }
    }
}

// Adds the products of a block with R rows. w: a copy, whose pointers the compiler must not follow.
template <typename F, int R, int G>
EAGLE3_INLINE void add_part(blocks<G> w, const rows_of_block<F, R> & x,
    [[maybe_unused]] const super_scales (&scales)[G], column_sums<R, G> & sums) {
    for (const block *& of_group : w.of_group) {
        EAGLE3_FORGET(of_group);  // unpacked for all parts at once, they would not fit the registers
    }
    if constexpr (F::FLOATS) {
        add_floats<F, R, G>(w, x, sums);
    } else if constexpr (F::BLOCK == 256) {
        add_superblock<F, R, G>(w, x, scales, sums);
    } else {
        add_block<F, R, G>(w, x, sums);
    }
}

// Writes the n rows of a tile: out[row * stride + column].
template <int R, int G, int PARTS>
EAGLE3_INLINE void store_sums(const column_sums<R, G> (&sums)[PARTS], int n, float * out, size_t stride) {
#pragma GCC unroll unrolled(16)
    for (int row = 0; row < PARTS * R; ++row) {
        for (int part = 0; row < n && part < blocks<G>::N_PART; ++part) {
            lanes::store(out + row * stride + part * lanes::WIDTH, sums[row / R][row % R][part]);
        }
    }
}

// Multiplies G groups of 16 columns, n_block blocks long, with a tile of n rows in parts of R. With PARTS of
// them all sums stay in registers. With 0 there are as many as n rows have, and the sums are in memory.
template <typename F, int R, int G, int PARTS>
EAGLE3_INLINE void multiply_parts(
    const void * columns, const void * tile, int n, int n_block, float * out, size_t stride) {
    constexpr int MOST_PARTS = PARTS ? PARTS : MOST_ROWS / MOST_AT_ONCE;
    const auto * x           = (const rows_of_block<F, R> *) tile;
    blocks<G> w;
    for (int g = 0; g < G; ++g) {
        w.of_group[g] = (const block *) columns + (size_t) g * n_block * block_bytes<F>();
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
        prepare_block<F, G>(w, scales);
        if constexpr (PARTS != 0) {
            add_part<F, R, G>(w, x[b], scales, sums[0]);
            if constexpr (PARTS == 2) {
                add_part<F, R, G>(w, x[(size_t) n_block + b], scales, sums[1]);
            }
        } else {
            for (int p = 0; p < shape_of(n).n_part; ++p) {
                add_part<F, R, G>(w, x[(size_t) p * n_block + b], scales, sums[p]);
            }
        }
        for (const block *& of_group : w.of_group) {
            of_group += block_bytes<F>();
        }
    }
    store_sums<R, G>(sums, n, out, stride);
}

// Says whether the sums of so many parts fit the registers, beside what a block needs. A superblock needs
// more.
template <typename F, int R, int G> constexpr bool stay_in_registers(int n_part) {
    constexpr int SHARE = F::BLOCK == 32 ? 2 : 8;  // share of the registers
    return n_part * R * blocks<G>::N_PART <= lanes::N_REGISTER / SHARE;
}

// Finds how many parts of so many rows a tile has at most.
constexpr int most_parts(int n_row) {
    int most = 0;
    for (int n = 1; n <= MOST_ROWS; ++n) {
        const tile_shape shape = shape_of(n);
        most                   = shape.n_row == n_row && shape.n_part > most ? shape.n_part : most;
    }
    return most;
}

template <typename F, int R, int G>
void multiply_tile(const void * columns, const void * tile, int n, int n_block, float * out, size_t stride) {
    constexpr int MOST              = most_parts(R);
    constexpr bool ONE              = stay_in_registers<F, R, G>(1);
    constexpr bool TWO              = MOST >= 2 && stay_in_registers<F, R, G>(2);
    [[maybe_unused]] const int part = shape_of(n).n_part;
    if constexpr (ONE) {
        if (MOST == 1 || part == 1) {
            return multiply_parts<F, R, G, 1>(columns, tile, n, n_block, out, stride);
        }
    }
    if constexpr (TWO) {
        if (MOST == 2 || part == 2) {
            return multiply_parts<F, R, G, 2>(columns, tile, n, n_block, out, stride);
        }
    }
    if constexpr (MOST > 2 || (MOST == 2 ? !TWO : !ONE)) {
        multiply_parts<F, R, G, 0>(columns, tile, n, n_block, out, stride);
    }
}

#endif

}  // namespace eagle3::kernels
