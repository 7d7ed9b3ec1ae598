// Flash attention for the CPU backend (patch 0103): of few rows, and of prompts in the same order of sums.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct ggml_compute_params;
struct ggml_tensor;

// Upstream's kernel: one cell after the other, of caches of every type. It computes rows ir0 to ir1, counted
// through the heads, over cells ic_start to ic_end; row ir's maximum, sum and values go to partials[ir *
// stride].
using eagle3_attend_cells = void (*)(const ggml_compute_params * params, ggml_tensor * op, int ir0, int ir1,
    int64_t ic_start, int64_t ic_end, float * partials, int64_t stride);

// GGML_OP_FLASH_ATTN_EXT, called by each of the threads at once. False, with nothing computed, where a prompt
// is left to upstream's tiles.
bool eagle3_attention(const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells);

// It takes so many bytes of the work buffer.
extern "C" size_t eagle3_attention_work(const ggml_tensor * op, int n_thread);
