// A register of floats, of the widest kind that there is, by the vector extensions of GCC and Clang.
// Attention is written for any number of lanes that divides sixteen.
#pragma once

#include "inlining.hpp"
#include "intrinsics.hpp"
#include "simd-mappings.h"
#include "vec.h"

#include <cmath>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define EAGLE3_ATTENTION_LANES 16
#elif defined(__AVX__)
#define EAGLE3_ATTENTION_LANES 8
#else
#define EAGLE3_ATTENTION_LANES 4
#endif
#if defined(__ARM_NEON) && defined(__aarch64__)
#define EAGLE3_ATTENTION_NEON 1
#else
#define EAGLE3_ATTENTION_NEON 0
#endif
// where ggml_v_expf takes such a register
#if EAGLE3_ATTENTION_LANES == 16 ||                                                                          \
    (EAGLE3_ATTENTION_LANES == 8 && defined(__AVX2__) && defined(__FMA__)) ||                                \
    (EAGLE3_ATTENTION_NEON && !defined(__ARM_FEATURE_SVE)) ||                                                \
    (EAGLE3_ATTENTION_LANES == 4 && defined(__SSE2__))
#define EAGLE3_ATTENTION_EXP 1
#else
#define EAGLE3_ATTENTION_EXP 0
#endif

namespace eagle3::kernels::attention {

constexpr int LANES = EAGLE3_ATTENTION_LANES;
#if EAGLE3_ATTENTION_LANES == 16 || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32, otherwise 16
#else
constexpr bool MANY_REGISTERS = false;
#endif
// So many sums are registers at the same time, with some to spare.
constexpr int CELLS = MANY_REGISTERS ? 16 : 8;

typedef float floats __attribute__((vector_size(4 * LANES)));

inline floats get(const float * x) {
    floats v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

inline void put(float * x, floats v) {
    std::memcpy(x, &v, sizeof(v));
}

inline floats every(float x) {
    return x - floats{};  // minus: -0 stays
}

// Keeps what was read in its register. The compiler would read it again for each use.
inline void keep([[maybe_unused]] floats & x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

// a * b + c, rounded once where the processor can
inline floats multiply_add(floats a, floats b, floats c) {
#if EAGLE3_ATTENTION_LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif EAGLE3_ATTENTION_LANES == 8 && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif EAGLE3_ATTENTION_NEON
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// Adds lanes of four registers: four lanes each where there are sixteen of them (the four registers' sums lie
// side by side), all lanes of a half where there are eight, all where there are four.
inline floats sums_of_four(const floats * x) {
#if EAGLE3_ATTENTION_LANES == 16
    const __m512 s0 = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 s1 = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(s0, s1, 0x44), _mm512_shuffle_ps(s0, s1, 0xEE));
#elif EAGLE3_ATTENTION_LANES == 8
    return _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
#elif EAGLE3_ATTENTION_NEON
    return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
#else
    floats v;
    for (int i = 0; i < LANES; ++i) {
        v[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
    }
    return v;
#endif
}

#if EAGLE3_ATTENTION_LANES == 16
inline __m512 join(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
#endif

// Joins the sums of lanes of four registers each to those of as many registers as a register has lanes.
inline floats sums_of(const floats * fours) {
#if EAGLE3_ATTENTION_LANES == 16
    return join(join(fours[0], fours[1]), join(fours[2], fours[3]));
#elif EAGLE3_ATTENTION_LANES == 8
    return _mm256_add_ps(
        _mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#else
    return fours[0];
#endif
}

// Numbers of sixteen cells can be turned over where a register holds so many.
constexpr bool TURNS = LANES == 16;

// Turns over four numbers of sixteen cells, which are `stride` floats apart: to[n * 16 + cell].
inline void turn_four(
    [[maybe_unused]] const float * from, [[maybe_unused]] size_t stride, [[maybe_unused]] float * to) {
#if EAGLE3_ATTENTION_LANES == 16
    __m512 x[4];
    for (int c = 0; c < 4; ++c) {  // cells c, c + 4, c + 8, c + 12
        const float * cell = from + c * stride;
        x[c]               = _mm512_castps128_ps512(_mm_loadu_ps(cell));
        x[c]               = _mm512_insertf32x4(x[c], _mm_loadu_ps(cell + 4 * stride), 1);
        x[c]               = _mm512_insertf32x4(x[c], _mm_loadu_ps(cell + 8 * stride), 2);
        x[c]               = _mm512_insertf32x4(x[c], _mm_loadu_ps(cell + 12 * stride), 3);
    }
    const __m512d low_a  = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
    const __m512d low_b  = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
    const __m512d high_a = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    const __m512d high_b = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    _mm512_storeu_pd(to, _mm512_unpacklo_pd(low_a, low_b));
    _mm512_storeu_pd(to + 16, _mm512_unpackhi_pd(low_a, low_b));
    _mm512_storeu_pd(to + 32, _mm512_unpacklo_pd(high_a, high_b));
    _mm512_storeu_pd(to + 48, _mm512_unpackhi_pd(high_a, high_b));
#endif
}

inline floats exponential(floats x) {
#if EAGLE3_ATTENTION_EXP
    return ggml_v_expf(x);
#else
    for (int i = 0; i < LANES; ++i) {
        x[i] = expf(x[i]);
    }
    return x;
#endif
}

inline floats widened(const ggml_fp16_t * x) {
#if EAGLE3_ATTENTION_LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x));
#elif EAGLE3_ATTENTION_LANES == 8 && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x));
#elif EAGLE3_ATTENTION_NEON
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) x)));
#else
    floats v;
    for (int i = 0; i < LANES; ++i) {
        v[i] = GGML_CPU_FP16_TO_FP32(x[i]);
    }
    return v;
#endif
}

inline floats widened(const float * x) {
    return get(x);
}

inline floats widened(const ggml_bf16_t * x) {
    floats v;
    for (int i = 0; i < LANES; ++i) {
        v[i] = GGML_BF16_TO_FP32(x[i]);
    }
    return v;
}

// A vector of small integers has as many as a register has lanes.
typedef int8_t small_ints __attribute__((vector_size(LANES)));

inline small_ints get(const int8_t * x) {
    small_ints v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

inline floats widened(small_ints x) {
#if EAGLE3_ATTENTION_LANES == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i) x));
#else
    return __builtin_convertvector(x, floats);
#endif
}

}  // namespace eagle3::kernels::attention
