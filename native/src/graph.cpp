#include "graph.hpp"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace eagle3 {

namespace {

constexpr int    KV_PAD     = 256;  // a graph serves this many positions before the next one is built
constexpr size_t MAX_BUILT  = 48;
constexpr int    GRAPH_SIZE = 128;

int pad(int n, int to) {
    return (n + to - 1) / to * to;
}

// by probability, then by id; insertion, as k is small
void sort_best(int32_t * ids, float * probs, int k) {
    for (int i = 1; i < k; ++i) {
        for (int j = i; j > 0 && (probs[j] > probs[j - 1] || (probs[j] == probs[j - 1] && ids[j] < ids[j - 1])); --j) {
            std::swap(probs[j], probs[j - 1]);
            std::swap(ids[j], ids[j - 1]);
        }
    }
}

} // namespace

struct runner::built {
    pass_shape             shape;
    uint64_t               used = 0;
    ggml_context_ptr       ctx;
    ggml_cgraph *          graph = nullptr;
    ggml_backend_sched_ptr sched;
    ggml_tensor *tokens = nullptr, *x = nullptr, *pos = nullptr, *cells = nullptr, *mask = nullptr;    // inputs
    ggml_tensor *g = nullptr, *prenorm = nullptr, *logits = nullptr, *ids = nullptr, *probs = nullptr;  // outputs
};

runner::runner(const head & h, int n_slots, int n_ctx, int n_threads) :
    h_(h), n_slots_(n_slots), n_ctx_(pad(n_ctx, KV_PAD)) {
    if (ggml_backend_dev_type(h.device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        backends_.emplace_back(ggml_backend_dev_init(h.device, nullptr));
    }
    backends_.emplace_back(ggml_backend_cpu_init());
    for (const auto & b : backends_) {
        require(b != nullptr, EAGLE3_E_MEMORY, "cannot start the head's backend");
    }
    // the target's number of threads: then OpenMP has one team for both
    ggml_backend_cpu_set_n_threads(backends_.back().get(), n_threads);

    ggml_init_params params = {2 * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true};
    cache_ctx_.reset(ggml_init(params));
    k_ = ggml_new_tensor_2d(cache_ctx_.get(), GGML_TYPE_F16, h.n_embd_kv(), (int64_t) n_slots * n_ctx_);
    v_ = ggml_new_tensor_2d(cache_ctx_.get(), GGML_TYPE_F16, h.n_embd_kv(), (int64_t) n_slots * n_ctx_);
    cache_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(cache_ctx_.get(), ggml_backend_dev_buffer_type(h.device)));
    require(cache_buffer_ != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's cache");
    ggml_backend_buffer_clear(cache_buffer_.get(), 0);  // masked cells are read too
}

runner::~runner() = default;

// heads.md's equations, one line each
void runner::build(built & b) const {
    const pass_shape & s = b.shape;
    ggml_context * ctx = b.ctx.get();
    ggml_cgraph *  gf  = b.graph = ggml_new_graph_custom(ctx, GRAPH_SIZE, false);
    const int n_embd = h_.n_embd, d = h_.n_embd_head;

    auto input = [&](ggml_tensor * t) { ggml_set_input(t); return t; };
    auto norm  = [&](ggml_tensor * t, ggml_tensor * w) { return ggml_mul(ctx, ggml_rms_norm(ctx, t, h_.norm_eps), w); };
    auto last  = [&](ggml_tensor * t, int n) {  // the last n rows of [ne0, n_rows]
        return n == s.n_rows ? t : ggml_view_2d(ctx, t, t->ne[0], n, t->nb[1], (s.n_rows - n) * t->nb[1]);
    };
    auto rope  = [&](ggml_tensor * t, ggml_tensor * pos) {
        const rope_params & r = h_.rope;
        return ggml_rope_ext(ctx, t, pos, h_.rope_freqs, r.n_dims, GGML_ROPE_TYPE_NORMAL, r.n_ctx_orig, r.freq_base,
                             r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow);
    };

    b.tokens = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, s.n_rows));
    b.x      = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.features ? h_.n_features() : n_embd, s.n_rows));
    b.pos    = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, s.n_rows));
    b.cells  = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, s.n_rows));

    ggml_tensor * g = b.x;
    if (s.features) {
        g = ggml_mul_mat(ctx, h_.fc, h_.fc_norm ? norm(g, h_.fc_norm) : g);
    }
    ggml_tensor * e  = ggml_get_rows(ctx, h_.tok_embd, b.tokens);
    ggml_tensor * gn = norm(g, h_.hidden_norm);
    ggml_tensor * u  = ggml_concat(ctx, norm(e, h_.attn_norm), gn, 0);  // [2 n_embd, n_rows]

    // keys and values of every row
    ggml_tensor * k = ggml_reshape_3d(ctx, ggml_mul_mat(ctx, h_.wk, u), d, h_.n_head_kv, s.n_rows);
    ggml_tensor * v = ggml_mul_mat(ctx, h_.wv, u);
    k = ggml_reshape_2d(ctx, rope(k, b.pos), h_.n_embd_kv(), s.n_rows);
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, k_, k, b.cells));
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, v_, v, b.cells));
    if (s.n_out == 0) {
        return;
    }

    // the rest for the rows asked for: there is one layer, nobody reads the others
    ggml_tensor * pos_out = s.n_out == s.n_rows ? b.pos :
        ggml_view_1d(ctx, b.pos, s.n_out, (s.n_rows - s.n_out) * ggml_element_size(b.pos));
    ggml_tensor * q = ggml_reshape_3d(ctx, ggml_mul_mat(ctx, h_.wq, last(u, s.n_out)), d, h_.n_head, s.n_out);
    q = ggml_permute(ctx, rope(q, pos_out), 0, 2, 1, 3);  // [d, n_out, n_head]

    auto cache = [&](ggml_tensor * t) {  // [d, n_kv, n_head_kv]
        return ggml_view_3d(ctx, t, d, s.n_kv, h_.n_head_kv, t->nb[1], ggml_row_size(t->type, d),
                            (size_t) s.slot * n_ctx_ * t->nb[1]);
    };
    b.mask = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F16, s.n_kv, s.n_out));
    ggml_tensor * attn = ggml_flash_attn_ext(ctx, q, cache(k_), cache(v_), b.mask, 1.0f / std::sqrt((float) d), 0.0f, 0.0f);
    ggml_prec_set_acc(attn, GGML_PREC_F32);
    attn = ggml_reshape_2d(ctx, attn, d * h_.n_head, s.n_out);

    ggml_tensor * h = ggml_add(ctx, ggml_mul_mat(ctx, h_.wo, attn), last(h_.norm_before_residual ? gn : g, s.n_out));
    ggml_tensor * f = norm(h, h_.ffn_norm);
    f = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, h_.ffn_gate, f), ggml_mul_mat(ctx, h_.ffn_up, f));
    h = ggml_add(ctx, h, ggml_mul_mat(ctx, h_.ffn_down, f));

    b.g       = last(g, s.n_out);
    b.prenorm = h;
    b.logits  = ggml_mul_mat(ctx, h_.output, norm(h, h_.output_norm));
    ggml_set_output(g);
    ggml_set_output(b.prenorm);
    if (s.k == 0) {
        ggml_set_output(b.logits);
        ggml_build_forward_expand(gf, b.logits);
        return;
    }
    b.ids = s.k == 1 ? ggml_reshape_2d(ctx, ggml_argmax(ctx, b.logits), 1, s.n_out) : ggml_top_k(ctx, b.logits, s.k);  // [k, n_out]
    b.probs = ggml_get_rows(ctx, ggml_reshape_3d(ctx, ggml_soft_max(ctx, b.logits), 1, h_.n_vocab, s.n_out), b.ids);  // [1, k, n_out]
    ggml_set_output(b.ids);
    ggml_set_output(b.probs);
    ggml_build_forward_expand(gf, b.probs);
}

runner::built & runner::get(const pass_shape & shape) {
    for (auto & b : built_) {
        if (b->shape == shape) {
            b->used = ++clock_;
            return *b;
        }
    }
    if (built_.size() >= MAX_BUILT) {
        built_.erase(std::min_element(built_.begin(), built_.end(), [](auto & a, auto & b) { return a->used < b->used; }));
    }

    auto b = std::make_unique<built>();
    b->shape = shape;
    b->used  = ++clock_;
    ggml_init_params params = {ggml_tensor_overhead() * GRAPH_SIZE + ggml_graph_overhead_custom(GRAPH_SIZE, false),
                               nullptr, /*.no_alloc =*/ true};
    b->ctx.reset(ggml_init(params));
    build(*b);

    std::vector<ggml_backend_t> backends;
    for (const auto & backend : backends_) {
        backends.push_back(backend.get());
    }
    b->sched.reset(ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), GRAPH_SIZE, false, true));
    require(b->sched && ggml_backend_sched_alloc_graph(b->sched.get(), b->graph), EAGLE3_E_MEMORY,
            format("not enough memory for a pass of %d rows over the head", shape.n_rows));
    built_.push_back(std::move(b));
    return *built_.back();
}

void runner::set_inputs(const built & b, const pass & p) {
    auto set = [](ggml_tensor * t, const void * data) {
        if (t->buffer) {  // an input that nothing reads has none
            ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
        }
    };
    pos_.resize(p.n);
    cells_.resize(p.n);
    for (int r = 0; r < p.n; ++r) {
        pos_[r]   = p.pos + (p.depth ? p.depth[r] : r);
        cells_[r] = (int64_t) p.slot * n_ctx_ + p.pos + (p.cell ? p.cell[r] : r);
    }
    set(b.tokens, p.tokens);
    set(b.x, p.x);
    set(b.pos, pos_.data());
    set(b.cells, cells_.data());
    if (!b.mask) {
        return;
    }

    const int n_kv = b.shape.n_kv;
    mask_.assign((size_t) n_kv * p.n_out, ggml_fp32_to_fp16(-INFINITY));
    for (int r = 0; r < p.n_out; ++r) {
        ggml_fp16_t * row = mask_.data() + (size_t) r * n_kv;
        if (!p.path) {
            std::fill(row + p.from, row + p.pos + p.n - p.n_out + r + 1, ggml_fp32_to_fp16(0.0f));
            continue;
        }
        std::fill(row + p.from, row + p.pos, ggml_fp32_to_fp16(0.0f));
        for (int i = 0; i < p.n_cells; ++i) {
            if ((p.path[r] >> i) & 1) {
                row[p.pos + i] = ggml_fp32_to_fp16(0.0f);
            }
        }
    }
    set(b.mask, mask_.data());
}

void runner::run(const pass & p) {
    const int n_cells = p.path ? p.n_cells : p.n;
    require(p.slot >= 0 && p.slot < n_slots_ && p.n >= 1 && p.n_out <= p.n && p.pos >= 0 && p.pos + n_cells <= n_ctx_,
            EAGLE3_E_ARGUMENT, format("a pass of %d rows at position %d does not fit into %d cells", n_cells, p.pos, n_ctx_));

    pass_shape shape;
    shape.slot     = p.slot;
    shape.n_rows   = p.n;
    shape.n_out    = p.n_out;
    shape.n_kv     = p.n_out ? pad(p.pos + n_cells, KV_PAD) : 0;
    shape.k        = p.n_out ? p.k : 0;
    shape.features = p.features;
    built & b = get(shape);

    set_inputs(b, p);
    require(ggml_backend_sched_graph_compute(b.sched.get(), b.graph) == GGML_STATUS_SUCCESS, EAGLE3_E_INTERNAL,
            "the head's graph failed");

    auto read = [](ggml_tensor * t, void * out) {
        if (out) {
            ggml_backend_tensor_get(t, out, 0, ggml_nbytes(t));
        }
    };
    if (p.n_out) {
        read(b.g, p.g);
        read(b.prenorm, p.prenorm);
        read(b.logits, p.k ? nullptr : p.logits);
    }
    if (p.n_out && p.k) {
        read(b.ids, p.ids);
        read(b.probs, p.probs);
        for (int r = 0; r < p.n_out; ++r) {
            sort_best(p.ids + r * p.k, p.probs + r * p.k, p.k);
        }
    }
}

size_t runner::cells_size(int from, int to) const {
    return 2 * (size_t) (to - from) * k_->nb[1];
}

void runner::cells_get(int slot, int from, int to, uint8_t * out) const {
    const size_t n = cells_size(from, to) / 2, offset = ((size_t) slot * n_ctx_ + from) * k_->nb[1];
    if (n) {
        ggml_backend_tensor_get(k_, out, offset, n);
        ggml_backend_tensor_get(v_, out + n, offset, n);
    }
}

void runner::cells_set(int slot, int from, int to, const uint8_t * data) {
    const size_t n = cells_size(from, to) / 2, offset = ((size_t) slot * n_ctx_ + from) * k_->nb[1];
    if (n) {
        ggml_backend_tensor_set(k_, data, offset, n);
        ggml_backend_tensor_set(v_, data + n, offset, n);
    }
}

} // namespace eagle3
