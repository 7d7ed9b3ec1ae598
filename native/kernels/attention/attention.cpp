#include "attention/attention.h"

#include "attention/rows.hpp"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

bool eagle3_attention(
    const ggml_compute_params * params, ggml_tensor * op, eagle3_attend_cells attend_cells) {
    using namespace eagle3::kernels::attention;
    GGML_ASSERT(params->wsize >= eagle3_attention_work(op, params->nth));
    if (op->src[0]->ne[1] > GGML_CPU_INVARIANT_ROWS) {
        return attend_many_rows(params, op, attend_cells);
    }
    attend_few_rows(params, op, attend_cells);
    return true;
}

size_t eagle3_attention_work(const ggml_tensor * op, int n_thread) {
    using namespace eagle3::kernels::attention;
    const bool few = op->src[0]->ne[1] <= GGML_CPU_INVARIANT_ROWS;
    return sizeof(float) * n_thread * scratch_of(op) + (few ? work_of_results(op) : 0);
}
