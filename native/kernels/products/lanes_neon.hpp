// 128-bit vectors of NEON with dot products: four for 16 columns. Bytes are multiplied signed by signed.
#pragma once

#include <arm_neon.h>

namespace eagle3::kernels {

struct lanes {
    using ints                          = int32x4_t;
    using floats                        = float32x4_t;
    static constexpr int N_PART         = 4;
    static constexpr int N_REGISTER     = 32;
    static constexpr int WIDTH          = COLUMNS / N_PART;
    static constexpr bool HAS_DOT       = true;
    static constexpr bool DOT_IS_SIGNED = true;

    static int8x16_t s8(ints v) { return vreinterpretq_s8_s32(v); }
    static uint8x16_t u8(ints v) { return vreinterpretq_u8_s32(v); }
    static int16x8_t s16(ints v) { return vreinterpretq_s16_s32(v); }
    static ints from(uint8x16_t v) { return vreinterpretq_s32_u8(v); }

    static ints load(const void * p) { return vreinterpretq_s32_s8(vld1q_s8((const int8_t *) p)); }
    static ints every(int32_t x) { return vdupq_n_s32(x); }  // the same four bytes in each column
    static floats every(float x) { return vdupq_n_f32(x); }
    static floats zero() { return vdupq_n_f32(0.0f); }
    static ints none() { return vdupq_n_s32(0); }

    static ints low(ints v) { return from(vandq_u8(u8(v), vdupq_n_u8(15))); }
    static ints high(ints v) { return from(vshrq_n_u8(u8(v), 4)); }
    static ints or_(ints a, ints b) { return vorrq_s32(a, b); }
    static ints flip(ints v) { return from(veorq_u8(u8(v), vdupq_n_u8(128))); }  // signed bytes plus 128
    // Takes bytes of a table of 16, by indices below 16.
    static ints look_up(const int8_t * table, ints index) {
        return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), u8(index)));
    }
    // Adds the fifth bits to four. Of each column's 32 bits, 4 * j to 4 * j + 3 are those of its four bytes.
    static ints with_spread(ints v, ints bits, int j) {
        static constexpr uint8_t bytes[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
        const uint8x16_t to_bytes          = vaddq_u8(vld1q_u8(bytes), vdupq_n_u8((uint8_t) (j / 2)));
        const uint8x16_t of_byte = vreinterpretq_u8_u32(vdupq_n_u32(j % 2 ? 0x80402010 : 0x08040201));
        const uint8x16_t is_set  = vtstq_u8(vqtbl1q_u8(u8(bits), to_bytes), of_byte);
        return or_(v, from(vandq_u8(is_set, vdupq_n_u8(16))));
    }
    // The fifth bit is bit i of a byte of `bytes`.
    static ints with_bit(ints v, ints bytes, int i) {
        const uint8x16_t is_set = vtstq_u8(u8(bytes), vdupq_n_u8((uint8_t) (1 << i)));
        return or_(v, from(vandq_u8(is_set, vdupq_n_u8(16))));
    }
    // The fifth and sixth bits are bits I and I + 1 of it.
    template <int I> static ints with_two_bits(ints v, ints bytes) {
        uint8x16_t moved = u8(bytes);
        if constexpr (I < 4) {
            moved = vshlq_n_u8(moved, 4 - I);
        } else if constexpr (I > 4) {
            moved = vshrq_n_u8(moved, I - 4);
        }
        return or_(v, from(vandq_u8(moved, vdupq_n_u8(0x30))));
    }

    static floats singles(const float * p) { return vld1q_f32(p); }
    static floats bfloats(const uint16_t * p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static floats halves(const uint16_t * d) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(d))); }
    // MXFP4 scales by half of 2 to the power of (e - 127).
    static floats powers(const uint8_t * e) {
        uint32_t four;
        std::memcpy(&four, e, sizeof(four));
        const uint8x8_t bytes   = vreinterpret_u8_u32(vdup_n_u32(four));
        const uint32x4_t x      = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
        const uint32x4_t normal = vshlq_n_u32(vsubq_u32(x, vdupq_n_u32(1)), 23);
        const uint32x4_t least  = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(x));
        return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(x, vdupq_n_u32(2)), least, normal));
    }

    static ints add(ints a, ints b) { return vaddq_s32(a, b); }
    static ints add_pairs(ints a, ints b) { return vreinterpretq_s32_s16(vaddq_s16(s16(a), s16(b))); }
    static ints subtract_times_32(ints a, ints b) { return vsubq_s32(a, vshlq_n_s32(b, 5)); }
    static floats numbers(ints v) { return vcvtq_f32_s32(v); }
    static floats negative(floats v) { return vnegq_f32(v); }
    static floats multiply(floats a, floats b) { return vmulq_f32(a, b); }
    static floats multiply_add(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
    static void store(float * p, floats v) { vst1q_f32(p, v); }

    // Processors without dot products, and tests, use these: sums of two neighbours each, 16 bits wide.
    static ints pairs(ints w, ints x) {
        const int16x8_t low =
            vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u8(w)))), vmovl_s8(vget_low_s8(s8(x))));
        const int16x8_t high =
            vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(u8(w)))), vmovl_s8(vget_high_s8(s8(x))));
        return vreinterpretq_s32_s16(vpaddq_s16(low, high));
    }
    // Sums of two neighbouring pairs, each times its weight: 32 bits wide.
    static ints join(ints pairs, ints weights) {
        const int16x8_t p = s16(pairs), w = s16(weights);
        return vpaddq_s32(vmull_s16(vget_low_s16(p), vget_low_s16(w)), vmull_high_s16(p, w));
    }
    static ints add_joined(ints sum, ints pairs, ints weights) { return add(sum, join(pairs, weights)); }
    // A column has two signed bytes, as 16 bits each.
    static ints weights(const int8_t * first, const int8_t * second) {
        const ints a = scale(first), b = vshlq_n_s32(scale(second), 16);
        return vorrq_s32(vandq_s32(a, vdupq_n_s32(0xffff)), b);
    }
    static ints ones() { return vreinterpretq_s32_s16(vdupq_n_s16(1)); }
    // Signed bytes w times signed x: unsigned ones and x with the sign of w.
    static ints size(ints w) { return vreinterpretq_s32_s8(vabsq_s8(s8(w))); }
    static ints sign(ints x, ints w) {
        const int8x16_t of_negative = vbslq_s8(vcltzq_s8(s8(w)), vnegq_s8(s8(x)), s8(x));
        return vreinterpretq_s32_s8(vbicq_s8(of_negative, vreinterpretq_s8_u8(vceqzq_s8(s8(w)))));
    }
    // sum + signed bytes w times signed x, in fours
    static ints dot(ints sum, ints w, ints x) { return vdotq_s32(sum, s8(w), s8(x)); }
    // A superblock's runs are summed in dot products, which are multiplied by the scale.
    static constexpr bool RUNS_ARE_WIDE = true, RUNS_ARE_SHORT = false;
    static ints scale(const int8_t * numbers) {
        int32_t four;
        std::memcpy(&four, numbers, sizeof(four));
        return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
    }
    static ints start(ints w, ints x) { return dot(none(), w, x); }
    static ints go_on(ints sum, ints w, ints x) { return dot(sum, w, x); }
    template <bool ALL> static ints close(ints total, ints sum, ints scale) {
        return vmlaq_s32(total, sum, scale);
    }
};

}  // namespace eagle3::kernels
