// What goes into the head's graphs and what comes out: one buffer, one copy each way.
#include "head/runner_parts.hpp"

#include <algorithm>
#include <cstring>

namespace eagle3 {

namespace {

constexpr size_t LEAST_IO = 1 << 16;

}  // namespace

std::vector<ggml_tensor *> runner::io_tensors(const built & b) {
    std::vector<ggml_tensor *> all = b.inputs;
    all.insert(all.end(), b.outputs.begin(), b.outputs.end());
    return all;
}

// Returns the bytes that a graph's inputs and outputs take.
size_t runner::io_size(const built & b) const {
    const size_t alignment = ggml_backend_get_alignment(backends_.front());
    size_t size            = 0;
    for (const ggml_tensor * t : io_tensors(b)) {
        size += GGML_PAD(ggml_nbytes(t), alignment);
    }
    return size;
}

// Gives a graph's inputs, then its outputs, their places in the buffer, before the graph is allocated.
void runner::place(built & b, ggml_backend_buffer_t io) const {
    const size_t alignment = ggml_backend_get_alignment(backends_.front());
    char * const base      = (char *) ggml_backend_buffer_get_base(io);
    size_t at              = 0;
    const auto put         = [&](const std::vector<ggml_tensor *> & tensors) {
        const size_t first = at;
        size_t end         = at;
        for (ggml_tensor * t : tensors) {
            require(ggml_backend_tensor_alloc(io, t, base + at) == GGML_STATUS_SUCCESS, EAGLE3_E_INTERNAL,
                "an input of the head fits no memory");
            end = at + ggml_nbytes(t);
            at += GGML_PAD(ggml_nbytes(t), alignment);
        }
        if (end == first) {
            return (ggml_tensor *) nullptr;
        }
        ggml_tensor * all = ggml_new_tensor_1d(b.ctx.get(), GGML_TYPE_I8, (int64_t) (end - first));
        require(ggml_backend_tensor_alloc(io, all, base + first) == GGML_STATUS_SUCCESS, EAGLE3_E_INTERNAL,
            "the inputs of the head fit no memory");
        return all;
    };
    b.in  = put(b.inputs);
    b.out = put(b.outputs);
}

// Makes the buffer that kept graphs share; false if there is no memory for it. No graph lies in the old one.
bool runner::make_io(size_t size) {
    wait();
    size = std::max(size, LEAST_IO);
    io_.reset();
    staging_.reset();
    io_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(h_.device), size));
    if (io_ && !ggml_backend_buffer_is_host(io_.get())) {
        ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(h_.device);
        staging_.reset(
            ggml_backend_buft_alloc_buffer(pinned ? pinned : ggml_backend_cpu_buffer_type(), size));
        if (!staging_) {
            io_.reset();
        }
    }
    return io_ != nullptr;
}

// Returns where the bytes of an input are made that lies in the shared buffer.
uint8_t * runner::staged(const ggml_tensor * t) const {
    return (uint8_t *) ggml_backend_buffer_get_base(staging_.get()) +
           ((const char *) t->data - (const char *) ggml_backend_buffer_get_base(io_.get()));
}

void runner::set(ggml_tensor * t, const void * data) const {
    if (t == nullptr || data == nullptr) {
        return;
    }
    if (ggml_backend_buffer_is_host(t->buffer)) {
        memcpy(t->data, data, ggml_nbytes(t));
    } else if (t->buffer == io_.get()) {
        memcpy(staged(t), data, ggml_nbytes(t));
    } else {
        ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
    }
}

// Waits for all that is queued: passes without outputs are not waited for when they are run.
void runner::wait() const {
    ggml_backend_synchronize(backends_.front());
}

}  // namespace eagle3
