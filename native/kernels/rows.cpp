#include "rows.hpp"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

namespace eagle3::kernels {

namespace {

constexpr size_t N_WORD = sizeof(row_block<1>) / 4, N_SUPER_WORD = sizeof(row_superblock<1>) / 4;
constexpr int N_AT_ONCE = 8;  // blocks

void round_by_32(const float * x, int n_block, int32_t * words) {
    block_q8_0 rounded[N_AT_ONCE];
    quantize_row_q8_0(x, rounded, (int64_t) n_block * QK8_0);
    for (int b = 0; b < n_block; ++b) {
        row_block<1> out{};
        out.scale[0] = GGML_CPU_FP16_TO_FP32(rounded[b].d);
        for (const int8_t q : rounded[b].qs) {
            out.sum[0] += q;
        }
        out.scaled_sum[0] = out.scale[0] * (float) out.sum[0];
        std::memcpy(out.bytes, rounded[b].qs, sizeof(out.bytes));
        std::memcpy(words + b * N_WORD, &out, sizeof(out));
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
        std::memcpy(out.sums_of_16, rounded[b].bsums, sizeof(out.sums_of_16));
        std::memcpy(out.bytes, rounded[b].qs, sizeof(out.bytes));
        std::memcpy(words + b * N_SUPER_WORD, &out, sizeof(out));
    }
}

void copy_by_32(const float * x, int n_block, int32_t * words) {
    std::memcpy(words, x, sizeof(row_floats<1>) * (size_t) n_block);
}

// Puts a row's block into a tile of n rows.
void put(const rounding & how, int n, int n_block, int row, int block, const int32_t * words, void * tile) {
    const int n_row = shape_of(n).n_row;
    int32_t * to = (int32_t *) tile + how.n_word * (size_t) n_row * (size_t) (row / n_row * n_block + block);
    for (size_t i = 0; i < how.n_word; ++i) {
        to[i * n_row + row % n_row] = words[i];
    }
}

void clear_idle(const rounding & how, int n, int n_block, int from, int to, void * tile) {
    static constexpr int32_t none[N_SUPER_WORD] = {};
    const auto [n_row, n_part]                  = shape_of(n);
    for (int row = n; row < n_row * n_part; ++row) {
        for (int b = from; b < to; ++b) {
            put(how, n, n_block, row, b, none, tile);
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
    for (int row = 0; row < n; ++row) {
        for (int b = from; b < to; b += N_AT_ONCE) {
            const int n_now = to - b < N_AT_ONCE ? to - b : N_AT_ONCE;
            how.round(x[row] + (size_t) b * how.block, n_now, words);
            for (int i = 0; i < n_now; ++i) {
                put(how, n, n_block, row, b + i, words + i * how.n_word, tile);
            }
        }
    }
    clear_idle(how, n, n_block, from, to, tile);
}

void gather_rows(const rounding & how, int n, int n_block, const void * const * rows, void * tile) {
    for (int row = 0; row < n; ++row) {
        for (int b = 0; b < n_block; ++b) {
            put(how, n, n_block, row, b, (const int32_t *) rows[row] + b * how.n_word, tile);
        }
    }
    clear_idle(how, n, n_block, 0, n_block, tile);
}

}  // namespace eagle3::kernels
