// Builds the head's forward pass as a ggml graph, and the steps behind it: runner_ahead.cpp.
#pragma once

#include "head/runner_parts.hpp"

#include <cmath>

namespace eagle3 {

// The builder makes a graph's parts, one function each, in the order of the forward pass.
struct runner::builder {
    const runner & r;
    built & b;
    const head & h     = r.h_;
    ggml_context * ctx = b.ctx.get();
    ggml_cgraph * gf   = b.graph;

    ggml_tensor * input(ggml_tensor * t) const {
        b.inputs.push_back(t);
        return t;
    }
    ggml_tensor * output(ggml_tensor * t) const {
        b.outputs.push_back(t->view_src ? t->view_src : t);
        ggml_build_forward_expand(gf, t);
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

    // Returns the rows with outputs of [ne0, n_rows].
    ggml_tensor * outs(const step & s, ggml_tensor * t) const {
        if (!s.out_last) {
            return ggml_get_rows(ctx, t, s.out_rows);
        }
        return s.n_out == s.n_rows
                   ? t
                   : ggml_view_2d(ctx, t, t->ne[0], s.n_out, t->nb[1], (s.n_rows - s.n_out) * t->nb[1]);
    }

    // Marks a stage that a trace may ask for.
    ggml_tensor * stage(ggml_tensor * t, const char * name, int layer = -1) const {
        if (b.shape.traced) {
            layer < 0 ? ggml_set_name(t, name) : ggml_format_name(t, "%s-%d", name, layer);
            ggml_set_output(t);
            ggml_build_forward_expand(gf, t);
        }
        return t;
    }

    // Makes [d, n_heads, n] of [n_heads * d, n], normed if w is there, at the positions of its rows.
    ggml_tensor * rotated(ggml_tensor * t, ggml_tensor * w, int n_heads, ggml_tensor * pos) const {
        const rope_params & p = h.rope;
        t                     = ggml_reshape_3d(ctx, t, h.n_embd_head, n_heads, t->ne[1]);
        return ggml_rope_ext(ctx, w ? norm(t, w) : t, pos, h.rope_freqs, p.n_dims, GGML_ROPE_TYPE_NORMAL,
            p.n_ctx_orig, p.freq_base, p.freq_scale, p.ext_factor, p.attn_factor, p.beta_fast, p.beta_slow);
    }

    // Makes [d * n_head, n] of q, which is [d, n_head, n].
    ggml_tensor * attend(int il, ggml_tensor * q, const attention & a) const {
        const int64_t width = (int64_t) h.n_embd_head * h.n_head, n_slots = b.shape.n_slots;
        if (a.row) {
            q = ggml_get_rows(ctx, ggml_reshape_2d(ctx, q, width, q->ne[2]), a.row);
            q = ggml_reshape_3d(ctx, q, h.n_embd_head, h.n_head, q->ne[1]);
        }
        q               = ggml_reshape_4d(ctx, q, h.n_embd_head, h.n_head, q->ne[2] / n_slots, n_slots);
        q               = ggml_permute(ctx, q, 0, 2, 1, 3);  // [d, n, n_head, n_slots]
        ggml_tensor * t = ggml_flash_attn_ext(ctx, q, cached(r.cache_[il].k), cached(r.cache_[il].v), a.mask,
            1.0f / std::sqrt((float) h.n_embd_head), 0.0f, 0.0f);
        ggml_prec_set_acc(t, GGML_PREC_F32);
        t = ggml_reshape_2d(ctx, t, width, t->ne[2] * t->ne[3]);
        return a.place ? ggml_get_rows(ctx, t, a.place) : t;
    }

    // Makes g of target features.
    ggml_tensor * fuse(ggml_tensor * x) const {
        if (h.fc_norm) {
            x = ggml_reshape_3d(ctx, x, h.n_embd_target, (int64_t) h.layers.size(), x->ne[1]);
            x = ggml_reshape_2d(ctx, norm(x, h.fc_norm), h.n_features(), x->ne[2]);
        }
        if (h.input_norm) {
            x = norm(x, h.input_norm);
        }
        if (h.feature_norm) {
            x = norm(x, h.feature_norm, h.feature_norm_eps);
        }
        return h.fc ? product(h.fc, x, h.fc_bias) : x;
    }

    // Makes a decoder layer: cur is [n_embd, n_rows], e the tokens' embeddings. It always makes the keys and
    // values; of the last layer it makes the rest only for the rows with outputs.
    ggml_tensor * layer(const step & s, int il, ggml_tensor * cur, ggml_tensor * e, bool is_last) const {
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

        const bool attends = !is_last || s.n_out > 0;
        ggml_tensor * k    = product(w.wk, u, w.bk);
        ggml_tensor * v    = product(w.wv, u, w.bv);
        ggml_tensor * q    = attends ? product(w.wq, is_last ? outs(s, u) : u, w.bq) : nullptr;
        for (ggml_tensor * t : {k, v, q}) {  // one after the other: native/kernels computes them together
            if (t) {
                ggml_build_forward_expand(gf, t);
            }
        }
        k = ggml_reshape_2d(ctx, rotated(k, w.k_norm, h.n_head_kv, s.pos), h.n_embd_kv(), s.n_rows);
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.cache_[il].k, k, s.cells));
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.cache_[il].v, v, s.cells));
        if (!attends) {
            return nullptr;
        }

        const attention & a = is_last ? s.last : s.inner;
        q                   = rotated(q, w.q_norm, h.n_head, a.pos);
        ggml_tensor * attn  = product(w.wo, attend(il, q, a), w.bo);
        cur = ggml_add(ctx, stage(attn, "attn_out", il), is_last ? outs(s, residual) : residual);

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
        const pass_shape & shape = b.shape;
        b.steps.push_back(first_inputs());
        step & first = b.steps.back();
        first.g      = stage(shape.features ? fuse(first.x) : first.x, "g");
        forward(first, first.g, first.tokens);
        if (shape.ahead > 0) {
            look_ahead();
        }
    }

    // Makes a step: g is [n_embd, n_rows].
    void forward(step & s, ggml_tensor * g, ggml_tensor * tokens) const {
        const int n_layer = (int) h.blocks.size();
        ggml_tensor * e   = ggml_get_rows(ctx, h.tok_embd, tokens);
        ggml_tensor * cur = h.embd_fc ? product(h.embd_fc, ggml_concat(ctx, e, g, 0), h.embd_fc_bias) : g;
        for (int il = 0; il < n_layer; ++il) {
            cur = layer(s, il, cur, e, il + 1 == n_layer);
        }
        if (s.n_out > 0) {
            make_outputs(s, g, cur);
        }
    }

    step first_inputs() const {
        const pass_shape & shape = b.shape;
        step s;
        s.n_rows     = shape.rows.n;
        s.n_out      = shape.out.n;
        s.out_last   = shape.out_last;
        s.tokens     = ids(s.n_rows);
        const int n0 = shape.features ? h.n_features() : h.n_embd;
        if (shape.x == source_of_x::caller) {
            s.x = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n0, s.n_rows));
        } else {
            s.x_rows = ids(s.n_rows);
            s.x      = ggml_get_rows(ctx, shape.x == source_of_x::store ? r.store_ : r.states_, s.x_rows);
        }
        if (!s.out_last) {
            s.out_rows = ids(s.n_out);
        }
        common_inputs(s, shape.rows, shape.out);
        return s;
    }

    void common_inputs(step & s, const row_layout & rows, const row_layout & out) const {
        s.pos   = ids(s.n_rows);
        s.cells = input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, s.n_rows));
        if (h.blocks.size() > 1) {
            s.inner = attention_of(rows);
        }
        if (s.n_out > 0) {
            s.last       = attention_of(out);
            s.state_rows = b.shape.k > 0 ? ids(s.n_out) : nullptr;
        }
    }

    void look_ahead() const;
    void go_on(step & next, const step & last) const;
    void choose(step & next, const step & last) const;

    // cur is the last layer's, for the rows with outputs.
    void make_outputs(step & s, ggml_tensor * g, ggml_tensor * cur) const {
        const int k = b.shape.k;
        ggml_tensor * out =
            h.output_norm ? norm(stage(cur, "prenorm"), h.output_norm) : stage(cur, "prenorm");
        s.g      = s.out_last ? outs(s, g) : nullptr;
        s.state  = h.norm_output ? out : cur;
        s.logits = ggml_mul_mat(ctx, h.output, out);
        ggml_set_output(g);
        ggml_set_output(s.state);
        if (k == 0) {
            ggml_set_output(s.logits);
            ggml_build_forward_expand(gf, s.logits);
            return;
        }
        ggml_build_forward_expand(gf, ggml_set_rows(ctx, r.states_, s.state, s.state_rows));
        if (k == 1 || b.shape.ahead > 0) {
            s.best = ggml_argmax(ctx, s.logits);
        }
        s.ids = output(
            k == 1 ? ggml_reshape_2d(ctx, s.best, 1, s.n_out) : ggml_top_k(ctx, s.logits, k));  // [k, n_out]
        if (s.best) {
            ggml_build_forward_expand(gf, s.best);  // before softmax, which can overwrite the logits
        }
        s.probs = output(
            ggml_get_rows(ctx, ggml_reshape_3d(ctx, ggml_soft_max(ctx, s.logits), 1, h.n_vocab, s.n_out),
                s.ids));  // [1, k, n_out]
    }
};

}  // namespace eagle3
