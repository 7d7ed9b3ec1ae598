// The runner runs passes over the head and owns its key-value cache.
#include "head/runner_parts.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace eagle3 {

runner::runner(const head & h, int n_slots, int n_ctx, llama_context * ctx, int n_states, int n_store)
    : h_(h), ctx_(ctx), n_slots_(n_slots), n_ctx_(pad(n_ctx, KV_PAD)) {
    // The target's backend, so that its graphs and the head's are in one queue.
    if (ggml_backend_dev_type(h.device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        backends_.push_back(llama_get_backend(ctx, h.device));
        if (backends_.back() == nullptr) {
            backends_.pop_back();
            own_.emplace_back(ggml_backend_dev_init(h.device, nullptr));
        }
    }
    // The function is found by ggml's registry: a CPU backend that was chosen when it was loaded cannot be
    // linked to.
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    require(cpu != nullptr, EAGLE3_E_INTERNAL, "no CPU backend is loaded");
    own_.emplace_back(ggml_backend_dev_init(cpu, nullptr));
    for (const auto & b : own_) {
        require(b != nullptr, EAGLE3_E_MEMORY, "cannot start the head's backend");
        backends_.push_back(b.get());
    }
    take_threads();

    ggml_init_params params = {
        (2 * h.blocks.size() + 2) * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/true};
    cache_ctx_.reset(ggml_init(params));
    require(cache_ctx_ != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's cache");
    for (size_t i = 0; i < h.blocks.size(); ++i) {
        auto cells = [&] {
            return ggml_new_tensor_2d(
                cache_ctx_.get(), GGML_TYPE_F16, h.n_embd_kv(), (int64_t) n_slots * n_ctx_ + 1);  // a spare
        };
        ggml_tensor * k = cells();
        cache_.push_back({k, cells()});
    }
    states_ = ggml_new_tensor_2d(cache_ctx_.get(), GGML_TYPE_F32, h.n_embd, n_states);
    if (n_store > 0) {
        store_ = ggml_new_tensor_2d(cache_ctx_.get(), GGML_TYPE_F32, h.n_features(), n_store);
    }
    cache_buffer_.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(cache_ctx_.get(), ggml_backend_dev_buffer_type(h.device)));
    require(cache_buffer_ != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's cache");
    ggml_backend_buffer_clear(cache_buffer_.get(), 0);  // masked cells are read too
    shared_ = new_scheduler(most_ahead());
}

runner::~runner() {
    wait();
}

// Takes the target's number of threads, so that OpenMP has one team for both.
void runner::take_threads() {
    if (n_threads_ == llama_n_threads(ctx_)) {
        return;
    }
    const auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backends_.back())),
        "ggml_backend_set_n_threads");
    require(set_threads != nullptr, EAGLE3_E_INTERNAL, "the CPU backend takes no number of threads");
    n_threads_ = llama_n_threads(ctx_);
    set_threads(backends_.back(), n_threads_);
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

std::vector<pass_row> out_rows(const std::vector<pass_row> & rows) {
    std::vector<pass_row> out;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(out), [](const pass_row & r) { return r.out; });
    return out;
}

// `most` is rounded up for several slots, so that there are fewer shapes.
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

void runner::set_step(const step & s, const pass_shape & shape, const std::vector<pass_row> & rows,
    const std::vector<pass_row> & out) {
    std::vector<int32_t> tokens, x, pos, place, state;
    cells_.clear();
    for (size_t i = 0; i < rows.size(); ++i) {
        const pass_row & r = rows[i];
        tokens.push_back(r.token);
        x.push_back(r.x);
        pos.push_back(r.pos);
        cells_.push_back(r.spare ? (int64_t) n_slots_ * n_ctx_ : (int64_t) r.slot * n_ctx_ + r.cell);
        if (r.out) {
            place.push_back((int32_t) i);
            state.push_back(r.state);
        }
    }
    set(s.tokens, tokens.data());
    set(s.x_rows, x.data());
    set(s.pos, pos.data());
    set(s.cells, cells_.data());
    set(s.out_rows, place.data());
    set(s.state_rows, state.data());
    if (s.inner.mask) {
        set_attention(s.inner, shape, rows);
    }
    if (s.last.mask) {
        set_attention(s.last, shape, out);
    }
}

void runner::set_inputs(const built & b, const pass & p) {
    const std::vector<pass_row> out = out_rows(p.rows);
    set_step(b.steps[0], b.shape, p.rows, out);
    set(b.steps[0].x, p.x);
    if (b.shape.ahead > 0) {
        set_ahead(b, p);
    }
}

// Returns the shape of the graph that a pass needs.
pass_shape runner::shape_of(const pass & p, const std::vector<pass_row> & out) const {
    const int n = (int) p.rows.size();
    int first = n_slots_, last = 0, n_cells = 0;
    std::vector<pass_row> all = p.rows;
    all.insert(all.end(), p.ahead.begin(), p.ahead.end());
    for (const pass_row & r : all) {
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
    shape.n_kv = !out.empty() || h_.blocks.size() > 1 ? pad(n_cells, KV_PAD) : 0;
    if (shape.n_kv == 0) {  // nothing attends: one graph for every slot
        shape.slot    = 0;
        shape.n_slots = 1;
        shape.rows    = {n, n};
        shape.out     = {};
    }
    shape.k        = out.empty() ? 0 : p.k;
    shape.features = p.features;
    shape.traced   = p.stage != nullptr;
    shape.x        = p.from;
    if (!p.ahead.empty()) {
        shape.width = p.width;
        shape.ahead = (int) (p.ahead.size() / out.size()) / p.width;
        shape.whole = (int) out.size() == shape.n_slots;
        for (int i = 0; i < (int) out.size(); ++i) {
            shape.whole = shape.whole && out[i].slot == shape.slot + i;
        }
    }
    return shape;
}

void runner::run(const pass & p) {
    require(!p.rows.empty(), EAGLE3_E_ARGUMENT, "a pass of no rows");
    require(p.ahead.empty() || p.width == 1 || p.width == p.k, EAGLE3_E_INTERNAL,
        "the rows ahead do not go on from what the pass finds");
    take_threads();
    const std::vector<pass_row> out = out_rows(p.rows);
    built & b                       = get(shape_of(p, out));
    wait();  // what was queued before may still read the inputs
    set_inputs(b, p);
    if (!b.io && staging_) {
        ggml_backend_tensor_set_async(backends_.front(), b.in, staged(b.in), 0, ggml_nbytes(b.in));
    }
    require(ggml_backend_sched_graph_compute_async(b.sched.get(), b.graph) == GGML_STATUS_SUCCESS,
        EAGLE3_E_INTERNAL, "the head's graph failed");
    read_outputs(b, p, (int) out.size());
}

void runner::read_outputs(const built & b, const pass & p, int n_out) {
    if (b.out) {
        results_.resize(ggml_nbytes(b.out));
        ggml_backend_tensor_get_async(backends_.front(), b.out, results_.data(), 0, results_.size());
        wait();
        read_ids(b, p);
    }
    if (p.g || p.state || p.logits || p.stage) {
        wait();
    }
    auto read = [](ggml_tensor * t, void * out) {
        if (out) {
            ggml_backend_tensor_get(t, out, 0, ggml_nbytes(t));
        }
    };
    const step & first = b.steps[0];
    if (n_out > 0) {
        read(first.g, p.g);
        read(first.state, p.state);
        read(first.logits, p.k ? nullptr : p.logits);
    }
    if (p.stage) {
        ggml_tensor * t = ggml_get_tensor(b.ctx.get(), p.stage);
        require(t != nullptr, EAGLE3_E_ARGUMENT, format("this head has no stage %.40s", p.stage));
        p.stage_out->resize(ggml_nelements(t));
        read(t, p.stage_out->data());
    }
}

size_t runner::cells_size(int from, int to) const {
    return 2 * cache_.size() * (size_t) (to - from) * cache_[0].k->nb[1];
}

// Calls f(keys or values of a layer, offset, bytes) for each region that holds the rows [from, to) of a slot.
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
    wait();
    each_region(slot, from, to, [&](ggml_tensor * t, size_t offset, size_t n) {
        ggml_backend_tensor_get(t, out, offset, n);
        out += n;
    });
}

void runner::cells_set(int slot, int from, int to, const uint8_t * data) {
    wait();
    each_region(slot, from, to, [&](ggml_tensor * t, size_t offset, size_t n) {
        ggml_backend_tensor_set(t, data, offset, n);
        data += n;
    });
}

void runner::store_get(int row, void * out) const {
    wait();
    ggml_backend_tensor_get(store_, out, row * store_->nb[1], store_->nb[1]);
}

void runner::store_set(int row, const void * data) {
    wait();
    ggml_backend_tensor_set(store_, data, row * store_->nb[1], store_->nb[1]);
}

}  // namespace eagle3
