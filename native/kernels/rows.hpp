// Rows of activations, rounded to bytes as upstream's Q8_0 does it: 32 values a block with one scale, which
// is a half. R rows of a tile lie side by side, so that a product reads them in one stream.
#pragma once

#include "formats.hpp"

namespace eagle3::kernels {

// The most rows that a block of weights is unpacked once for. More would not fit the registers.
constexpr int MOST_AT_ONCE = 4;
// The most rows of a tile. Its weights are read from memory once.
constexpr int MOST_ROWS = 16;

template <int R> struct row_block {
    float scale[R];
    int32_t sum[R];               // of the bytes
    int32_t bytes[BLOCK / 4][R];  // four each
};

// How a tile of n rows is computed: n_part parts of n_row rows each. The last rows may stand for none.
struct tile_shape {
    int n_row, n_part;
};
constexpr tile_shape shape_of(int n) {
    const int n_part = (n + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    return {(n + n_part - 1) / n_part, n_part};
}
constexpr int MOST_IDLE    = MOST_AT_ONCE - 1;      // rows of a tile that stand for none
constexpr size_t ROW_BYTES = sizeof(row_block<1>);  // of a block and row

// Blocks `from` to `to` of n rows of a tile. x: the values of row i, n_block * 32 of them.
void round_rows(int n, int n_block, int from, int to, const float * const * x, void * tile);
// The same from rows that were rounded alone, as tiles of one row.
void gather_rows(int n, int n_block, const void * const * rows, void * tile);

}  // namespace eagle3::kernels
