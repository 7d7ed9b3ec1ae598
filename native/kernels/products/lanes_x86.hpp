// What vectors of AVX2 and AVX-512 have in common: the same instructions, of 256 and of 512 bits. Bytes are
// multiplied unsigned by signed.
#pragma once

#include "intrinsics.hpp"

namespace eagle3::kernels {

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define EAGLE3_X86(instruction) _mm512_##instruction
#define EAGLE3_X86_BITS(instruction) _mm512_##instruction##_si512
using x86_ints   = __m512i;
using x86_floats = __m512;
using x86_half   = __m256i;
#else
#define EAGLE3_X86(instruction) _mm256_##instruction
#define EAGLE3_X86_BITS(instruction) _mm256_##instruction##_si256
using x86_ints   = __m256i;
using x86_floats = __m256;
using x86_half   = __m128i;
#endif

struct x86_lanes {
    using ints                          = x86_ints;
    using floats                        = x86_floats;
    static constexpr int N_PART         = COLUMNS * 4 / (int) sizeof(ints);
    static constexpr int N_REGISTER     = N_PART == 1 ? 32 : 16;
    static constexpr int WIDTH          = COLUMNS / N_PART;
    static constexpr bool DOT_IS_SIGNED = false;

    static ints load(const void * p) { return EAGLE3_X86_BITS(loadu)((const ints *) p); }
    static ints every(int32_t x) { return EAGLE3_X86(set1_epi32)(x); }  // the same four bytes in each column
    static ints every_byte(uint8_t x) { return EAGLE3_X86(set1_epi8)((char) x); }
    static floats every(float x) { return EAGLE3_X86(set1_ps)(x); }
    static floats zero() { return EAGLE3_X86(setzero_ps)(); }
    static ints none() { return EAGLE3_X86_BITS(setzero)(); }

    static ints low(ints v) { return EAGLE3_X86_BITS (and)(v, every_byte(15)); }
    static ints high(ints v) { return low(EAGLE3_X86(srli_epi16)(v, 4)); }
    static ints or_(ints a, ints b) { return EAGLE3_X86_BITS(or)(a, b); }
    static ints flip(ints v) { return EAGLE3_X86_BITS(xor)(v, every_byte(128)); }  // signed bytes plus 128

    static floats singles(const float * p) { return EAGLE3_X86(loadu_ps)(p); }
    static floats bfloats(const uint16_t * p) {
        const ints wide = EAGLE3_X86(cvtepu16_epi32)(half_of(p));
        return (floats) EAGLE3_X86(slli_epi32)(wide, 16);
    }
    static floats halves(const uint16_t * d) { return EAGLE3_X86(cvtph_ps)(half_of(d)); }

    static ints add(ints a, ints b) { return EAGLE3_X86(add_epi32)(a, b); }
    static ints add_pairs(ints a, ints b) { return EAGLE3_X86(add_epi16)(a, b); }
    static ints subtract_times_32(ints a, ints b) {
        return EAGLE3_X86(sub_epi32)(a, EAGLE3_X86(slli_epi32)(b, 5));
    }
    static floats numbers(ints v) { return EAGLE3_X86(cvtepi32_ps)(v); }
    static floats negative(floats v) { return EAGLE3_X86(sub_ps)(zero(), v); }
    static floats multiply(floats a, floats b) { return EAGLE3_X86(mul_ps)(a, b); }
    static floats multiply_add(floats a, floats b, floats c) { return EAGLE3_X86(fmadd_ps)(a, b, c); }
    static void store(float * p, floats v) { EAGLE3_X86(storeu_ps)(p, v); }

    // Unsigned bytes w times signed x: sums of two neighbours each, 16 bits wide.
    static ints pairs(ints w, ints x) { return EAGLE3_X86(maddubs_epi16)(w, x); }
    // Sums of two neighbouring pairs, each times its weight: 32 bits wide.
    static ints join(ints pairs, ints weights) { return EAGLE3_X86(madd_epi16)(pairs, weights); }
    static ints ones() { return EAGLE3_X86(set1_epi16)(1); }
    // Signed bytes w times signed x: unsigned ones and x with the sign of w.
    static ints size(ints w) { return EAGLE3_X86(abs_epi8)(w); }

    // Adds unsigned bytes w times signed x in fours where no instruction does it. Only tests call it. The
    // even bytes are added first, then the odd ones.
    static ints dot_in_pairs(ints sum, ints w, ints x) {
        const ints even = EAGLE3_X86(madd_epi16)(EAGLE3_X86_BITS (and)(w, EAGLE3_X86(set1_epi16)(255)),
            EAGLE3_X86(srai_epi16)(EAGLE3_X86(slli_epi16)(x, 8), 8));
        const ints odd  = EAGLE3_X86(madd_epi16)(EAGLE3_X86(srli_epi16)(w, 8), EAGLE3_X86(srai_epi16)(x, 8));
        return add(sum, add(even, odd));
    }

  private:
    static x86_half half_of(const void * p) {
        x86_half v;
        std::memcpy(&v, p, sizeof(v));
        return v;
    }
};

#undef EAGLE3_X86
#undef EAGLE3_X86_BITS

}  // namespace eagle3::kernels
