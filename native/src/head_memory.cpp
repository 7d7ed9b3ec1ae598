#include "head_memory.hpp"

#include "ggml-alloc.h"

#include <cstring>

namespace eagle3 {

namespace {

// Returns the buffers whose columns are interleaved, as the target's quantised matrices lie (native/kernels),
// or null if this build has none.
ggml_backend_buffer_type_t interleaved(ggml_backend_dev_t device) {
    const auto extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * type = extra ? extra(device) : nullptr; type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "CPU_INTERLEAVED") == 0) {
            return *type;
        }
    }
    return nullptr;
}

// Says whether the device multiplies a matrix that lies in such a buffer. An empty buffer takes the place of
// the matrix in the question.
bool multiplies(ggml_backend_dev_t device, ggml_backend_buffer_t empty, ggml_tensor * w) {
    ggml_context_ptr ctx(ggml_init({4 * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/true}));
    require(ctx != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head");
    ggml_tensor * op = ggml_mul_mat(ctx.get(), w, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, w->ne[0], 1));
    w->buffer        = empty;
    const bool can   = ggml_backend_dev_supports_op(device, op);
    w->buffer        = nullptr;
    return can;
}

ggml_backend_buffer_ptr allocated(ggml_backend_buffer_t buffer) {
    require(buffer != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's weights");
    return ggml_backend_buffer_ptr(buffer);
}

// Returns the matrices of the file that no row is read of.
std::vector<ggml_tensor *> only_multiplied(const head & h) {
    std::vector<ggml_tensor *> out;
    for (ggml_tensor * t = ggml_get_first_tensor(h.ctx.get()); t; t = ggml_get_next_tensor(h.ctx.get(), t)) {
        if (ggml_is_quantized(t->type) && ggml_n_dims(t) == 2 && t != h.tok_embd) {
            out.push_back(t);
        }
    }
    return out;
}

}  // namespace

void allocate_weights(head & h) {
    if (ggml_backend_buffer_type_t type = interleaved(h.device)) {
        const ggml_backend_buffer_ptr empty = allocated(ggml_backend_buft_alloc_buffer(type, 0));
        std::vector<ggml_tensor *> matrices;
        size_t size = 0;
        for (ggml_tensor * t : only_multiplied(h)) {
            if (multiplies(h.device, empty.get(), t)) {
                matrices.push_back(t);
                size += GGML_PAD(
                    ggml_backend_buft_get_alloc_size(type, t), ggml_backend_buft_get_alignment(type));
            }
        }
        if (!matrices.empty()) {
            h.matrices         = allocated(ggml_backend_buft_alloc_buffer(type, size));
            ggml_tallocr place = ggml_tallocr_new(h.matrices.get());
            for (ggml_tensor * t : matrices) {
                require(ggml_tallocr_alloc(&place, t) == GGML_STATUS_SUCCESS, EAGLE3_E_INTERNAL,
                    "a weight of the head fits no memory");
            }
        }
    }
    h.buffer = allocated(
        ggml_backend_alloc_ctx_tensors_from_buft(h.ctx.get(), ggml_backend_dev_buffer_type(h.device)));
}

}  // namespace eagle3
