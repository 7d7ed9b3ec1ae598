// Flash attention of few rows, and of prompts. Each is called by every thread at once.
#pragma once

#include "attention/attention.h"
#include "attention/batch.hpp"

namespace eagle3::kernels::attention {

// At most GGML_CPU_INVARIANT_ROWS of a stream: threads share rows, heads and spans of cells.
void attend_few_rows(const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells);
// More rows: threads share tiles of rows. False, with nothing computed, where upstream has tiles.
bool attend_many_rows(const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells);

// Bytes of the work buffer that the results of few rows take, behind what each thread has for itself. However
// long the context is, they are at most 8 MB, or twice what the operation gives if that is more.
size_t work_of_results(const ggml_tensor * op);
// Floats of the work buffer that a thread has for itself, as upstream's kernel takes them.
int64_t scratch_of(const ggml_tensor * op);

}  // namespace eagle3::kernels::attention
