// The head's graphs are kept, and share a compute buffer: one pass runs after the other.
#include "planner.hpp"
#include "runner_parts.hpp"
#include "tuning.hpp"

#include "../ggml/src/ggml-backend-impl.h"  // in llama.cpp's tree: ggml_backend_sched_borrow

#include <algorithm>

namespace eagle3 {

namespace {

// Returns the next power of two, up to what a round has.
int rounded(int n) {
    int to = 1;
    while (to < n && to < MAX_ROWS) {
        to *= 2;
    }
    return std::max(n, n > 0 ? to : 0);
}

}  // namespace

pass_shape pass_shape::rounded(int n_ctx) const {
    pass_shape s = *this;
    for (row_layout * l : {&s.rows, &s.out}) {
        l->n    = eagle3::rounded(l->n);
        l->most = eagle3::rounded(l->most);
    }
    s.n_kv = n_kv > 0 ? n_ctx : 0;
    return s;
}

// Returns what a kept graph takes beside the shared buffers: its scheduler needs about as much as its
// tensors.
size_t runner::graph_bytes() const {
    return 2 * (ggml_tensor_overhead() * graph_size() + ggml_graph_overhead_custom(graph_size(), false));
}

ggml_backend_sched_ptr runner::new_scheduler() const {
    std::vector<ggml_backend_t> backends;
    for (const auto & backend : backends_) {
        backends.push_back(backend.get());
    }
    ggml_backend_sched_ptr sched(
        ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), graph_size(), false, true));
    require(sched != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's graph");
    return sched;
}

void runner::forget_graphs() {
    built_.clear();
    once_.reset();
    shared_ = new_scheduler();
}

size_t runner::buffer_bytes() const {
    size_t n = 0;
    for (const auto & backend : backends_) {
        n += ggml_backend_sched_get_buffer_size(shared_.get(), backend.get());
    }
    return n;
}

size_t runner::compute_bytes() const {
    return buffer_bytes() + built_.size() * graph_bytes();
}

// Makes the graph in the shared buffers, or returns null if it does not fit into them.
std::unique_ptr<runner::built> runner::lay_out(const pass_shape & shape) {
    auto b = build(shape);
    ggml_backend_sched_borrow(b->sched.get(), shared_.get());
    return ggml_backend_sched_alloc_graph(b->sched.get(), b->graph) ? std::move(b) : nullptr;
}

// Makes larger shared buffers, in which the other graphs do not lie, and the graph in them. They are made for
// the rounded shape, so that they seldom grow; or, where there is no memory for that, for this one.
std::unique_ptr<runner::built> runner::grow(const pass_shape & shape) {
    built_.clear();
    for (const pass_shape & s : {shape.rounded(n_ctx_), shape}) {
        const auto largest = build(s);
        if (!ggml_backend_sched_reserve(shared_.get(), largest->graph)) {
            ggml_backend_sched_reset(
                shared_.get());  // else it keeps the graph's tensors, and is full one day
            continue;
        }
        if (auto b = lay_out(shape)) {
            return b;
        }
    }
    return nullptr;
}

// A pass of more rows than a round has, or one that is looked into, is rare, and large: nothing of it stays.
runner::built & runner::get_once(const pass_shape & shape) {
    once_ = build(shape);
    require(ggml_backend_sched_alloc_graph(once_->sched.get(), once_->graph), EAGLE3_E_MEMORY,
        format("not enough memory for a pass of %d rows over the head", shape.rows.n));
    return *once_;
}

runner::built & runner::get(const pass_shape & shape) {
    once_.reset();
    if (shape.traced || shape.rows.n > MAX_ROWS) {
        return get_once(shape);
    }
    for (auto & b : built_) {
        if (b->shape == shape) {
            b->used = ++clock_;
            return *b;
        }
    }
    if (!built_.empty() && (built_.size() + 1) * graph_bytes() > MOST_GRAPH_BYTES) {
        built_.erase(std::min_element(
            built_.begin(), built_.end(), [](auto & a, auto & b) { return a->used < b->used; }));
    }
    auto b = lay_out(shape);
    if (!b) {
        b = grow(shape);
    }
    require(b != nullptr, EAGLE3_E_MEMORY,
        format("not enough memory for a pass of %d rows over the head", shape.rows.n));
    b->used = ++clock_;
    built_.push_back(std::move(b));
    return *built_.back();
}

}  // namespace eagle3
