#include "graph.hpp"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace eagle3 {

namespace {

constexpr int KV_PAD       = 256;  // a graph serves this many positions before the next one is built
constexpr size_t MAX_BUILT = 64;
constexpr int GRAPH_SIZE   = 64;  // nodes, and as many again for each decoder layer

int pad(int n, int to) {
    return (n + to - 1) / to * to;
}

// by probability, then by id; insertion, as k is small
void sort_best(int32_t * ids, float * probs, int k) {
    for (int i = 1; i < k; ++i) {
        for (int j = i;
            j > 0 && (probs[j] > probs[j - 1] || (probs[j] == probs[j - 1] && ids[j] < ids[j - 1])); --j) {
            std::swap(probs[j], probs[j - 1]);
            std::swap(ids[j], ids[j - 1]);
        }
    }
}

}  // namespace

// What some of the rows need to attend: their positions, what they see, and, for rows of several slots, the
// row in each place of the rectangle and each row's place.
struct runner::attention {
    ggml_tensor *pos = nullptr, *mask = nullptr, *row = nullptr, *place = nullptr;
};

struct runner::built {
    pass_shape shape;
    uint64_t used = 0;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    ggml_backend_sched_ptr sched;
    ggml_tensor *tokens = nullptr, *x = nullptr, *pos = nullptr, *cells = nullptr,
                *out_rows = nullptr;  // inputs
    attention inner, last;            // of all rows, in the layers before the last one; of those with outputs
    ggml_tensor *g = nullptr, *state = nullptr, *logits = nullptr, *ids = nullptr,
                *probs = nullptr;  // outputs
};

runner::runner(const head & h, int n_slots, int n_ctx, int n_threads)
    : h_(h), n_slots_(n_slots), n_ctx_(pad(n_ctx, KV_PAD)) {
    if (ggml_backend_dev_type(h.device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        backends_.emplace_back(ggml_backend_dev_init(h.device, nullptr));
    }
    backends_.emplace_back(ggml_backend_cpu_init());
    for (const auto & b : backends_) {
        require(b != nullptr, EAGLE3_E_MEMORY, "cannot start the head's backend");
    }
    // the target's number of threads: then OpenMP has one team for both
    ggml_backend_cpu_set_n_threads(backends_.back().get(), n_threads);

    ggml_init_params params = {2 * h.blocks.size() * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/true};
    cache_ctx_.reset(ggml_init(params));
    require(cache_ctx_ != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's cache");
    for (size_t i = 0; i < h.blocks.size(); ++i) {
        auto cells = [&] {
            return ggml_new_tensor_2d(
                cache_ctx_.get(), GGML_TYPE_F16, h.n_embd_kv(), (int64_t) n_slots * n_ctx_);
        };
        ggml_tensor * k = cells();
        cache_.push_back({k, cells()});
    }
    cache_buffer_.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(cache_ctx_.get(), ggml_backend_dev_buffer_type(h.device)));
    require(cache_buffer_ != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's cache");
    ggml_backend_buffer_clear(cache_buffer_.get(), 0);  // masked cells are read too
}

runner::~runner() = default;

// A graph's parts, one function each, in the order of the forward pass.
struct runner::builder {
    const runner & r;
    built & b;
    const head & h     = r.h_;
    ggml_context * ctx = b.ctx.get();
    ggml_cgraph * gf   = b.graph;
    int n_out = b.shape.out.n, n_rows = b.shape.rows.n;

    static ggml_tensor * input(ggml_tensor * t) {
        ggml_set_input(t);
        return t;
    }

    ggml_tensor * norm(ggml_tensor * t, ggml_tensor * w, float eps) const {
        return ggml_mul(ctx, ggml_rms_norm(ctx, t, eps), w);
    }
    ggml_tensor * norm(ggml_tensor * t, ggml_tensor * w) const { return norm(t, w, h.norm_eps); }

    ggml_tensor * product(ggml_tensor * w, ggml_tensor * t, ggml_tensor * bias = nullptr) const {
        t = ggml_mul_mat(ctx, w, t);
        return bias ? ggml_add(ctx, t, bias) : t;
    }

    // of [ne0, n_rows], the rows with outputs
    ggml_tensor * outs(ggml_tensor * t) const {
        if (!b.shape.out_last) {
            return ggml_get_rows(ctx, t, b.out_rows);
        }
        return n_out == n_rows ? t
                               : ggml_view_2d(ctx, t, t->ne[0], n_out, t->nb[1], (n_rows - n_out) * t->nb[1]);
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
    ggml_tensor * rotated(ggml_tensor * t, ggml_tensor * w, int n_heads, ggml_tensor * pos) const {
        const rope_params & p = h.rope;
        t                     = ggml_reshape_3d(ctx, t, h.n_embd_head, n_heads, t->ne[1]);
        return ggml_rope_ext(ctx, w ? norm(t, w) : t, pos, h.rope_freqs, p.n_dims, GGML_ROPE_TYPE_NORMAL,
            p.n_ctx_orig, p.freq_base, p.freq_scale, p.ext_factor, p.attn_factor, p.beta_fast, p.beta_slow);
    }

    // q: [d, n_head, n] -> [d * n_head, n]
    ggml_tensor * attend(int il, ggml_tensor * q, const attention & a) const {
        const int64_t width = (int64_t) h.n_embd_head * h.n_head, n_slots = b.shape.n_slots;
        if (a.row) {
            q = ggml_get_rows(ctx, ggml_reshape_2d(ctx, q, width, q->ne[2]), a.row);
            q = ggml_reshape_4d(ctx, q, h.n_embd_head, h.n_head, q->ne[1] / n_slots, n_slots);
        }
        q               = ggml_permute(ctx, q, 0, 2, 1, 3);  // [d, n, n_head, n_slots]
        ggml_tensor * t = ggml_flash_attn_ext(ctx, q, cached(r.cache_[il].k), cached(r.cache_[il].v), a.mask,
            1.0f / std::sqrt((float) h.n_embd_head), 0.0f, 0.0f);
        ggml_prec_set_acc(t, GGML_PREC_F32);
        t = ggml_reshape_2d(ctx, t, width, t->ne[2] * t->ne[3]);
        return a.place ? ggml_get_rows(ctx, t, a.place) : t;
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

    // A decoder layer: cur is [n_embd, n_rows], e the tokens' embeddings. Its keys and values always; of the
    // last layer the rest only for the rows with outputs.
    ggml_tensor * layer(int il, ggml_tensor * cur, ggml_tensor * e, bool is_last) const {
        const block & w = h.blocks[il];
        ggml_tensor *u = cur, *residual = cur;
        if (w.hidden_norm) {
            ggml_tensor * gn = norm(cur, w.hidden_norm);
            residual         = h.norm_before_residual ? gn : cur;
            u                = ggml_concat(ctx, norm(e, w.attn_norm), gn, 0);  // [2 n_embd, n_rows]
        } else if (w.attn_norm) {
            u = norm(cur, w.attn_norm);
        }
        stage(u, "attn_in", il);

        ggml_tensor * k = rotated(product(w.wk, u, w.bk), w.k_norm, h.n_head_kv, b.pos);
        ggml_tensor * v = product(w.wv, u, w.bv);
        k               = ggml_reshape_2d(ctx, k, h.n_embd_kv(), n_rows);
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.cache_[il].k, k, b.cells));
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.cache_[il].v, v, b.cells));
        if (is_last && n_out == 0) {
            return nullptr;
        }

        const attention & a = is_last ? b.last : b.inner;
        ggml_tensor * q     = rotated(product(w.wq, is_last ? outs(u) : u, w.bq), w.q_norm, h.n_head, a.pos);
        ggml_tensor * attn  = product(w.wo, attend(il, q, a), w.bo);
        cur                 = ggml_add(ctx, stage(attn, "attn_out", il), is_last ? outs(residual) : residual);

        ggml_tensor * f = norm(cur, w.ffn_norm);
        f = ggml_swiglu_split(ctx, product(w.ffn_gate, f, w.b_gate), product(w.ffn_up, f, w.b_up));
        f = product(w.ffn_down, f, w.b_down);
        return ggml_add(ctx, cur, stage(f, "ffn_out", il));
    }

    ggml_tensor * cached(ggml_tensor * t) const {  // [d, n_kv, n_head_kv, n_slots]
        return ggml_view_4d(ctx, t, h.n_embd_head, b.shape.n_kv, h.n_head_kv, b.shape.n_slots, t->nb[1],
            ggml_row_size(t->type, h.n_embd_head), (size_t) r.n_ctx_ * t->nb[1],
            (size_t) b.shape.slot * r.n_ctx_ * t->nb[1]);
    }

    ggml_tensor * ids(int64_t n) const { return input(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n)); }

    attention attention_of(const row_layout & l) const {
        const pass_shape & s = b.shape;
        attention a;
        a.pos  = ids(l.n);
        a.mask = input(ggml_new_tensor_4d(ctx, GGML_TYPE_F16, s.n_kv, l.most, 1, s.n_slots));
        if (s.n_slots > 1) {
            a.row   = ids((int64_t) l.most * s.n_slots);
            a.place = ids(l.n);
        }
        return a;
    }

    void build() const {
        const pass_shape & s = b.shape;
        const int n_layer    = (int) h.blocks.size();
        b.tokens             = ids(n_rows);
        b.pos                = ids(n_rows);
        b.x = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.features ? h.n_features() : h.n_embd, n_rows));
        b.cells = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows));
        if (n_layer > 1) {
            b.inner = attention_of(s.rows);
        }
        if (n_out > 0) {
            b.last = attention_of(s.out);
        }
        if (!s.out_last) {
            b.out_rows = ids(n_out);
        }

        ggml_tensor * g   = stage(s.features ? fuse(b.x) : b.x, "g");
        ggml_tensor * e   = ggml_get_rows(ctx, h.tok_embd, b.tokens);
        ggml_tensor * cur = h.embd_fc ? product(h.embd_fc, ggml_concat(ctx, e, g, 0), h.embd_fc_bias) : g;
        for (int il = 0; il < n_layer; ++il) {
            cur = layer(il, cur, e, il + 1 == n_layer);
        }
        if (n_out == 0) {
            return;
        }
        ggml_tensor * out =
            h.output_norm ? norm(stage(cur, "prenorm"), h.output_norm) : stage(cur, "prenorm");
        b.g      = s.out_last ? outs(g) : nullptr;
        b.state  = h.norm_output ? out : cur;
        b.logits = ggml_mul_mat(ctx, h.output, out);
        ggml_set_output(g);
        ggml_set_output(b.state);
        if (s.k == 0) {
            ggml_set_output(b.logits);
            ggml_build_forward_expand(gf, b.logits);
            return;
        }
        b.ids   = s.k == 1 ? ggml_reshape_2d(ctx, ggml_argmax(ctx, b.logits), 1, n_out)
                           : ggml_top_k(ctx, b.logits, s.k);  // [k, n_out]
        b.probs = ggml_get_rows(ctx, ggml_reshape_3d(ctx, ggml_soft_max(ctx, b.logits), 1, h.n_vocab, n_out),
            b.ids);  // [1, k, n_out]
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
        built_.erase(std::min_element(
            built_.begin(), built_.end(), [](auto & a, auto & b) { return a->used < b->used; }));
    }

    auto b                  = std::make_unique<built>();
    b->shape                = shape;
    b->used                 = ++clock_;
    const size_t size       = GRAPH_SIZE * (1 + h_.blocks.size());
    ggml_init_params params = {ggml_tensor_overhead() * size + ggml_graph_overhead_custom(size, false),
        nullptr, /*.no_alloc =*/true};
    b->ctx.reset(ggml_init(params));
    require(b->ctx != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's graph");
    b->graph = ggml_new_graph_custom(b->ctx.get(), size, false);
    builder{*this, *b}.build();

    std::vector<ggml_backend_t> backends;
    for (const auto & backend : backends_) {
        backends.push_back(backend.get());
    }
    b->sched.reset(
        ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), size, false, true));
    require(b->sched && ggml_backend_sched_alloc_graph(b->sched.get(), b->graph), EAGLE3_E_MEMORY,
        format("not enough memory for a pass of %d rows over the head", shape.rows.n));
    built_.push_back(std::move(b));
    return *built_.back();
}

std::vector<pass_row> pass::chain(int slot, const int32_t * tokens, int pos, int from, int n, int n_out) {
    std::vector<pass_row> rows(n);
    for (int i = 0; i < n; ++i) {
        pass_row & r = rows[i];
        r.slot       = slot;
        r.token      = tokens[i];
        r.pos = r.cell = pos + i;
        r.from         = from;
        r.base         = pos + i + 1;
        r.out          = i >= n - n_out;
    }
    return rows;
}

namespace {

void set(ggml_tensor * t, const void * data) {
    if (t->buffer) {  // an input that nothing reads has none
        ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
    }
}

std::vector<pass_row> out_rows(const std::vector<pass_row> & rows) {
    std::vector<pass_row> out;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(out), [](const pass_row & r) { return r.out; });
    return out;
}

// `most` is rounded up for several slots: fewer shapes
row_layout layout_of(const std::vector<pass_row> & rows, int n_slots) {
    row_layout l = {(int) rows.size(), (int) rows.size()};
    if (n_slots > 1) {
        int most = 0, run = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            run  = i > 0 && rows[i].slot == rows[i - 1].slot ? run + 1 : 1;
            most = std::max(most, run);
        }
        for (l.most = 1; l.most < most; l.most *= 2) {
        }
    }
    return l;
}

}  // namespace

void runner::set_attention(
    const attention & a, const pass_shape & shape, const std::vector<pass_row> & rows) {
    const int n_kv = shape.n_kv, most = (int) a.mask->ne[1];
    const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0f);
    mask_.assign(ggml_nelements(a.mask), ggml_fp32_to_fp16(-INFINITY));
    std::vector<int32_t> row(a.row ? ggml_nelements(a.row) : 0, 0), place(rows.size());
    ids_.clear();
    int run = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        const pass_row & r = rows[i];
        run                = i > 0 && r.slot == rows[i - 1].slot ? run + 1 : 0;
        place[i]           = (r.slot - shape.slot) * most + run;
        ids_.push_back(r.pos);
        if (a.row) {
            row[place[i]] = (int32_t) i;
        }
        ggml_fp16_t * seen = mask_.data() + (size_t) place[i] * n_kv;
        std::fill(seen + r.from, seen + r.base, zero);
        for (int c = 0; c < 64 && r.path >> c; ++c) {
            if ((r.path >> c) & 1) {
                seen[r.base + c] = zero;
            }
        }
    }
    set(a.pos, ids_.data());
    set(a.mask, mask_.data());
    if (a.row) {
        set(a.row, row.data());
        set(a.place, place.data());
    }
}

void runner::set_inputs(const built & b, const pass & p) {
    std::vector<int32_t> pos, out;
    ids_.clear();
    cells_.clear();
    for (size_t i = 0; i < p.rows.size(); ++i) {
        const pass_row & r = p.rows[i];
        ids_.push_back(r.token);
        pos.push_back(r.pos);
        cells_.push_back((int64_t) r.slot * n_ctx_ + r.cell);
        if (r.out) {
            out.push_back((int32_t) i);
        }
    }
    set(b.tokens, ids_.data());
    set(b.pos, pos.data());
    set(b.x, p.x);
    set(b.cells, cells_.data());
    if (b.out_rows) {
        set(b.out_rows, out.data());
    }
    if (b.inner.mask) {
        set_attention(b.inner, b.shape, p.rows);
    }
    if (b.last.mask) {
        set_attention(b.last, b.shape, out_rows(p.rows));
    }
}

void runner::run(const pass & p) {
    const int n = (int) p.rows.size();
    require(n >= 1, EAGLE3_E_ARGUMENT, "a pass of no rows");
    const std::vector<pass_row> out = out_rows(p.rows);
    int first = n_slots_, last = 0, n_cells = 0;
    for (const pass_row & r : p.rows) {
        const int end = std::max(r.base, r.cell + 1);
        require(r.slot >= 0 && r.slot < n_slots_ && r.pos >= 0 && r.cell >= 0 && end <= n_ctx_,
            EAGLE3_E_ARGUMENT,
            format("a row at cell %d of slot %d does not fit into %d slots of %d cells", r.cell, r.slot,
                n_slots_, n_ctx_));
        first   = std::min(first, r.slot);
        last    = std::max(last, r.slot);
        n_cells = std::max(n_cells, end);
    }

    pass_shape shape;
    shape.slot    = first;
    shape.n_slots = last - first + 1;
    shape.rows    = layout_of(p.rows, shape.n_slots);
    shape.out     = layout_of(out, shape.n_slots);
    shape.out_last =
        std::none_of(p.rows.begin(), p.rows.end() - out.size(), [](const pass_row & r) { return r.out; });
    shape.n_layer = (int) h_.blocks.size();
    shape.n_kv    = !out.empty() || shape.n_layer > 1 ? pad(n_cells, KV_PAD) : 0;
    if (shape.n_kv == 0) {  // nothing attends: one graph for every slot
        shape.slot    = 0;
        shape.n_slots = 1;
        shape.rows    = {n, n};
        shape.out     = {};
    }
    shape.k        = out.empty() ? 0 : p.k;
    shape.features = p.features;
    shape.traced   = p.stage != nullptr;
    built & b      = get(shape);

    set_inputs(b, p);
    require(ggml_backend_sched_graph_compute(b.sched.get(), b.graph) == GGML_STATUS_SUCCESS,
        EAGLE3_E_INTERNAL, "the head's graph failed");

    auto read = [](ggml_tensor * t, void * out) {
        if (out) {
            ggml_backend_tensor_get(t, out, 0, ggml_nbytes(t));
        }
    };
    if (!out.empty()) {
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
    if (!out.empty() && p.k) {
        read(b.ids, p.ids);
        read(b.probs, p.probs);
        for (int r = 0; r < (int) out.size(); ++r) {
            sort_best(p.ids + r * p.k, p.probs + r * p.k, p.k);
        }
    }
}

size_t runner::n_bytes() const {
    size_t n = 0;
    for (const auto & b : built_) {
        for (const auto & backend : backends_) {
            n += ggml_backend_sched_get_buffer_size(b->sched.get(), backend.get());
        }
    }
    return n;
}

size_t runner::cells_size(int from, int to) const {
    return 2 * cache_.size() * (size_t) (to - from) * cache_[0].k->nb[1];
}

// f(keys or values of a layer, offset, bytes) for each region that holds the rows [from, to) of a slot
template <typename F> void runner::each_region(int slot, int from, int to, F && f) const {
    const size_t row = cache_[0].k->nb[1], n = (size_t) (to - from) * row,
                 offset = ((size_t) slot * n_ctx_ + from) * row;
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

}  // namespace eagle3
