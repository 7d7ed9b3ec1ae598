#include "rows.hpp"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

namespace eagle3::kernels {

namespace {

constexpr size_t N_WORD = sizeof(row_block<1>) / 4, N_SUPER_WORD = sizeof(row_superblock<1>) / 4;
constexpr int N_AT_ONCE = 8;  // blocks

#if defined(__AVX512F__)
// As quantize_row_q8_0() rounds. Returns the scale.
float round_block(const float * x, int8_t * bytes, int32_t & sum) {
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const float most     = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __m512 inverse = _mm512_set1_ps(most != 0.0f ? 127.0f / most : 0.0f);
    const auto rounded   = [&](__m512 v) {
        return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)));
    };
    const __m128i q_low = rounded(low), q_high = rounded(high);
    _mm_storeu_si128((__m128i *) bytes, q_low);
    _mm_storeu_si128((__m128i *) bytes + 1, q_high);
    // of the bytes, which are bounded where x is not finite, too
    sum =
        _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_cvtepi8_epi32(q_low), _mm512_cvtepi8_epi32(q_high)));
    return _cvtsh_ss(_cvtss_sh(most / 127.0f, _MM_FROUND_TO_NEAREST_INT));
}
#else
float round_block(const float * x, int8_t * bytes, int32_t & sum) {
    block_q8_0 rounded;
    quantize_row_q8_0(x, &rounded, QK8_0);
    sum = 0;
    for (const int8_t q : rounded.qs) {
        sum += q;
    }
    std::memcpy(bytes, rounded.qs, sizeof(rounded.qs));
    return GGML_CPU_FP16_TO_FP32(rounded.d);
}
#endif

// A row_block<1> each, field by field: what was just stored in parts is slow to load at once.
void round_by_32(const float * x, int n_block, int32_t * words) {
    for (int b = 0; b < n_block; ++b, words += N_WORD) {
        int32_t sum;
        const float scale      = round_block(x + b * QK8_0, (int8_t *) (words + 5), sum);
        const float scaled_sum = scale * (float) sum;
        std::memcpy(words, &scale, sizeof(scale));
        std::memcpy(words + 1, &scaled_sum, sizeof(scaled_sum));
        words[2] = -8 * sum;
        words[3] = -16 * sum;
        words[4] = -128 * sum;
    }
}

// Of the bytes of a superblock.
void fill_offsets(const block_q8_K & rounded, int32_t * offsets) {
    if constexpr (N_OFFSET == 32) {
        for (int i = 0; i < N_OFFSET; ++i) {
            int32_t sum = 0;
            for (int j = 0; j < 8; ++j) {
                sum += rounded.qs[8 * i + j];
            }
            offsets[i] = -32 * sum;
        }
    } else {
        std::memcpy(offsets, rounded.bsums, sizeof(rounded.bsums));
    }
}

void round_by_256(const float * x, int n_block, int32_t * words) {
    block_q8_K rounded[N_AT_ONCE];
    quantize_row_q8_K(x, rounded, (int64_t) n_block * QK_K);
    for (int b = 0; b < n_block; ++b) {
        row_superblock<1> out{};
        int16_t sums[8];
        for (int i = 0; i < 8; ++i) {
            sums[i] = (int16_t) (rounded[b].bsums[2 * i] + rounded[b].bsums[2 * i + 1]);
        }
        out.scale[0] = rounded[b].d;
        std::memcpy(out.sums_of_32, sums, sizeof(sums));
        fill_offsets(rounded[b], &out.offsets[0][0]);
        std::memcpy(out.bytes, rounded[b].qs, sizeof(out.bytes));
        std::memcpy(words + b * N_SUPER_WORD, &out, sizeof(out));
    }
}

void copy_by_32(const float * x, int n_block, int32_t * words) {
    std::memcpy(words, x, sizeof(row_floats<1>) * (size_t) n_block);
}

// Where a row's blocks lie in a tile.
struct places {
    int32_t * first;
    size_t n_word;  // of a block
    int stride;     // between its words

    places(const rounding & how, tile_shape shape, int n_block, int row, void * tile)
        : first((int32_t *) tile + how.n_word * (size_t) (row / shape.n_row * n_block) * shape.n_row +
                row % shape.n_row),
          n_word(how.n_word), stride(shape.n_row) {}

    void put(int block, const int32_t * words) const {
        int32_t * to = first + n_word * (size_t) block * stride;
        for (size_t i = 0; i < n_word; ++i, to += stride) {
            *to = words[i];
        }
    }
};

void clear_idle(const rounding & how, int n, int n_block, int from, int to, void * tile) {
    static constexpr int32_t none[N_SUPER_WORD] = {};
    const tile_shape shape                      = shape_of(n);
    for (int row = n; row < shape.n_row * shape.n_part; ++row) {
        const places at(how, shape, n_block, row, tile);
        for (int b = from; b < to; ++b) {
            at.put(b, none);
        }
    }
}

}  // namespace

const rounding by_32  = {QK8_0, N_WORD, round_by_32};
const rounding by_256 = {QK_K, N_SUPER_WORD, round_by_256};

const rounding as_they_are = {32, sizeof(row_floats<1>) / 4, copy_by_32};

void round_rows(
    const rounding & how, int n, int n_block, int from, int to, const float * const * x, void * tile) {
    int32_t words[N_AT_ONCE * N_SUPER_WORD];
    const tile_shape shape = shape_of(n);
    for (int row = 0; row < n; ++row) {
        const places at(how, shape, n_block, row, tile);
        for (int b = from; b < to; b += N_AT_ONCE) {
            const int n_now = to - b < N_AT_ONCE ? to - b : N_AT_ONCE;
            how.round(x[row] + (size_t) b * how.block, n_now, words);
            for (int i = 0; i < n_now; ++i) {
                at.put(b + i, words + i * how.n_word);
            }
        }
    }
    clear_idle(how, n, n_block, from, to, tile);
}

void gather_rows(const rounding & how, int n, int n_block, const void * const * rows, void * tile) {
    const tile_shape shape = shape_of(n);
    for (int row = 0; row < n; ++row) {
        const places at(how, shape, n_block, row, tile);
        for (int b = 0; b < n_block; ++b) {
            at.put(b, (const int32_t *) rows[row] + b * how.n_word);
        }
    }
    clear_idle(how, n, n_block, 0, n_block, tile);
}

}  // namespace eagle3::kernels
