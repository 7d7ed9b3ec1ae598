#include "products/activations.hpp"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

#include <algorithm>

namespace eagle3::kernels {

namespace {

constexpr size_t N_WORD = sizeof(row_block<1>) / 4, N_SUPER_WORD = sizeof(row_superblock<1>) / 4;
constexpr int N_AT_ONCE = 8;  // blocks

// A row_block<1>, field by field: what was just stored in parts is slow to load at once. Its bytes are there.
void put_block(float scale, int32_t sum, int32_t * words) {
    const float scaled_sum = scale * (float) sum;
    std::memcpy(words, &scale, sizeof(scale));
    std::memcpy(words + 1, &scaled_sum, sizeof(scaled_sum));
    words[2] = -8 * sum;
    words[3] = -16 * sum;
    words[4] = -128 * sum;
}
constexpr int BYTES_AT = 5;  // among its words

// A row_superblock<1> of these bytes, which are there, from the sums of each eight of them.
void put_superblock(float scale, const int32_t * sums_of_8, int32_t * words) {
    const auto two = [&](int from, int n) {  // sums of n times eight each, of 16 bits
        int32_t first = 0, second = 0;
        for (int i = 0; i < n; ++i) {
            first += sums_of_8[from + i];
            second += sums_of_8[from + n + i];
        }
        return (int32_t) ((uint32_t) (uint16_t) first | (uint32_t) (uint16_t) second << 16);
    };
    std::memcpy(words, &scale, sizeof(scale));
    for (int i = 0; i < 4; ++i) {
        words[1 + i] = two(8 * i, 4);
    }
    for (int i = 0; i < N_OFFSET; ++i) {
        words[5 + i] = N_OFFSET == 32 ? -32 * sums_of_8[i] : two(4 * i, 2);
    }
}
constexpr int SUPER_BYTES_AT = 5 + N_OFFSET;

#if defined(__AVX512F__) && defined(__AVX512BW__)

// Sixteen values times a factor, as bytes. What is no number becomes one, so that sums of bytes are bounded.
__m128i rounded(__m512 v, __m512 by) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, by)));
}

// Finds the largest of the lanes of each of four registers.
__m128 largest_of(const __m512 * x) {
    const __m512 a = _mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = _mm512_max_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512 c = _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 d = _mm256_max_ps(
        _mm512_castps512_ps256(c), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(c), 1)));
    return _mm_max_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1));
}

// Four blocks of one row or of four, as quantize_row_q8_0() rounds.
struct four_blocks {
    __m256i bytes[4];
    __m128 scale;
    __m128i sum;  // sums of the bytes
};

// Adds the lanes of each of four registers.
__m128i sums_of(const __m256i * x) {
    const __m256i a = _mm256_add_epi64(_mm256_unpacklo_epi64(x[0], x[1]), _mm256_unpackhi_epi64(x[0], x[1]));
    const __m256i b = _mm256_add_epi64(_mm256_unpacklo_epi64(x[2], x[3]), _mm256_unpackhi_epi64(x[2], x[3]));
    const __m128i c = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i d = _mm_add_epi64(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    return _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(c), _mm_castsi128_ps(d), 0x88));
}

four_blocks round_four(const float * const * x) {
    constexpr int N = 4;
    four_blocks r;
    __m512 low[N], high[N], most[N];
    for (int b = 0; b < N; ++b) {
        low[b]  = _mm512_loadu_ps(x[b]);
        high[b] = _mm512_loadu_ps(x[b] + 16);
        most[b] = _mm512_max_ps(_mm512_abs_ps(low[b]), _mm512_abs_ps(high[b]));
    }
    const __m128 of_block = largest_of(most), all = _mm_set1_ps(127.0f);
    const __m128 inverse = _mm_and_ps(_mm_div_ps(all, of_block), _mm_cmpneq_ps(of_block, _mm_setzero_ps()));
    r.scale              = _mm_cvtph_ps(_mm_cvtps_ph(_mm_div_ps(of_block, all), _MM_FROUND_TO_NEAREST_INT));
    float inverses[N];
    _mm_storeu_ps(inverses, inverse);
    __m256i sums[N];
    for (int b = 0; b < N; ++b) {
        const __m512 by = _mm512_set1_ps(inverses[b]);
        r.bytes[b]      = _mm256_set_m128i(rounded(high[b], by), rounded(low[b], by));
        sums[b] =
            _mm256_sad_epu8(_mm256_xor_si256(r.bytes[b], _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    }
    r.sum = _mm_sub_epi32(sums_of(sums), _mm_set1_epi32(128 * QK8_0));
    return r;
}

void round_four_of_row(const float * x, int32_t * words) {
    const float * const of[]  = {x, x + QK8_0, x + 2 * QK8_0, x + 3 * QK8_0};
    const four_blocks rounded = round_four(of);
    float scales[4];
    int32_t sums[4];
    _mm_storeu_ps(scales, rounded.scale);
    _mm_storeu_si128((__m128i *) sums, rounded.sum);
    for (int b = 0; b < 4; ++b, words += N_WORD) {
        _mm256_storeu_si256((__m256i *) (words + BYTES_AT), rounded.bytes[b]);
        put_block(scales[b], sums[b], words);
    }
}

// Rounds a block of four rows, side by side in a tile.
void round_in_tile(const float * const * x, int32_t * words, int stride) {
    const four_blocks rounded = round_four(x);
    const auto put            = [&](int word, __m128i of_rows) {
        _mm_storeu_si128((__m128i *) (words + word * stride), of_rows);
    };
    const auto less = [&](int by) {  // than nothing: the sum times a power of two
        return _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(rounded.sum, by));
    };
    put(0, _mm_castps_si128(rounded.scale));
    put(1, _mm_castps_si128(_mm_mul_ps(rounded.scale, _mm_cvtepi32_ps(rounded.sum))));
    put(2, less(3));
    put(3, less(4));
    put(4, less(7));
    const __m256i * q = rounded.bytes;
    for (int half = 0; half < 2; ++half) {  // words 0, 1, 4, 5 of all rows, then 2, 3, 6, 7
        const __m256i a    = half ? _mm256_unpackhi_epi32(q[0], q[1]) : _mm256_unpacklo_epi32(q[0], q[1]);
        const __m256i b    = half ? _mm256_unpackhi_epi32(q[2], q[3]) : _mm256_unpacklo_epi32(q[2], q[3]);
        const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
        const int word = BYTES_AT + 2 * half;
        put(word, _mm256_castsi256_si128(even));
        put(word + 1, _mm256_castsi256_si128(odd));
        put(word + 4, _mm256_extracti128_si256(even, 1));
        put(word + 5, _mm256_extracti128_si256(odd, 1));
    }
}

// Finds the first of the values that are largest without their sign. It is 0 where none is a number.
float first_extreme(const float * x) {
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < QK_K; i += 16) {
        most = _mm512_max_ps(
            _mm512_abs_ps(_mm512_loadu_ps(x + i)), most);  // in this order: not what is no number
    }
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int i = 0; i < QK_K; i += 16) {
        const __mmask16 at = _mm512_cmpeq_ps_mask(_mm512_abs_ps(_mm512_loadu_ps(x + i)), most);
        if (at) {
            return x[i + __builtin_ctz(at)];
        }
    }
    return 0.0f;
}

// Rounds a superblock as quantize_row_q8_K() does.
void round_superblock(const float * x, int32_t * words) {
    const float extreme = first_extreme(x), factor = extreme != 0.0f ? -127.0f / extreme : 0.0f;
    const __m512 by = _mm512_set1_ps(factor);
    auto * bytes    = (int8_t *) (words + SUPER_BYTES_AT);
    for (int i = 0; i < QK_K; i += 16) {
        _mm_storeu_si128((__m128i *) (bytes + i), rounded(_mm512_loadu_ps(x + i), by));
    }
    int32_t sums_of_8[QK_K / 8];
    for (int i = 0; i < QK_K; i += 64) {
        const __m512i q = _mm512_xor_si512(_mm512_loadu_si512(bytes + i), _mm512_set1_epi8(-128));
        const __m512i s = _mm512_sad_epu8(q, _mm512_setzero_si512());
        _mm256_storeu_si256((__m256i *) (sums_of_8 + i / 8),
            _mm256_sub_epi32(_mm512_cvtepi64_epi32(s), _mm256_set1_epi32(128 * 8)));
    }
    put_superblock(extreme != 0.0f ? 1.0f / factor : 0.0f, sums_of_8, words);
}

// Four blocks at a time, as many as there are. Returns the number of blocks.
int round_fours(const float * x, int n_block, int32_t * words) {
    int b = 0;
    for (; b + 4 <= n_block; b += 4) {
        round_four_of_row(x + b * QK8_0, words + b * N_WORD);
    }
    return b;
}

constexpr auto by_32_in_tile = round_in_tile;

#else

constexpr decltype(rounding::in_tile) by_32_in_tile = nullptr;

int round_fours(const float * /*x*/, int /*n_block*/, int32_t * /*words*/) {
    return 0;
}

void round_superblock(const float * x, int32_t * words) {
    block_q8_K rounded;
    quantize_row_q8_K(x, &rounded, QK_K);
    int32_t sums_of_8[QK_K / 8];
    for (int i = 0; i < QK_K / 8; ++i) {
        sums_of_8[i] = 0;
        for (int j = 0; j < 8; ++j) {
            sums_of_8[i] += rounded.qs[8 * i + j];
        }
    }
    put_superblock(rounded.d, sums_of_8, words);
    std::memcpy(words + SUPER_BYTES_AT, rounded.qs, sizeof(rounded.qs));
}

#endif

void round_block(const float * x, int32_t * words) {
    block_q8_0 rounded;
    quantize_row_q8_0(x, &rounded, QK8_0);
    int32_t sum = 0;
    for (const int8_t q : rounded.qs) {
        sum += q;
    }
    std::memcpy(words + BYTES_AT, rounded.qs, sizeof(rounded.qs));
    put_block(GGML_CPU_FP16_TO_FP32(rounded.d), sum, words);
}

void round_by_32(const float * x, int n_block, int32_t * words) {
    for (int b = round_fours(x, n_block, words); b < n_block; ++b) {
        round_block(x + b * QK8_0, words + b * N_WORD);
    }
}

void round_by_256(const float * x, int n_block, int32_t * words) {
    for (int b = 0; b < n_block; ++b) {
        round_superblock(x + b * QK_K, words + b * N_SUPER_WORD);
    }
}

void copy_by_32(const float * x, int n_block, int32_t * words) {
    std::memcpy(words, x, sizeof(row_floats<1>) * (size_t) n_block);
}

// Finds where a row's blocks lie in a tile.
struct places {
    int32_t * first;
    size_t n_word;  // in a block
    int stride;     // between its words

    places(const rounding & how, tile_shape shape, int n_block, int row, void * tile)
        : first((int32_t *) tile + how.n_word * (size_t) (row / shape.n_row * n_block) * shape.n_row +
                row % shape.n_row),
          n_word(how.n_word), stride(shape.n_row) {}

    int32_t * of(int block) const { return first + n_word * (size_t) block * stride; }
    void put(int block, const int32_t * words) const {
        int32_t * to = of(block);
        for (size_t i = 0; i < n_word; ++i, to += stride) {
            *to = words[i];
        }
    }
};

// Another thread may just have written them: they come from its core, which takes long.
void prefetch(const float * from, const float * to) {
    for (; from < to; from += 16) {
        __builtin_prefetch(from);
    }
}

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

const rounding by_32  = {QK8_0, N_WORD, round_by_32, by_32_in_tile};
const rounding by_256 = {QK_K, N_SUPER_WORD, round_by_256, nullptr};

const rounding as_they_are = {32, sizeof(row_floats<1>) / 4, copy_by_32, nullptr};

void round_rows(
    const rounding & how, int n, int n_block, int from, int to, const float * const * x, void * tile) {
    int32_t words[N_AT_ONCE * N_SUPER_WORD];
    const tile_shape shape = shape_of(n);
    const auto next        = [&](int row, int n_next) {
        for (const int end = std::min(row + n_next, n); row < end; ++row) {
            prefetch(x[row] + (size_t) from * how.block, x[row] + (size_t) to * how.block);
        }
    };
    for (int row = 0; row < n;) {
        const places at(how, shape, n_block, row, tile);
        if (how.in_tile && row + 4 <= n && row % shape.n_row + 4 <= shape.n_row) {
            next(row + 4, 4);
            for (int b = from; b < to; ++b) {
                const size_t i            = (size_t) b * how.block;
                const float * const of[4] = {x[row] + i, x[row + 1] + i, x[row + 2] + i, x[row + 3] + i};
                how.in_tile(of, at.of(b), shape.n_row);
            }
            row += 4;
            continue;
        }
        next(row + 1, 1);
        for (int b = from; b < to; b += N_AT_ONCE) {
            const int n_now = to - b < N_AT_ONCE ? to - b : N_AT_ONCE;
            how.round(x[row] + (size_t) b * how.block, n_now, words);
            for (int i = 0; i < n_now; ++i) {
                at.put(b + i, words + i * how.n_word);
            }
        }
        ++row;
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
