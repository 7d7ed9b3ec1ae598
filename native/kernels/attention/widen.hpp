// Keys and values of sixteen cells, widened to floats once for all units that see them.
#pragma once

#include "attention/units.hpp"

#include "ggml-quants.h"

#include <algorithm>

namespace eagle3::kernels::attention {

// Widens numbers of the type T. N is the number of the head's registers, all of them full, or 0 for any.
template <int N, typename T>
EAGLE3_INLINE void widen(const head & x, const int32_t * cells, int n_register, float * out) {
    const int n_full = N ? N : x.n / LANES;
    for (int c = 0; c < STEP; ++c) {
        const T * from = (const T *) (x.data + cells[c] * x.stride);
        float * to     = out + c * n_register * LANES;
#pragma GCC unroll unrolled(16)
        for (int d = 0; d < n_full; ++d) {
            put(to + d * LANES, widened(from + d * LANES));
        }
        if (N == 0 && n_full < n_register) {
            T rest[LANES] = {};
            std::memcpy(rest, from + n_full * LANES, (x.n - n_full * LANES) * sizeof(T));
            put(to + n_full * LANES, widened(rest));
        }
    }
}

// Blocks of quantised numbers become the floats that upstream makes of them.

EAGLE3_INLINE void widen_block(const block_q8_0 & b, float * out) {
    const floats scale = every(GGML_CPU_FP16_TO_FP32(b.d));
    for (int d = 0; d < QK8_0; d += LANES) {
        put(out + d, widened(get(b.qs + d)) * scale);
    }
}

EAGLE3_INLINE void widen_block(const block_q4_0 & b, float * out) {
    const floats scale = every(GGML_CPU_FP16_TO_FP32(b.d));
    for (int d = 0; d < QK4_0 / 2; d += LANES) {
        const small_ints both = get((const int8_t *) b.qs + d);
        put(out + d, widened((both & 15) - 8) * scale);
        put(out + QK4_0 / 2 + d, widened(((both >> 4) & 15) - 8) * scale);
    }
}

template <typename T>
EAGLE3_INLINE void widen_blocks(const head & x, const int32_t * cells, int n_register, float * out) {
    for (int c = 0; c < STEP; ++c) {
        const T * from = (const T *) (x.data + cells[c] * x.stride);
        float * to     = out + c * n_register * LANES;
        for (int d = 0; d < n_register * LANES; d += 32) {
            widen_block(*from++, to + d);
        }
    }
}

// Widens the keys or values of sixteen cells. Blocks of the other types have 32 numbers as well.
template <int N>
EAGLE3_INLINE void widen(const head & x, const int32_t * cells, int n_register, float * out) {
    switch (x.type) {
    case GGML_TYPE_F16:
        return widen<N, ggml_fp16_t>(x, cells, n_register, out);
    case GGML_TYPE_BF16:
        return widen<N, ggml_bf16_t>(x, cells, n_register, out);
    case GGML_TYPE_F32:
        return widen<N, float>(x, cells, n_register, out);
    case GGML_TYPE_Q8_0:
        return widen_blocks<block_q8_0>(x, cells, n_register, out);
    case GGML_TYPE_Q4_0:
        return widen_blocks<block_q4_0>(x, cells, n_register, out);
    default:
        for (int c = 0; c < STEP; ++c) {
            ggml_get_type_traits(x.type)->to_float(
                x.data + cells[c] * x.stride, out + c * n_register * LANES, x.n);
        }
    }
}

// Cells that lie apart are asked for so many before they are needed, because no prefetcher of the hardware
// foresees them: first from memory to the second-level cache, which can wait for more lines at once than the
// first-level one, then from there.
constexpr int FAR = 192, NEAR = 64;
enum class level { FIRST, SECOND };

// Asks for sixteen cells of a unit, from cell i on.
template <level TO> EAGLE3_INLINE void prefetch(const head & x, const unit & w, int i) {
    const size_t n_byte = ggml_row_size(x.type, x.n);
    for (int c = i; c < std::min(i + STEP, w.n); ++c) {
        const char * from = x.data + w.cells[c] * x.stride;
        for (size_t b = 0; b < n_byte; b += 64) {
            __builtin_prefetch(from + b, 0, TO == level::FIRST ? 3 : 2);
        }
    }
}

inline bool same_cells(const int32_t * a, const int32_t * b) {
    return a == b || (a && std::memcmp(a, b, STEP * sizeof(int32_t)) == 0);
}

// Calls f with units that see the same sixteen cells, how many they are, and the number of the first of these
// cells, which are in block. values: those of the same cells if x is their keys, which are needed after them;
// null if x is the values.
template <int N, typename F>
EAGLE3_INLINE void each_step(const unit * units, int n_unit, const head & x, const head * values,
    int n_register, float * block, F && f) {
    int n_most = 0;
    for (int u = 0; u < n_unit; ++u) {
        n_most = std::max(n_most, units[u].n);
    }
    for (int i = 0; i < NEAR; i += STEP) {
        prefetch<level::FIRST>(x, units[0], i);
    }
    for (int i = NEAR; values && i < FAR; i += STEP) {
        prefetch<level::SECOND>(x, units[0], i);
    }
    for (int i = 0; i < n_most; i += STEP) {
        const int32_t * at = nullptr;  // in the last unit that has such cells
        const auto sees_at = [&](int u) {
            return u < n_unit && i < units[u].n &&
                   (i < units[u].n_same || same_cells(at, units[u].cells + i));
        };
        for (int u = 0, n; u < n_unit; u += n) {
            n = 1;
            if (i >= units[u].n) {
                continue;
            }
            if (!sees_at(u)) {
                at = units[u].cells + i;
                prefetch<level::FIRST>(x, units[u], i + NEAR);
                if (values) {
                    prefetch<level::SECOND>(x, units[u], i + FAR);
                    prefetch<level::SECOND>(*values, units[u], i);
                }
                widen<N>(x, at, n_register, block);
            }
            while (sees_at(u + n)) {
                ++n;
            }
            f(units + u, n, i);
        }
    }
}

}  // namespace eagle3::kernels::attention
