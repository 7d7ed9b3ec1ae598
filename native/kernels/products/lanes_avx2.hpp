// 256-bit vectors of AVX2: two for 16 columns.
#pragma once

#include "products/lanes_x86.hpp"

namespace eagle3::kernels {

struct lanes : x86_lanes {
#if defined(__AVXVNNI__)
    static constexpr bool HAS_DOT = true;
#else
    static constexpr bool HAS_DOT = false;
#endif

    // Takes bytes of a table of 16, by indices below 16.
    static ints look_up(const int8_t * table, ints index) {
        return _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table)), index);
    }
    // Adds the fifth bits to four. Of each column's 32 bits, 4 * j to 4 * j + 3 are those of its four bytes.
    static ints with_spread(ints v, ints bits, int j) {
        const __m128i to_bytes = _mm_add_epi8(
            _mm_set_epi8(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0), _mm_set1_epi8((char) (j / 2)));
        const ints of_byte = every(j % 2 ? (int32_t) 0x80402010 : 0x08040201);
        const ints byte    = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(to_bytes));
        const ints is_set  = _mm256_cmpeq_epi8(_mm256_and_si256(byte, of_byte), of_byte);
        return or_(v, _mm256_and_si256(is_set, every_byte(16)));
    }

    // The fifth bit is bit i of a byte of `bytes`.
    static ints with_bit(ints v, ints bytes, int i) {
        const ints last = _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(i)), every_byte(1));
        return or_(v, _mm256_slli_epi16(last, 4));
    }
    // The fifth and sixth bits are bits I and I + 1 of it.
    template <int I> static ints with_two_bits(ints v, ints bytes) {
        const ints moved = I < 4 ? _mm256_slli_epi16(bytes, 4 - I) : _mm256_srli_epi16(bytes, I - 4);
        return or_(v, _mm256_and_si256(moved, every_byte(0x30)));
    }

    // MXFP4 scales by half of 2 to the power of (e - 127).
    static floats powers(const uint8_t * e) {
        const ints x      = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) e));
        const ints normal = _mm256_slli_epi32(_mm256_sub_epi32(x, every(1)), 23);
        const ints least  = _mm256_sllv_epi32(every(0x00200000), x);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, least, _mm256_cmpgt_epi32(every(2), x)));
    }

    static ints add_joined(ints sum, ints pairs, ints weights) { return add(sum, join(pairs, weights)); }
    // A column has two signed bytes, as 16 bits each.
    static ints weights(const int8_t * first, const int8_t * second) {
        const ints a = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) first));
        const ints b = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) second));
        return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
    }
    // A superblock's runs are summed in pairs, which are joined by the scale.
    static constexpr bool RUNS_ARE_WIDE = false, RUNS_ARE_SHORT = false;
    static ints scale(const int8_t * numbers) { return weights(numbers, numbers); }
    static ints start(ints w, ints x) { return pairs(w, x); }
    static ints go_on(ints sum, ints w, ints x) { return add_pairs(sum, pairs(w, x)); }
    template <bool ALL> static ints close(ints total, ints sum, ints scale) {
        return add_joined(total, sum, scale);
    }
    // Signed bytes w times signed x: unsigned ones and x with the sign of w.
    static ints sign(ints x, ints w) { return _mm256_sign_epi8(x, w); }
    // sum + unsigned bytes w times signed x, in fours
    static ints dot(ints sum, ints w, ints x) {
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
        return dot_in_pairs(sum, w, x);
#endif
    }
};

}  // namespace eagle3::kernels
