// 512-bit vectors of AVX-512: one for 16 columns. With VNNI, unsigned bytes times signed ones are summed in
// fours by one instruction; without it, in pairs as with AVX2.
#pragma once

#include "products/lanes_x86.hpp"

namespace eagle3::kernels {

struct lanes : x86_lanes {
#if defined(__AVX512VNNI__)
    static constexpr bool HAS_DOT = true;
#else
    static constexpr bool HAS_DOT = false;
#endif

    // Takes bytes of a table of 16, by indices below 16.
    static ints look_up(const int8_t * table, ints index) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), index);
    }
    // Adds to v those bits of `more` that the mask has in every byte.
    static ints with(ints v, ints more, uint8_t mask) {
        return _mm512_ternarylogic_epi32(more, every_byte(mask), v, 0xea);
    }
    // Adds the fifth bits to four. Of each column's 32 bits, 4 * j to 4 * j + 3 are those of its four bytes.
    static ints with_spread(ints v, ints bits, int j) {
#if defined(__AVX512VBMI__)
        // each byte takes the eight bits from the fourth before its own on
        const auto first = (int64_t) 0x1f1e1d1c3f3e3d3c + j * 0x0404040404040404;
        return with(v, _mm512_multishift_epi64_epi8(_mm512_set1_epi64(first), bits), 16);
#else
        const __m128i to_bytes = _mm_add_epi8(
            _mm_set_epi8(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0), _mm_set1_epi8((char) (j / 2)));
        const ints of_byte = every(j % 2 ? (int32_t) 0x80402010 : 0x08040201);
        const ints byte    = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(to_bytes));
        return or_(v, _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(byte, of_byte), every_byte(16)));
#endif
    }
    // The fifth bit is bit i of a byte of `bytes`.
    static ints with_bit(ints v, ints bytes, int i) {
        return with(v, _mm512_rolv_epi32(bytes, every((4 - i) & 31)), 16);
    }
    // The fifth and sixth bits are bits I and I + 1 of it.
    template <int I> static ints with_two_bits(ints v, ints bytes) {
        return with(v, I < 4 ? _mm512_slli_epi16(bytes, 4 - I) : _mm512_srli_epi16(bytes, I - 4), 0x30);
    }

    // MXFP4 scales by half of 2 to the power of (e - 127).
    static floats powers(const uint8_t * e) {
        const ints x      = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) e));
        const ints normal = _mm512_slli_epi32(_mm512_sub_epi32(x, every(1)), 23);
        const ints least  = _mm512_sllv_epi32(every(0x00200000), x);
        return _mm512_castsi512_ps(
            _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(x, every(2)), least));
    }

    static ints widened(const int8_t * numbers) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) numbers));
    }
    // A column has two signed bytes, as 16 bits each.
    static ints weights(const int8_t * first, const int8_t * second) {
        return _mm512_mask_blend_epi16(0xaaaaaaaa, widened(first), _mm512_slli_epi32(widened(second), 16));
    }
    // Signed bytes w times signed x: unsigned ones and x with the sign of w.
    static ints sign(ints x, ints w) {
        return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), none(), x);  // where w is 0, so is its size
    }
    // sum + unsigned bytes w times signed x, in fours
    static ints dot(ints sum, ints w, ints x) {
#if defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(sum, w, x);
#else
        return dot_in_pairs(sum, w, x);
#endif
    }
#if defined(__AVX512VNNI__)
    static ints add_joined(ints sum, ints pairs, ints weights) {
        return _mm512_dpwssd_epi32(sum, pairs, weights);
    }
    // A superblock's runs are summed in dot products, whose lower 16 bits are multiplied by the scale. A
    // product of 32 bits would take twice as long as both.
    static constexpr bool RUNS_ARE_WIDE = false, RUNS_ARE_SHORT = true;
    static ints scale(const int8_t * numbers) { return _mm512_and_si512(widened(numbers), every(0xffff)); }
    static ints start(ints w, ints x) { return dot(none(), w, x); }
    static ints go_on(ints sum, ints w, ints x) { return dot(sum, w, x); }
    // ALL: the sum is of all weights with that scale, and may need 32 bits; such scales are not negative.
    template <bool ALL> static ints close(ints total, ints sum, ints scale) {
        return ALL ? add(total, _mm512_mullo_epi32(sum, scale)) : add_joined(total, sum, scale);
    }
#else
    static ints add_joined(ints sum, ints pairs, ints weights) { return add(sum, join(pairs, weights)); }
    // A superblock's runs are summed in pairs, which are joined by the scale.
    static constexpr bool RUNS_ARE_WIDE = false, RUNS_ARE_SHORT = false;
    static ints scale(const int8_t * numbers) { return weights(numbers, numbers); }
    static ints start(ints w, ints x) { return pairs(w, x); }
    static ints go_on(ints sum, ints w, ints x) { return add_pairs(sum, pairs(w, x)); }
    template <bool ALL> static ints close(ints total, ints sum, ints scale) {
        return add_joined(total, sum, scale);
    }
#endif
};

}  // namespace eagle3::kernels
