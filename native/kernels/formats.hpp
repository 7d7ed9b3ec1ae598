// Quantised formats whose blocks have 32 weights, interleaved by 16 columns: rows of the file's matrix, which
// are columns of the product. The numbers of a block of the file stay as they are; they only lie in another
// order, so the size stays too. Four bytes of each of the 16 columns lie side by side.
//
// A format gives the bytes of its weights as vectors j = 0 to 7, of four weights of each column each: weight
// 4 * j + t of column c is byte 4 * c + t.
#pragma once

#include "lanes.hpp"

namespace eagle3::kernels {

constexpr int BLOCK = 32;  // weights of a column in a block

// What the file's blocks begin with, and how many bytes of quants follow.
template <int N_SCALE, int N_QUANT> struct file_block {
    uint8_t scale[N_SCALE];
    uint8_t quants[N_QUANT];
};

// The same of 16 columns. scale: each number of all columns in turn; quants: each four bytes of all.
template <int WIDTH, int N_SCALE, int N_QUANT> struct wide_block {
    uint8_t scale[N_SCALE / WIDTH][COLUMNS][WIDTH];
    uint8_t quants[N_QUANT / 4][COLUMNS][4];

    using narrow                  = file_block<N_SCALE, N_QUANT>;
    static constexpr int N_NUMBER = N_SCALE / WIDTH;
    static constexpr int N_WORD   = N_QUANT / 4;

    void put(int column, const narrow & from) {
        for (int i = 0; i < N_NUMBER; ++i) {
            std::memcpy(scale[i][column], from.scale + i * WIDTH, WIDTH);
        }
        for (int i = 0; i < N_WORD; ++i) {
            std::memcpy(quants[i][column], from.quants + 4 * i, 4);
        }
    }
    void get(int column, narrow & to) const {
        for (int i = 0; i < N_NUMBER; ++i) {
            std::memcpy(to.scale + i * WIDTH, scale[i][column], WIDTH);
        }
        for (int i = 0; i < N_WORD; ++i) {
            std::memcpy(to.quants + 4 * i, quants[i][column], 4);
        }
    }
};

#if EAGLE3_LANES

// Bytes of weights are either SIGNED, or unsigned and OFFSET larger than the weights. Where bytes are
// multiplied in pairs of 16 bits, N_FIT sums of such pairs fit. HAS_MIN: weights are byte * scale + minimum.
template <int WIDTH, int N_SCALE, int N_QUANT, bool IS_SIGNED, int OFF, int FIT, bool MIN = false>
struct format {
    using block                   = wide_block<WIDTH, N_SCALE, N_QUANT>;
    static constexpr bool SIGNED  = IS_SIGNED;
    static constexpr int OFFSET   = OFF;
    static constexpr int N_FIT    = FIT;
    static constexpr bool HAS_MIN = MIN;

    static lanes::ints word(const block & w, int i, int part) {
        return lanes::load(&w.quants[i][part * lanes::WIDTH]);
    }
    static lanes::floats scale(const block & w, int part) {
        return lanes::halves((const uint16_t *) w.scale[0][part * lanes::WIDTH]);
    }
    static lanes::floats minimum(const block & w, int part) {
        return lanes::halves((const uint16_t *) w.scale[1][part * lanes::WIDTH]);
    }
};

struct q8_0 : format<2, 2, 32, true, 128, 1> {
    static lanes::ints bytes(const block & w, int j, int part) { return word(w, j, part); }
};

// Four-bit formats: the low halves of the bytes are weights 0 to 15, the high ones 16 to 31.
template <typename F>
EAGLE3_INLINE lanes::ints nibbles(const typename F::block & w, int first, int j, int part) {
    const lanes::ints v = F::word(w, first + j % 4, part);
    return j < 4 ? lanes::low(v) : lanes::high(v);
}

struct q4_0 : format<2, 2, 16, false, 8, 8> {
    static lanes::ints bytes(const block & w, int j, int part) { return nibbles<q4_0>(w, 0, j, part); }
};

struct q4_1 : format<2, 4, 16, false, 0, 8, true> {
    static lanes::ints bytes(const block & w, int j, int part) { return nibbles<q4_1>(w, 0, j, part); }
};

// The fifth bits of a column's 32 weights come first, in four bytes.
template <typename F> EAGLE3_INLINE lanes::ints five_bits(const typename F::block & w, int j, int part) {
    return lanes::or_(nibbles<F>(w, 1, j, part), lanes::spread(F::word(w, 0, part), j, 16));
}

struct q5_0 : format<2, 2, 20, false, 16, 4> {
    static lanes::ints bytes(const block & w, int j, int part) { return five_bits<q5_0>(w, j, part); }
};

struct q5_1 : format<2, 4, 20, false, 0, 4, true> {
    static lanes::ints bytes(const block & w, int j, int part) { return five_bits<q5_1>(w, j, part); }
};

struct iq4_nl : format<2, 2, 16, true, 128, 1> {
    static lanes::ints bytes(const block & w, int j, int part) {
        static constexpr int8_t values[16] = {
            -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return lanes::look_up(values, nibbles<iq4_nl>(w, 0, j, part));
    }
};

// Its values are halves of 0, 1, 2, 3, 4, 6, 8, 12 with either sign; here they are 12 larger than the
// doubles.
struct mxfp4 : format<1, 1, 16, false, 12, 4> {
    static lanes::ints bytes(const block & w, int j, int part) {
        static constexpr int8_t values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return lanes::look_up(values, nibbles<mxfp4>(w, 0, j, part));
    }
    static lanes::floats scale(const block & w, int part) {
        return lanes::powers(w.scale[0][part * lanes::WIDTH]);
    }
};

#endif

}  // namespace eagle3::kernels
