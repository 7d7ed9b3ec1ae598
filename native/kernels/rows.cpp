#include "rows.hpp"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

namespace eagle3::kernels {

namespace {

// Where a row's numbers of a block lie in a tile.
struct place {
    float * scale;
    int32_t *sum, *bytes;
    int stride;
};

place place_of(void * tile, int n, int n_block, int row, int block) {
    const int n_row = shape_of(n).n_row;
    char * at       = (char *) tile + ROW_BYTES * (size_t) n_row * (size_t) (row / n_row * n_block + block);
    auto * p        = (float *) at + row % n_row;
    return {p, (int32_t *) p + n_row, (int32_t *) p + 2 * n_row, n_row};
}

void put(const place & p, float scale, int32_t sum, const int8_t * bytes) {
    *p.scale = scale;
    *p.sum   = sum;
    for (int j = 0; j < BLOCK / 4; ++j) {
        std::memcpy(p.bytes + (size_t) j * p.stride, bytes + 4 * j, 4);
    }
}

void clear_idle(int n, int n_block, int from, int to, void * tile) {
    static constexpr int8_t none[BLOCK] = {};
    const auto [n_row, n_part]          = shape_of(n);
    for (int row = n; row < n_row * n_part; ++row) {
        for (int b = from; b < to; ++b) {
            put(place_of(tile, n, n_block, row, b), 0.0f, 0, none);
        }
    }
}

}  // namespace

void round_rows(int n, int n_block, int from, int to, const float * const * x, void * tile) {
    constexpr int N = 32;  // blocks at a time
    block_q8_0 rounded[N];
    for (int row = 0; row < n; ++row) {
        for (int b = from; b < to; b += N) {
            const int n_now = to - b < N ? to - b : N;
            quantize_row_q8_0(x[row] + (size_t) b * BLOCK, rounded, (int64_t) n_now * BLOCK);
            for (int i = 0; i < n_now; ++i) {
                int32_t sum = 0;
                for (const int8_t q : rounded[i].qs) {
                    sum += q;
                }
                put(place_of(tile, n, n_block, row, b + i), GGML_CPU_FP16_TO_FP32(rounded[i].d), sum,
                    rounded[i].qs);
            }
        }
    }
    clear_idle(n, n_block, from, to, tile);
}

void gather_rows(int n, int n_block, const void * const * rows, void * tile) {
    for (int row = 0; row < n; ++row) {
        for (int b = 0; b < n_block; ++b) {
            const row_block<1> & one = ((const row_block<1> *) rows[row])[b];
            put(place_of(tile, n, n_block, row, b), one.scale[0], one.sum[0], (const int8_t *) one.bytes);
        }
    }
    clear_idle(n, n_block, 0, n_block, tile);
}

}  // namespace eagle3::kernels
