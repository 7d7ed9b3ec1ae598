#include "head/head_memory.hpp"

#include "ggml-alloc.h"

#include <algorithm>

#include <cstring>
#include <vector>

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

namespace {

// Says whether the device looks up rows of such a table.
bool looks_up(ggml_backend_dev_t device, ggml_type type, int64_t ne0) {
    ggml_context_ptr ctx(ggml_init({4 * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/true}));
    require(ctx != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head");
    ggml_tensor * table = ggml_new_tensor_2d(ctx.get(), type, ne0, 2);
    ggml_tensor * rows  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1);
    return ggml_backend_dev_supports_op(device, ggml_get_rows(ctx.get(), table, rows));
}

// Copies a table to another one, some rows at a time. Where the types differ, the copy is of F16.
void copy_table(const ggml_tensor * from, ggml_tensor * to) {
    const int64_t ne0 = from->ne[0], n_rows = ggml_nrows(from), step = 1024;
    std::vector<uint8_t> rows(step * from->nb[1]), halves(step * to->nb[1]);
    std::vector<float> floats(ne0);
    for (int64_t at = 0; at < n_rows; at += step) {
        const int64_t n = std::min(step, n_rows - at);
        ggml_backend_tensor_get(from, rows.data(), at * from->nb[1], n * from->nb[1]);
        for (int64_t i = 0; i < n && to->type != from->type; ++i) {
            ggml_get_type_traits(from->type)->to_float(rows.data() + i * from->nb[1], floats.data(), ne0);
            ggml_fp32_to_fp16_row(floats.data(), (ggml_fp16_t *) (halves.data() + i * to->nb[1]), ne0);
        }
        const std::vector<uint8_t> & data = to->type == from->type ? rows : halves;
        ggml_backend_tensor_set(to, data.data(), at * to->nb[1], n * to->nb[1]);
    }
}

}  // namespace

// The target's embeddings lie in host memory. Where the device has no room for them, its passes look tokens
// up through the host, as before.
void bring_tables(head & h) {
    if (ggml_backend_dev_type(h.device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return;
    }
    h.tables_ctx.reset(ggml_init({4 * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/true}));
    require(h.tables_ctx != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head");
    const ggml_tensor * from = h.tok_embd;
    // Arg-max of a row of NaN is -1 on some devices: there is an entry before the first.
    ggml_tensor * ids   = ggml_new_tensor_2d(h.tables_ctx.get(), GGML_TYPE_I32, 1, 1 + h.n_vocab);
    ggml_tensor * table = nullptr;
    const bool known    = looks_up(h.device, from->type, from->ne[0]);
    if (!looks_up(h.device, GGML_TYPE_I32, 1) || !(known || looks_up(h.device, GGML_TYPE_F16, from->ne[0]))) {
        return;
    }
    if (ggml_backend_buffer_is_host(from->buffer) || !known) {
        const ggml_type type = known ? from->type : GGML_TYPE_F16;
        table                = ggml_new_tensor_2d(h.tables_ctx.get(), type, from->ne[0], from->ne[1]);
    }
    h.tables.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(h.tables_ctx.get(), ggml_backend_dev_buffer_type(h.device)));
    if (!h.tables) {
        return;
    }
    ggml_backend_tensor_memset(ids, 0, 0, ids->nb[1]);
    ggml_backend_tensor_set(ids, h.d2t.data(), ids->nb[1], h.d2t.size() * sizeof(int32_t));
    if (table) {
        copy_table(from, table);
        h.tok_embd = table;
    }
    h.d2t_ids = ggml_view_2d(h.tables_ctx.get(), ids, 1, h.n_vocab, ids->nb[1], ids->nb[1]);
    require(ggml_backend_view_init(h.d2t_ids) == GGML_STATUS_SUCCESS, EAGLE3_E_INTERNAL,
        "a table of the head fits no memory");
}

}  // namespace eagle3
