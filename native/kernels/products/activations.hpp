// Rows of activations, rounded to bytes as upstream does it for the same formats, or as they are for weights
// that are floats. A block of a row is a few words of 32 bits. The rows of a tile lie side by side, word by
// word, so that a product reads them in one stream.
#pragma once

#include "products/lanes.hpp"

#include <cstddef>

namespace eagle3::kernels {

// A block of weights is unpacked once for at most so many rows. More would not fit the registers: AVX-512 has
// 32, and a row takes two of them.
#if defined(__AVX512F__)
constexpr int MOST_AT_ONCE = 8;
#else
constexpr int MOST_AT_ONCE = 4;
#endif
// A tile has at most so many rows. Its weights are read from memory once.
constexpr int MOST_ROWS = 16;

// Q6_K's offset of 32 needs so many sums. Where runs are summed in 16 bits, each is that of eight bytes times
// -32. Otherwise each is that of sixteen bytes, two of 16 bits side by side.
#if EAGLE3_LANES
constexpr int N_OFFSET = lanes::RUNS_ARE_SHORT ? 32 : 8;
#else
constexpr int N_OFFSET = 8;
#endif

// R rows of 32 values, rounded as Q8_0.
template <int R> struct row_block {
    float scale[R];                              // a half
    float scaled_sum[R];                         // the sum of the bytes times the scale
    int32_t less_8[R], less_16[R], less_128[R];  // the sum times -8, ...: what a format's offset brings
    int32_t bytes[8][R];

    template <int OFFSET> const int32_t (&less() const)[R] {
        static_assert(OFFSET == 8 || OFFSET == 16 || OFFSET == 128, "no sum for this offset");
        if constexpr (OFFSET == 8) {
            return less_8;
        } else if constexpr (OFFSET == 16) {
            return less_16;
        } else {
            return less_128;
        }
    }
};

// R rows of 256 values, rounded as Q8_K.
template <int R> struct row_superblock {
    float scale[R];
    int32_t sums_of_32[4][R];  // sums of the bytes: two of 16 bits each
    int32_t offsets[N_OFFSET][R];
    int32_t bytes[64][R];
};

// R rows of 32 values.
template <int R> struct row_floats {
    float values[32][R];
};

// A tile of n rows is computed in n_part parts of n_row rows each. The last rows may stand for none.
struct tile_shape {
    int n_row, n_part;
};
constexpr tile_shape shape_of(int n) {
    const int n_part = (n + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    return {(n + n_part - 1) / n_part, n_part};
}
constexpr int MOST_IDLE = MOST_AT_ONCE - 1;  // rows of a tile that stand for none

// How rows are rounded for a format.
struct rounding {
    int block;      // values
    size_t n_word;  // in a block
    // Rounds blocks of one row, one after the other.
    void (*round)(const float * x, int n_block, int32_t * words);
    // Rounds a block of four rows, whose words are `stride` apart in a tile. It is null where a format has
    // none.
    void (*in_tile)(const float * const * x, int32_t * words, int stride);
};
extern const rounding by_32, by_256, as_they_are;

// Rounds blocks `from` to `to` of n rows of a tile, of rows that have n_block blocks. x has each row's
// values.
void round_rows(
    const rounding & how, int n, int n_block, int from, int to, const float * const * x, void * tile);
// Makes a tile of rows that were rounded alone, as tiles of one row.
void gather_rows(const rounding & how, int n, int n_block, const void * const * rows, void * tile);

}  // namespace eagle3::kernels
