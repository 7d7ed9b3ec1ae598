// The head's graphs are kept, and share a compute buffer: one pass runs after the other.
#include "planner/planner.hpp"
#include "head/runner_parts.hpp"
#include "planner/tuning.hpp"

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
        if (l == &s.rows || ahead == 0) {  // steps behind the pass have rows for each slot's output
            l->n    = eagle3::rounded(l->n);
            l->most = eagle3::rounded(l->most);
        }
    }
    s.n_kv = n_kv > 0 ? n_ctx : 0;
    return s;
}

// Returns what a kept graph takes beside the shared buffers: its scheduler needs about as much as its
// tensors.
size_t runner::graph_bytes(int ahead) const {
    const size_t n = graph_size(ahead);
    return 2 * (ggml_tensor_overhead() * n + ggml_graph_overhead_custom(n, false));
}

ggml_backend_sched_ptr runner::new_scheduler(int ahead) const {
    std::vector<ggml_backend_t> backends = backends_;
    ggml_backend_sched_ptr sched(ggml_backend_sched_new(
        backends.data(), nullptr, (int) backends.size(), graph_size(ahead), false, true));
    require(sched != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's graph");
    return sched;
}

void runner::forget_graphs() {
    wait();
    built_.clear();
    once_.reset();
    io_.reset();
    staging_.reset();
    shared_ = new_scheduler(most_ahead());
}

size_t runner::buffer_bytes() const {
    size_t n = 0;
    for (ggml_backend_t backend : backends_) {
        n += ggml_backend_sched_get_buffer_size(shared_.get(), backend);
    }
    for (const auto * io : {&io_, &staging_}) {
        n += *io ? ggml_backend_buffer_get_size(io->get()) : 0;
    }
    return n;
}

size_t runner::compute_bytes() const {
    return buffer_bytes() + kept_bytes();
}

// Returns what the descriptions of the kept graphs take.
size_t runner::kept_bytes() const {
    size_t n = 0;
    for (const auto & b : built_) {
        n += graph_bytes(b->shape.ahead);
    }
    return n;
}

// Makes the graph in the shared buffers, or returns null if it does not fit into them.
std::unique_ptr<runner::built> runner::lay_out(const pass_shape & shape) {
    auto b = build(shape);
    if (!io_ || io_size(*b) > ggml_backend_buffer_get_size(io_.get())) {
        return nullptr;
    }
    place(*b, io_.get());
    ggml_backend_sched_borrow(b->sched.get(), shared_.get());
    return ggml_backend_sched_alloc_graph(b->sched.get(), b->graph) ? std::move(b) : nullptr;
}

// Makes larger shared buffers, in which the other graphs do not lie, and the graph in them. They are made for
// the rounded shape, so that they seldom grow; or, where there is no memory for that, for this one.
std::unique_ptr<runner::built> runner::grow(const pass_shape & shape) {
    built_.clear();
    for (const pass_shape & s : {shape.rounded(n_ctx_), shape}) {
        const auto largest = build(s);
        if (!make_io(io_size(*largest))) {
            continue;
        }
        place(*largest, io_.get());
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
    once_->io.reset(ggml_backend_buft_alloc_buffer(
        ggml_backend_dev_buffer_type(h_.device), std::max<size_t>(io_size(*once_), 1)));
    require(once_->io != nullptr, EAGLE3_E_MEMORY,
        format("not enough memory for a pass of %d rows over the head", shape.rows.n));
    place(*once_, once_->io.get());
    require(ggml_backend_sched_alloc_graph(once_->sched.get(), once_->graph), EAGLE3_E_MEMORY,
        format("not enough memory for a pass of %d rows over the head", shape.rows.n));
    return *once_;
}

// A prompt is fed to a head on a device in passes of one size, which are kept.
bool runner::is_kept(const pass_shape & shape) const {
    return !shape.traced && (shape.rows.n <= MAX_ROWS || (store_ && shape.rows.n <= MOST_FED));
}

runner::built & runner::get(const pass_shape & shape) {
    if (once_) {
        wait();
        once_.reset();
    }
    if (!is_kept(shape)) {
        return get_once(shape);
    }
    for (auto & b : built_) {
        if (b->shape == shape) {
            b->used = ++clock_;
            return *b;
        }
    }
    wait();  // a graph that goes may still be under way
    const size_t most = (1 + most_ahead()) * MOST_GRAPH_BYTES;
    while (!built_.empty() && kept_bytes() + graph_bytes(shape.ahead) > most) {
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
