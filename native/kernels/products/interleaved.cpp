#include "products/interleaved.h"

#include "products/multiply.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "traits.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace eagle3::kernels {

namespace {

// Reads and writes a matrix as the file has it: whole blocks of columns, from byte `offset` on.
struct matrix {
    const kernel & k;
    char * data;
    int64_t n_weight;  // in a column

    // [offset, offset + size) in whole blocks
    std::pair<size_t, size_t> whole(size_t offset, size_t size) const {
        const size_t first = offset / k.file_bytes, last = (offset + size + k.file_bytes - 1) / k.file_bytes;
        return {first * k.file_bytes, (last - first) * k.file_bytes};
    }
    template <typename F> void each(size_t offset, size_t size, F && f) const {
        const size_t column = k.column_bytes(n_weight), n_block = column / k.file_bytes;
        for (size_t at = offset; at < offset + size; at += k.file_bytes) {
            const size_t c = at / column, b = at % column / k.file_bytes;
            f(data + (c / COLUMNS * n_block + b) * COLUMNS * k.file_bytes, (int) (c % COLUMNS), at - offset);
        }
    }
    void put(size_t offset, size_t size, const char * from) const {
        each(offset, size, [&](char * block, int column, size_t at) { k.put(block, column, from + at); });
    }
    void get(size_t offset, size_t size, char * to) const {
        each(offset, size, [&](char * block, int column, size_t at) { k.get(block, column, to + at); });
    }
};

class traits : public ggml::cpu::tensor_traits {
  public:
    explicit traits(const kernel & k) : k_(k) {}

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = op->op == GGML_OP_MUL_MAT ? work_of_product(k_, op, n_threads)
                                         : work_of_experts(k_, op, n_threads);
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (op->op == GGML_OP_MUL_MAT) {
            const matmul alone = {&k_, op};
            multiply(&alone, 1, params);
        } else {
            multiply_experts(k_, params, op);
        }
        return true;
    }
    matrix of(const ggml_tensor * t) const { return {k_, (char *) t->data, t->ne[0]}; }
    const kernel & of_format() const { return k_; }

  private:
    const kernel & k_;
};

traits * traits_of(const ggml_tensor * weights) {
    static std::vector<traits> all = [] {
        std::vector<traits> out;
        for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
            if (const kernel * k = kernel_of((ggml_type) i)) {
                out.emplace_back(*k);
            }
        }
        return out;
    }();
    if (weights->ne[1] % COLUMNS != 0) {
        return nullptr;
    }
    for (traits & t : all) {
        if (t.of_format().type == weights->type && weights->ne[0] % t.of_format().rows->block == 0) {
            return &t;
        }
    }
    return nullptr;
}

// -- the buffer -------------------------------------------------------------------------------------------

ggml_status init_tensor(ggml_backend_buffer_t /*buffer*/, ggml_tensor * t) {
    t->extra = static_cast<ggml::cpu::tensor_traits *>(traits_of(t));
    return GGML_STATUS_SUCCESS;
}

const traits & own(const ggml_tensor * t) {
    GGML_ASSERT(t->extra && "only matrices that are multiplied lie in this buffer");
    return *static_cast<traits *>((ggml::cpu::tensor_traits *) t->extra);
}

// Whole groups of 16 columns, as a model's loader writes them, go faster than single blocks.
void set_tensor(
    ggml_backend_buffer_t /*buffer*/, ggml_tensor * t, const void * data, size_t offset, size_t n) {
    const kernel & k    = own(t).of_format();
    const matrix m      = own(t).of(t);
    const size_t column = k.column_bytes(m.n_weight), group = COLUMNS * column;
    const auto * from = (const char *) data;
    if (offset % group == 0 && n % group == 0) {
        for (size_t at = 0; at < n; at += group) {
            k.interleave(m.data + offset + at, from + at, column, column / k.file_bytes);
        }
        return;
    }
    const auto [first, size] = m.whole(offset, n);
    if (first == offset && size == n) {
        m.put(offset, n, from);
        return;
    }
    std::vector<char> blocks(size);  // any part of floats may be set
    m.get(first, size, blocks.data());
    std::memcpy(blocks.data() + (offset - first), from, n);
    m.put(first, size, blocks.data());
}

void get_tensor(
    ggml_backend_buffer_t /*buffer*/, const ggml_tensor * t, void * data, size_t offset, size_t n) {
    const matrix m           = own(t).of(t);
    const auto [first, size] = m.whole(offset, n);
    std::vector<char> blocks(size);
    m.get(first, size, blocks.data());
    std::memcpy(data, blocks.data() + (offset - first), n);
}

const char * name(ggml_backend_buffer_type_t /*type*/) {
    return "CPU_INTERLEAVED";
}

// Every round reads all of it: with pages of 2 MB the processor seldom has to look up where a page lies.
// Where the system has none to give, nothing changes.
void ask_for_large_pages(void * start, size_t size) {
#ifdef MADV_HUGEPAGE
    constexpr size_t LARGE = 2 << 20;
    const size_t page = sysconf(_SC_PAGESIZE), skip = (0 - (uintptr_t) start) % page;
    if (size >= 2 * LARGE) {
        madvise((char *) start + skip, (size - skip) / page * page, MADV_HUGEPAGE);
    }
#else
    (void) start;
    (void) size;
#endif
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer) {
        ask_for_large_pages(ggml_backend_buffer_get_base(buffer), size);
        buffer->buft              = type;
        buffer->iface.init_tensor = init_tensor;
        buffer->iface.set_tensor  = set_tensor;
        buffer->iface.get_tensor  = get_tensor;
        buffer->iface.cpy_tensor  = nullptr;
    }
    return buffer;
}

size_t alignment(ggml_backend_buffer_type_t /*type*/) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

bool lies_interleaved(const ggml_tensor * weights) {
    return weights->buffer && weights->buffer->buft == eagle3_interleaved_buffer_type();
}

class products : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t /*device*/, const ggml_tensor * op) override {
        const ggml_tensor *w = op->src[0], *x = op->src[1];
        if (!get_tensor_traits(op) || !traits_of(w) || x->type != GGML_TYPE_F32 ||
            x->nb[0] != sizeof(float) || (x->buffer && !ggml_backend_buft_is_host(x->buffer->buft))) {
            return false;
        }
        return op->op == GGML_OP_MUL_MAT ? w->ne[2] == 1 && w->ne[3] == 1 : w->ne[3] == 1 && x->ne[3] == 1;
    }
    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        const bool product    = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;
        const ggml_tensor * w = product ? op->src[0] : nullptr;
        return w && lies_interleaved(w) ? traits_of(w) : nullptr;
    }
};

bool is_off(const char * variable) {
    const char * set = std::getenv(variable);
    return set && std::strcmp(set, "0") == 0;
}

}  // namespace

const kernel * kernel_of_product(const ggml_tensor * op) {
    const bool product   = op->op == GGML_OP_MUL_MAT && lies_interleaved(op->src[0]);
    const traits * found = product ? traits_of(op->src[0]) : nullptr;
    return found ? &found->of_format() : nullptr;
}

}  // namespace eagle3::kernels

ggml_backend_buffer_type_t eagle3_interleaved_buffer_type(void) {
    using namespace eagle3::kernels;
    static products context;
    static ggml_backend_buffer_type type = {
        /* .iface   = */ {name, allocate, alignment, /* .get_max_size = */ nullptr,
            /* .get_alloc_size = */ nullptr, /* .is_host = */ nullptr},
        /* .device  = */ ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        /* .context = */ &context,
    };
    static const bool is_wanted = EAGLE3_LANES && !is_off("EAGLE3_LLAMA_INTERLEAVE");
    return is_wanted ? &type : nullptr;
}

bool eagle3_amx_is_wanted(void) {
    return !eagle3::kernels::is_off("EAGLE3_LLAMA_AMX");
}
