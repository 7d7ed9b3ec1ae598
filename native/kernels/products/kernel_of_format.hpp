// Makes the kernel of a format. Each file that does so has a few formats, so that none takes long to compile.
#pragma once

#include "products/kernel.hpp"
#include "products/product.hpp"

#include <utility>

namespace eagle3::kernels {

#if EAGLE3_LANES

// Copies a part of `width` bytes of 16 columns, side by side.
template <int width> char * interleave_part(char * to, const char * from, size_t stride) {
    for (int column = 0; column < COLUMNS; ++column) {
        std::memcpy(to + column * width, from + (size_t) column * stride, width);
    }
    return to + COLUMNS * width;
}

template <typename F> void interleave(void * wide, const void * columns, size_t stride, size_t n_block) {
    auto * to         = (char *) wide;
    const auto * from = (const char *) columns;
    for (size_t b = 0; b < n_block; ++b) {
        for (const field & f : F::FIELDS) {
            for (int i = 0; i < f.count; ++i, from += f.width) {
                to = f.width == 4   ? interleave_part<4>(to, from, stride)
                     : f.width == 2 ? interleave_part<2>(to, from, stride)
                                    : interleave_part<1>(to, from, stride);
            }
        }
    }
}

template <typename F> void put(void * wide, int column, const void * narrow) {
    each_part<F>(column, [&](size_t to, size_t from, int n) {
        std::memcpy((char *) wide + to, (const char *) narrow + from, (size_t) n);
    });
}

template <typename F> void get(const void * wide, int column, void * narrow) {
    each_part<F>(column, [&](size_t from, size_t to, int n) {
        std::memcpy((char *) narrow + to, (const char *) wide + from, (size_t) n);
    });
}

// When weights are cached, 512-bit products are limited by loads of the row, so two groups of 16 columns
// share each load. Superblocks would not fit the registers.
template <typename F> constexpr kernel::product pair_of() {
    if constexpr (lanes::N_PART == 1 && F::BLOCK == 32 && !F::FLOATS) {
        return multiply_tile<F, MOST_AT_ONCE, 2>;
    } else {
        return nullptr;
    }
}

template <typename F, int... I> kernel make(ggml_type type, std::integer_sequence<int, I...> /*rows*/) {
    return {type, file_bytes<F>(),
        F::FLOATS                  ? &as_they_are
        : F::BLOCK == by_256.block ? &by_256
                                   : &by_32,
        interleave<F>, put<F>, get<F>, {nullptr, multiply_tile<F, I + 1, 1>...}, pair_of<F>()};
}

template <typename F> kernel make_kernel(ggml_type type) {
    return make<F>(type, std::make_integer_sequence<int, MOST_AT_ONCE>());
}

#endif

}  // namespace eagle3::kernels
