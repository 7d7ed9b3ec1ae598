#include "attention/units.hpp"

namespace eagle3::kernels::attention {

namespace {

// Quantised heads are of whole blocks, and so of whole registers.
bool is_widened(const ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 || ggml_get_type_traits(x->type)->to_float != nullptr;
}

}  // namespace

attend attend_of(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    if (!is_widened(k) || !is_widened(v) || q->type != GGML_TYPE_F32 || k->ne[2] != v->ne[2] ||
        k->ne[3] != v->ne[3] || (mask && mask->ne[2] != 1)) {
        return nullptr;
    }
    if (k->ne[0] == v->ne[0]) {
        switch (k->ne[0]) {
        case 64:
            return attend_64;
        case 80:
            return attend_80;
        case 96:
            return attend_96;
        case 128:
            return attend_128;
        case 256:
            return attend_256;
        }
    }
    return attend_any;
}

}  // namespace eagle3::kernels::attention
