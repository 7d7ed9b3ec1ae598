// Makes a graph for a shape: runner_builder.hpp has its parts.
#include "head/runner_builder.hpp"

namespace eagle3 {

namespace {

constexpr int GRAPH_SIZE = 64;  // nodes, and as many again for each decoder layer

}  // namespace

size_t runner::graph_size(int ahead) const {
    return GRAPH_SIZE * (1 + h_.blocks.size()) * (1 + ahead);
}

std::unique_ptr<runner::built> runner::build(const pass_shape & shape) {
    auto b                  = std::make_unique<built>();
    b->shape                = shape;
    const size_t size       = graph_size(shape.ahead);
    ggml_init_params params = {ggml_tensor_overhead() * size + ggml_graph_overhead_custom(size, false),
        nullptr, /*.no_alloc =*/true};
    b->ctx.reset(ggml_init(params));
    require(b->ctx != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's graph");
    b->graph = ggml_new_graph_custom(b->ctx.get(), size, false);
    b->steps.reserve(1 + shape.ahead);
    builder{*this, *b}.build();
    b->sched = new_scheduler(shape.ahead);
    ++n_built_;
    return b;
}

}  // namespace eagle3
