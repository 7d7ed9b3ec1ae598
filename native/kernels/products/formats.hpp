// Formats are interleaved by 16 columns: rows of the file's matrix, which are columns of the product.
// The numbers of a block of the file stay as they are; they only lie in another order, so the size stays too.
// Each number of 16 columns lies side by side, and so do each four bytes of their quants.
#pragma once

#include "products/lanes.hpp"

#include <cstddef>

namespace eagle3::kernels {

// Weights are asked for so many bytes ahead that they arrive in time: from memory to the second-level cache,
// which can wait for more lines at once than the first-level one, and from there.
constexpr size_t FAR = 16384, NEAR = 2048;

// A field is a number of equal parts of a block, one after the other: scales, or quants in fours.
struct field {
    int width, count;  // bytes of each
};

// Calls copy with where each part of a block of one column lies in one of 16: byte i of the one begins at
// byte 16 * i of the other.
template <typename F, typename Copy> void each_part(int column, Copy && copy) {
    size_t at = 0;
    for (const field & f : F::FIELDS) {
        for (int i = 0; i < f.count; ++i, at += f.width) {
            copy(COLUMNS * at + (size_t) column * f.width, at, f.width);
        }
    }
}

template <typename F> constexpr size_t file_bytes() {
    size_t n = 0;
    for (const field & f : F::FIELDS) {
        n += (size_t) f.width * f.count;
    }
    return n;
}

#if EAGLE3_LANES

using block = uint8_t;  // the first byte of one

// Finds the numbers of a part of the columns, `width` bytes each, which begin at byte i of a block of one
// column.
EAGLE3_INLINE const uint8_t * numbers_at(const block * w, int i, int width, int part) {
    return w + COLUMNS * i + part * lanes::WIDTH * width;
}
EAGLE3_INLINE lanes::ints word_at(const block * w, int i, int part) {
    return lanes::load(numbers_at(w, i, 4, part));
}
EAGLE3_INLINE lanes::floats half_at(const block * w, int i, int part) {
    return lanes::halves((const uint16_t *) numbers_at(w, i, 2, part));
}

// -- blocks of 32 weights ---------------------------------------------------------------------------------

// bytes gives the weights as vectors j = 0 to 7 of four weights of each column: weight 4 * j + t of column c
// is byte 4 * c + t. They are either SIGNED, or unsigned and OFFSET larger than the weights. Where bytes are
// multiplied in pairs of 16 bits, N_FIT sums of such pairs fit. HAS_MIN: weights are byte * scale + minimum.
template <bool IS_SIGNED, int OFF, int FIT, bool MIN = false> struct format {
    static constexpr int BLOCK    = 32;
    static constexpr bool FLOATS  = false;
    static constexpr bool SIGNED  = IS_SIGNED;
    static constexpr int OFFSET   = OFF;
    static constexpr int N_FIT    = FIT;
    static constexpr bool HAS_MIN = MIN;

    static lanes::floats scale(const block * w, int part) { return half_at(w, 0, part); }
    static lanes::floats minimum(const block * w, int part) { return half_at(w, 2, part); }
};

struct q8_0 : format<true, 128, 1> {
    static constexpr field FIELDS[] = {{2, 1}, {4, 8}};
    static lanes::ints bytes(const block * w, int j, int part) { return word_at(w, 2 + 4 * j, part); }
};

// Four-bit formats: the low halves of 16 bytes from byte i on are weights 0 to 15, the high ones 16 to 31.
EAGLE3_INLINE lanes::ints nibbles(const block * w, int i, int j, int part) {
    const lanes::ints v = word_at(w, i + 4 * (j % 4), part);
    return j < 4 ? lanes::low(v) : lanes::high(v);
}

struct q4_0 : format<false, 8, 8> {
    static constexpr field FIELDS[] = {{2, 1}, {4, 4}};
    static lanes::ints bytes(const block * w, int j, int part) { return nibbles(w, 2, j, part); }
};

struct q4_1 : format<false, 0, 8, true> {
    static constexpr field FIELDS[] = {{2, 2}, {4, 4}};
    static lanes::ints bytes(const block * w, int j, int part) { return nibbles(w, 4, j, part); }
};

// The fifth bits of a column's 32 weights come first, in four bytes from byte i on.
EAGLE3_INLINE lanes::ints five_bits(const block * w, int i, int j, int part) {
    return lanes::with_spread(nibbles(w, i + 4, j, part), word_at(w, i, part), j);
}

struct q5_0 : format<false, 16, 4> {
    static constexpr field FIELDS[] = {{2, 1}, {4, 5}};
    static lanes::ints bytes(const block * w, int j, int part) { return five_bits(w, 2, j, part); }
};

struct q5_1 : format<false, 0, 4, true> {
    static constexpr field FIELDS[] = {{2, 2}, {4, 5}};
    static lanes::ints bytes(const block * w, int j, int part) { return five_bits(w, 4, j, part); }
};

struct iq4_nl : format<true, 128, 1> {
    static constexpr field FIELDS[] = {{2, 1}, {4, 4}};
    static lanes::ints bytes(const block * w, int j, int part) {
        static constexpr int8_t values[16] = {
            -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return lanes::look_up(values, nibbles(w, 2, j, part));
    }
};

// Its values are halves of 0, 1, 2, 3, 4, 6, 8, 12 with either sign; here they are 16 larger than the
// doubles.
struct mxfp4 : format<false, 16, 4> {
    static constexpr field FIELDS[] = {{1, 1}, {4, 4}};
    static lanes::ints bytes(const block * w, int j, int part) {
        static constexpr int8_t values[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
        return lanes::look_up(values, nibbles(w, 1, j, part));
    }
    static lanes::floats scale(const block * w, int part) { return lanes::powers(numbers_at(w, 0, 1, part)); }
};

// -- superblocks of 256 weights ---------------------------------------------------------------------------

// They have eight runs of 32 weights; run s is GROUP * g + I. bytes<I> gives it as vectors j = 0 to 7 of
// unsigned bytes. Every 16 (Q6_K) or 32 weights have an integer scale of their own. In 16 bits fit N_FIT sums
// of pairs, and N_DOT dot products. N_DOT is 8 where so few fit that it is faster to sum 32 bits.
struct super_format {
    static constexpr int BLOCK   = 256;
    static constexpr bool FLOATS = false;
};

// Eight runs have scales and minima of six bits, in 12 bytes from byte 4 on.
struct scales_and_minima : super_format {
    static constexpr bool HAS_MIN = true;
    static constexpr int N_SCALE  = 8;
    static constexpr int OFFSET   = 0;
    static lanes::floats scale(const block * w, int part) { return half_at(w, 0, part); }
    static lanes::floats minimum(const block * w, int part) { return half_at(w, 2, part); }
    // scales and minima of 16 columns
    static void unpack(const block * w, int8_t (*scales)[COLUMNS], int8_t (*minima)[COLUMNS]) {
        const uint8_t (*q)[COLUMNS] = (const uint8_t (*)[COLUMNS])(w + COLUMNS * 4);
        for (int s = 0; s < 4; ++s) {
            for (int c = 0; c < COLUMNS; ++c) {
                scales[s][c]     = (int8_t) (q[s][c] & 63);
                minima[s][c]     = (int8_t) (q[s + 4][c] & 63);
                scales[s + 4][c] = (int8_t) ((q[s + 8][c] & 15) | (q[s][c] >> 6 << 4));
                minima[s + 4][c] = (int8_t) ((q[s + 8][c] >> 4) | (q[s + 4][c] >> 6 << 4));
            }
        }
    }
};

struct q4_k : scales_and_minima {
    static constexpr field FIELDS[] = {{2, 2}, {1, 12}, {4, 32}};
    static constexpr int GROUP = 2, N_FIT = 8, N_DOT = 4;
    template <int I> static lanes::ints bytes(const block * w, int g, int j, int part) {
        const lanes::ints v = word_at(w, 16 + 32 * g + 4 * j, part);
        return I == 0 ? lanes::low(v) : lanes::high(v);
    }
};

struct q5_k : scales_and_minima {
    static constexpr field FIELDS[] = {{2, 2}, {1, 12}, {4, 8}, {4, 32}};
    static constexpr int GROUP = 2, N_FIT = 4, N_DOT = 8;
    template <int I> static lanes::ints bytes(const block * w, int g, int j, int part) {
        const lanes::ints v = word_at(w, 48 + 32 * g + 4 * j, part), fifth = word_at(w, 16 + 4 * j, part);
        return lanes::with_bit(I == 0 ? lanes::low(v) : lanes::high(v), fifth, GROUP * g + I);
    }
};

struct q6_k : super_format {
    static constexpr field FIELDS[] = {{4, 32}, {4, 16}, {1, 16}, {2, 1}};
    static constexpr int GROUP = 4, N_FIT = 2, N_DOT = 2, N_SCALE = 16, OFFSET = 32;
    static constexpr bool HAS_MIN = false;
    static lanes::floats scale(const block * w, int part) { return half_at(w, 208, part); }
    static void unpack(const block * w, int8_t (*scales)[COLUMNS], int8_t (* /*minima*/)[COLUMNS]) {
        std::memcpy(scales, w + COLUMNS * 192, (size_t) N_SCALE * COLUMNS);
    }
    template <int I> static lanes::ints bytes(const block * w, int g, int j, int part) {
        const lanes::ints v    = word_at(w, 64 * g + 32 * (I % 2) + 4 * j, part);
        const lanes::ints high = word_at(w, 128 + 32 * g + 4 * j, part);
        return lanes::with_two_bits<2 * I>(I < 2 ? lanes::low(v) : lanes::high(v), high);
    }
};

// -- floats -----------------------------------------------------------------------------------------------

// values() gives weight i of each column.
struct float_format {
    static constexpr int BLOCK   = 32;
    static constexpr bool FLOATS = true;
};

struct f32 : float_format {
    static constexpr field FIELDS[] = {{4, BLOCK}};
    static lanes::floats values(const block * w, int i, int part) {
        return lanes::singles((const float *) numbers_at(w, 4 * i, 4, part));
    }
};

struct f16 : float_format {
    static constexpr field FIELDS[] = {{2, BLOCK}};
    static lanes::floats values(const block * w, int i, int part) { return half_at(w, 2 * i, part); }
};

struct bf16 : float_format {
    static constexpr field FIELDS[] = {{2, BLOCK}};
    static lanes::floats values(const block * w, int i, int part) {
        return lanes::bfloats((const uint16_t *) numbers_at(w, 2 * i, 2, part));
    }
};

#endif

}  // namespace eagle3::kernels
