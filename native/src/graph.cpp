#include "graph.hpp"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace eagle3 {

namespace {

constexpr int    KV_PAD     = 256;  // a graph serves this many positions before the next one is built
constexpr size_t MAX_BUILT  = 48;
constexpr int    GRAPH_SIZE = 64;  // nodes, and as many again for each decoder layer

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
    ggml_tensor *g = nullptr, *state = nullptr, *logits = nullptr, *ids = nullptr, *probs = nullptr;  // outputs
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

    ggml_init_params params = {2 * h.blocks.size() * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true};
    cache_ctx_.reset(ggml_init(params));
    for (size_t i = 0; i < h.blocks.size(); ++i) {
        auto cells = [&] { return ggml_new_tensor_2d(cache_ctx_.get(), GGML_TYPE_F16, h.n_embd_kv(), (int64_t) n_slots * n_ctx_); };
        ggml_tensor * k = cells();
        cache_.push_back({k, cells()});
    }
    cache_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(cache_ctx_.get(), ggml_backend_dev_buffer_type(h.device)));
    require(cache_buffer_ != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's cache");
    ggml_backend_buffer_clear(cache_buffer_.get(), 0);  // masked cells are read too
}

runner::~runner() = default;

// A graph's parts, one function each, in the order of the forward pass.
struct runner::builder {
    const runner & r;
    built &        b;
    const head &   h     = r.h_;
    ggml_context * ctx   = b.ctx.get();
    ggml_cgraph *  gf    = b.graph;
    int            n_out = b.shape.n_out, n_rows = b.shape.n_rows;

    static ggml_tensor * input(ggml_tensor * t) {
        ggml_set_input(t);
        return t;
    }

    ggml_tensor * norm(ggml_tensor * t, ggml_tensor * w, float eps) const { return ggml_mul(ctx, ggml_rms_norm(ctx, t, eps), w); }
    ggml_tensor * norm(ggml_tensor * t, ggml_tensor * w) const { return norm(t, w, h.norm_eps); }

    ggml_tensor * product(ggml_tensor * w, ggml_tensor * t, ggml_tensor * bias = nullptr) const {
        t = ggml_mul_mat(ctx, w, t);
        return bias ? ggml_add(ctx, t, bias) : t;
    }

    // the last n rows of [ne0, n_rows]
    ggml_tensor * last(ggml_tensor * t, int n) const {
        return t->ne[1] == n ? t : ggml_view_2d(ctx, t, t->ne[0], n, t->nb[1], (t->ne[1] - n) * t->nb[1]);
    }

    // a stage that a trace may ask for
    ggml_tensor * stage(ggml_tensor * t, const char * name, int layer = -1) const {
        if (b.shape.traced) {
            layer < 0 ? ggml_set_name(t, name) : ggml_format_name(t, "%s-%d", name, layer);
            ggml_set_output(t);
            ggml_build_forward_expand(gf, t);
        }
        return t;
    }

    // [n_heads * d, n] -> [d, n_heads, n], normed if w is there, at the positions of its rows
    ggml_tensor * rotated(ggml_tensor * t, ggml_tensor * w, int n_heads) const {
        const int n = (int) t->ne[1];
        ggml_tensor * pos = n == n_rows ? b.pos : ggml_view_1d(ctx, b.pos, n, (n_rows - n) * ggml_element_size(b.pos));
        const rope_params & p = h.rope;
        t = ggml_reshape_3d(ctx, t, h.n_embd_head, n_heads, n);
        return ggml_rope_ext(ctx, w ? norm(t, w) : t, pos, h.rope_freqs, p.n_dims, GGML_ROPE_TYPE_NORMAL, p.n_ctx_orig, p.freq_base,
                             p.freq_scale, p.ext_factor, p.attn_factor, p.beta_fast, p.beta_slow);
    }

    // target features -> g
    ggml_tensor * fuse(ggml_tensor * x) const {
        if (h.fc_norm) {
            x = ggml_reshape_3d(ctx, x, h.n_embd_target, (int64_t) h.layers.size(), n_rows);
            x = ggml_reshape_2d(ctx, norm(x, h.fc_norm), h.n_features(), n_rows);
        }
        if (h.input_norm) {
            x = norm(x, h.input_norm);
        }
        if (h.feature_norm) {
            x = norm(x, h.feature_norm, h.feature_norm_eps);
        }
        return h.fc ? product(h.fc, x, h.fc_bias) : x;
    }

    // A decoder layer: cur is [n_embd, n_rows], e the tokens' embeddings. Its keys and values always, the rest for the
    // last n rows: the last layer's others are read by nobody.
    ggml_tensor * layer(int il, ggml_tensor * cur, ggml_tensor * e, int n) const {
        const block & w = h.blocks[il];
        ggml_tensor * u = cur, * residual = cur;
        if (w.hidden_norm) {
            ggml_tensor * gn = norm(cur, w.hidden_norm);
            residual = h.norm_before_residual ? gn : cur;
            u = ggml_concat(ctx, norm(e, w.attn_norm), gn, 0);  // [2 n_embd, n_rows]
        } else if (w.attn_norm) {
            u = norm(cur, w.attn_norm);
        }
        stage(u, "attn_in", il);

        ggml_tensor * k = rotated(product(w.wk, u, w.bk), w.k_norm, h.n_head_kv);
        ggml_tensor * v = product(w.wv, u, w.bv);
        k = ggml_reshape_2d(ctx, k, h.n_embd_kv(), n_rows);
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.cache_[il].k, k, b.cells));
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.cache_[il].v, v, b.cells));
        if (n == 0) {
            return nullptr;
        }

        ggml_tensor * q = ggml_permute(ctx, rotated(product(w.wq, last(u, n), w.bq), w.q_norm, h.n_head), 0, 2, 1, 3);  // [d, n, n_head]
        ggml_tensor * attn = ggml_flash_attn_ext(ctx, q, cached(r.cache_[il].k), cached(r.cache_[il].v), last(b.mask, n),
                                                 1.0f / std::sqrt((float) h.n_embd_head), 0.0f, 0.0f);
        ggml_prec_set_acc(attn, GGML_PREC_F32);
        attn = product(w.wo, ggml_reshape_2d(ctx, attn, h.n_embd_head * h.n_head, n), w.bo);
        cur  = ggml_add(ctx, stage(attn, "attn_out", il), last(residual, n));

        ggml_tensor * f = norm(cur, w.ffn_norm);
        f = ggml_swiglu_split(ctx, product(w.ffn_gate, f, w.b_gate), product(w.ffn_up, f, w.b_up));
        f = product(w.ffn_down, f, w.b_down);
        return ggml_add(ctx, cur, stage(f, "ffn_out", il));
    }

    ggml_tensor * cached(ggml_tensor * t) const {  // [d, n_kv, n_head_kv]
        return ggml_view_3d(ctx, t, h.n_embd_head, b.shape.n_kv, h.n_head_kv, t->nb[1], ggml_row_size(t->type, h.n_embd_head),
                            (size_t) b.shape.slot * r.n_ctx_ * t->nb[1]);
    }

    void build() const {
        const pass_shape & s = b.shape;
        const int n_layer = (int) h.blocks.size();
        b.tokens = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows));
        b.x      = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.features ? h.n_features() : h.n_embd, n_rows));
        b.pos    = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows));
        b.cells  = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows));
        if (s.n_mask()) {
            b.mask = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F16, s.n_kv, s.n_mask()));
        }

        ggml_tensor * g   = stage(s.features ? fuse(b.x) : b.x, "g");
        ggml_tensor * e   = ggml_get_rows(ctx, h.tok_embd, b.tokens);
        ggml_tensor * cur = h.embd_fc ? product(h.embd_fc, ggml_concat(ctx, e, g, 0), h.embd_fc_bias) : g;
        for (int il = 0; il < n_layer; ++il) {
            cur = layer(il, cur, e, il + 1 < n_layer ? n_rows : n_out);
        }
        if (n_out == 0) {
            return;
        }
        ggml_tensor * out = h.output_norm ? norm(stage(cur, "prenorm"), h.output_norm) : stage(cur, "prenorm");
        b.g      = last(g, n_out);
        b.state  = h.norm_output ? out : cur;
        b.logits = ggml_mul_mat(ctx, h.output, out);
        ggml_set_output(g);
        ggml_set_output(b.state);
        if (s.k == 0) {
            ggml_set_output(b.logits);
            ggml_build_forward_expand(gf, b.logits);
            return;
        }
        b.ids = s.k == 1 ? ggml_reshape_2d(ctx, ggml_argmax(ctx, b.logits), 1, n_out) : ggml_top_k(ctx, b.logits, s.k);  // [k, n_out]
        b.probs = ggml_get_rows(ctx, ggml_reshape_3d(ctx, ggml_soft_max(ctx, b.logits), 1, h.n_vocab, n_out), b.ids);  // [1, k, n_out]
        ggml_set_output(b.ids);
        ggml_set_output(b.probs);
        ggml_build_forward_expand(gf, b.probs);
    }
};

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
    const size_t size = GRAPH_SIZE * (1 + h_.blocks.size());
    ggml_init_params params = {ggml_tensor_overhead() * size + ggml_graph_overhead_custom(size, false), nullptr, /*.no_alloc =*/ true};
    b->ctx.reset(ggml_init(params));
    b->graph = ggml_new_graph_custom(b->ctx.get(), size, false);
    builder{*this, *b}.build();

    std::vector<ggml_backend_t> backends;
    for (const auto & backend : backends_) {
        backends.push_back(backend.get());
    }
    b->sched.reset(ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), size, false, true));
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

    const int n_kv = b.shape.n_kv, n_mask = b.shape.n_mask();
    mask_.assign((size_t) n_kv * n_mask, ggml_fp32_to_fp16(-INFINITY));
    for (int i = 0; i < n_mask; ++i) {
        const int r = p.n - n_mask + i;
        ggml_fp16_t * row = mask_.data() + (size_t) i * n_kv;
        if (!p.path) {
            std::fill(row + p.from, row + p.pos + r + 1, ggml_fp32_to_fp16(0.0f));
            continue;
        }
        std::fill(row + p.from, row + p.pos, ggml_fp32_to_fp16(0.0f));
        for (int c = 0; c < p.n_cells; ++c) {
            if ((p.path[r] >> c) & 1) {
                row[p.pos + c] = ggml_fp32_to_fp16(0.0f);
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
    shape.n_layer  = (int) h_.blocks.size();
    shape.n_kv     = shape.n_mask() ? pad(p.pos + n_cells, KV_PAD) : 0;
    shape.k        = p.n_out ? p.k : 0;
    shape.features = p.features;
    shape.traced   = p.stage != nullptr;
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
        read(b.state, p.state);
        read(b.logits, p.k ? nullptr : p.logits);
    }
    if (p.stage) {
        ggml_tensor * t = ggml_get_tensor(b.ctx.get(), p.stage);
        require(t != nullptr, EAGLE3_E_ARGUMENT, format("this head has no stage %.40s", p.stage));
        p.stage_out->resize(ggml_nelements(t));
        read(t, p.stage_out->data());
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
    return 2 * cache_.size() * (size_t) (to - from) * cache_[0].k->nb[1];
}

// f(keys or values of a layer, offset, bytes) for each region that holds the rows [from, to) of a slot
template <typename F> void runner::each_region(int slot, int from, int to, F && f) const {
    const size_t row = cache_[0].k->nb[1], n = (size_t) (to - from) * row, offset = ((size_t) slot * n_ctx_ + from) * row;
    for (const cache & c : cache_) {
        for (ggml_tensor * t : {c.k, c.v}) {
            if (n) {
                f(t, offset, n);
            }
        }
    }
}

void runner::cells_get(int slot, int from, int to, uint8_t * out) const {
    each_region(slot, from, to, [&](ggml_tensor * t, size_t offset, size_t n) {
        ggml_backend_tensor_get(t, out, offset, n);
        out += n;
    });
}

void runner::cells_set(int slot, int from, int to, const uint8_t * data) {
    each_region(slot, from, to, [&](ggml_tensor * t, size_t offset, size_t n) {
        ggml_backend_tensor_set(t, data, offset, n);
        data += n;
    });
}

} // namespace eagle3
