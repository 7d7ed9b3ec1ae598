// What a format of the file has here: how its blocks are interleaved, and its products.
#pragma once

#include "products/formats.hpp"
#include "products/activations.hpp"

#include "ggml.h"

#include <array>

namespace eagle3::kernels {

struct kernel {
    ggml_type type;
    size_t file_bytes;  // a block of one column takes in the file; 16 columns take 16 times that
    const rounding * rows;
    // Interleaves 16 columns, n_block blocks long and `stride` bytes apart.
    void (*interleave)(void * wide, const void * columns, size_t stride, size_t n_block);
    void (*put)(void * wide, int column, const void * narrow);
    void (*get)(const void * wide, int column, void * narrow);
    using product = void (*)(
        const void * columns, const void * tile, int n, int n_block, float * out, size_t stride);
    std::array<product, MOST_AT_ONCE + 1> products;  // by the rows in a part of a tile
    product pair;  // for 32 columns and parts of MOST_AT_ONCE rows; null where it is no faster

    // Multiplies n_group times 16 columns with a tile of n rows, n_block blocks long: out[row * stride +
    // column].
    void multiply(const void * columns, int64_t n_group, const void * tile, int n, int n_block, float * out,
        size_t stride) const {
        const size_t bytes = COLUMNS * (size_t) n_block * file_bytes;
        const int n_row    = shape_of(n).n_row;
        for (int64_t g = 0; g < n_group;) {
            const bool both = pair && n_row == MOST_AT_ONCE && g + 2 <= n_group;
            (both ? pair : products[n_row])(
                (const char *) columns + g * bytes, tile, n, n_block, out + g * COLUMNS, stride);
            g += both ? 2 : 1;
        }
    }
    size_t column_bytes(int64_t n_weight) const { return (size_t) (n_weight / rows->block) * file_bytes; }
};

// Makes the kernel of a format of formats.hpp. The files kernel_*.cpp have a few each, so that none takes
// long to compile.
template <typename F> kernel make_kernel(ggml_type type);

// Finds the kernel of a type. It is null if the type has none.
const kernel * kernel_of(ggml_type type);

}  // namespace eagle3::kernels
