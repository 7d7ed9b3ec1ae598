// The head's forward pass is computed by ggml graphs. Each is built once for its shape and kept; all share
// one compute buffer.
#pragma once

#include "head.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace eagle3 {

// Rows of one slot lie one after the other; those of several are padded to a rectangle for attention, `most`
// for each slot.
struct row_layout {
    int n = 0, most = 0;

    bool operator==(const row_layout & o) const { return n == o.n && most == o.most; }
};

// This is what a graph is built for. Two passes with equal shapes share a graph.
struct pass_shape {
    int slot = 0, n_slots = 1;  // the slots from `slot` on that rows may be of
    row_layout rows, out;       // outputs are wanted of `out`; none: only keys and values are made
    bool out_last = true;       // which are the last ones of rows
    int n_kv      = 0;          // cells attended to, padded
    int k         = 0;      // of each output row's logits, the k most probable ids; 0: the logits themselves
    bool features = false;  // rows are target features, else g itself
    bool traced   = false;  // every stage can be read

    // Returns the largest shape of those that a shared buffer is made for together with this one.
    pass_shape rounded(int n_ctx) const;

    bool operator==(const pass_shape & o) const {
        return slot == o.slot && n_slots == o.n_slots && rows == o.rows && out == o.out &&
               out_last == o.out_last && n_kv == o.n_kv && k == o.k && features == o.features &&
               traced == o.traced;
    }
};

// A row is the pair (token, x) at a position of its slot, where token is the one at the position after. It
// sees its slot's cells [from, base) and base + i for each bit i of path, its own among them.
struct pass_row {
    int slot      = 0;
    int32_t token = 0;
    int pos = 0, cell = 0;
    int from = 0, base = 0;
    uint64_t path = 0;
    bool out      = false;
};

// This is one pass over the head.
struct pass {
    std::vector<pass_row> rows;  // those of a slot one after the other
    const float * x = nullptr;   // [n][n_features] or [n][n_embd]
    bool features   = false;

    // These are outputs for the n_out rows that ask for them, in order; each may be null.
    float * g      = nullptr;  // [n_out][n_embd]
    float * state  = nullptr;  // [n_out][n_embd]; what the next step takes in place of g
    float * logits = nullptr;  // [n_out][n_vocab]; needs k == 0
    int k          = 0;
    int32_t * ids  = nullptr;  // [n_out][k] draft ids, the most probable first
    float * probs =
        nullptr;  // [n_out][k] theirs, of the whole draft vocabulary; not finite if the row is not

    // This names one of the stages, for all n rows, with n_out == n and k == 0: g, attn_in-L, attn_out-L,
    // ffn_out-L of layer L, prenorm.
    const char * stage             = nullptr;
    std::vector<float> * stage_out = nullptr;

    // Returns n rows of a slot from pos on, one after the other, with outputs for the last n_out.
    static std::vector<pass_row> chain(int slot, const int32_t * tokens, int pos, int from, int n, int n_out);
};

// The runner runs passes and owns the head's key-value cache: for each decoder layer n_slots regions of n_ctx
// cells, F16.
class runner {
  public:
    // ctx is the target's, whose number of threads each pass takes.
    runner(const head & h, int n_slots, int n_ctx, llama_context * ctx);
    ~runner();

    void run(const pass & p);
    void forget_graphs();  // and the compute buffer: both come back as passes need them

    int n_ctx() const { return n_ctx_; }
    int n_threads() const { return n_threads_; }       // of the last pass
    size_t n_graphs() const { return built_.size(); }  // that are kept
    size_t n_built() const { return n_built_; }        // that were built so far
    size_t cache_bytes() const { return ggml_backend_buffer_get_size(cache_buffer_.get()); }
    size_t buffer_bytes() const;   // of the compute buffer
    size_t compute_bytes() const;  // of it and the descriptions of the graphs that are kept

    // The rows [from, to) of a slot's keys, then of its values, come layer by layer.
    size_t cells_size(int from, int to) const;
    void cells_get(int slot, int from, int to, uint8_t * out) const;
    void cells_set(int slot, int from, int to, const uint8_t * data);

  private:
    struct built;
    pass_shape shape_of(const pass & p, const std::vector<pass_row> & out) const;
    void read_outputs(const built & b, const pass & p, int n_out) const;
    built & get(const pass_shape & shape);
    built & get_once(const pass_shape & shape);
    std::unique_ptr<built> build(const pass_shape & shape);
    std::unique_ptr<built> lay_out(const pass_shape & shape);
    std::unique_ptr<built> grow(const pass_shape & shape);
    ggml_backend_sched_ptr new_scheduler() const;
    size_t graph_size() const;
    size_t graph_bytes() const;
    struct builder;
    template <typename F> void each_region(int slot, int from, int to, F && f) const;
    struct attention;
    void set_inputs(const built & b, const pass & p);
    void set_attention(const attention & a, const pass_shape & shape, const std::vector<pass_row> & rows);

    void take_threads();

    const head & h_;
    llama_context * ctx_;
    int n_slots_, n_ctx_, n_threads_ = 0;
    std::vector<ggml_backend_ptr> backends_;
    ggml_context_ptr cache_ctx_;
    ggml_backend_buffer_ptr cache_buffer_;
    struct cache {
        ggml_tensor *k, *v;
    };  // [n_embd_kv, n_slots * n_ctx]
    std::vector<cache> cache_;
    ggml_backend_sched_ptr shared_;  // owns the compute buffers in which the kept graphs lie
    std::vector<std::unique_ptr<built>> built_;
    std::unique_ptr<built> once_;  // the last pass's, if it is not worth keeping; has buffers of its own
    size_t n_built_ = 0;
    uint64_t clock_ = 0;
    std::vector<ggml_fp16_t> mask_;
    std::vector<int32_t> ids_;
    std::vector<int64_t> cells_;
};

}  // namespace eagle3
