// The head's forward pass as ggml graphs, built once for each shape and kept.
#pragma once

#include "head.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace eagle3 {

// What a graph is built for. Two passes with equal shapes share a graph.
struct pass_shape {
    int  slot       = 0;
    int  n_rows     = 0;
    int  n_out      = 0;      // outputs are wanted of the last n_out rows; none: only keys and values are made
    int  n_layer    = 1;
    int  n_kv       = 0;      // cells attended to, padded
    int  k          = 0;      // of each output row's logits, the k most probable ids; 0: the logits themselves
    bool features   = false;  // rows are target features, else g itself
    bool traced     = false;  // every stage can be read

    // rows that attend to something: all that a further layer reads, else those asked for
    int n_mask() const { return n_layer > 1 ? n_rows : n_out; }

    bool operator==(const pass_shape & o) const {
        return slot == o.slot && n_rows == o.n_rows && n_out == o.n_out && n_kv == o.n_kv && k == o.k && features == o.features && traced == o.traced;
    }
};

// One pass over the head: row r is the pair (tokens[r], x[r]) at position pos + r of the slot, where tokens[r]
// is the token at the position after. Rows see cells [from, their own position].
struct pass {
    int             slot = 0;
    int             pos  = 0;
    int             from = 0;
    int             n    = 0;
    const int32_t * tokens   = nullptr;  // [n]
    const float *   x        = nullptr;  // [n][n_features] or [n][n_embd]
    bool            features = false;
    int             n_out    = 0;

    // rows of a tree, n_out == n: row r is at pos + depth[r] and in cell pos + cell[r]; it sees cells [from, pos) and
    // pos + i for each bit i of path[r], its own among them
    const int32_t *  depth = nullptr;
    const int32_t *  cell  = nullptr;
    const uint64_t * path  = nullptr;
    int              n_cells = 0;  // cells of the tree so far

    // outputs for the last n_out rows; each may be null
    float * g       = nullptr;  // [n_out][n_embd]
    float * state   = nullptr;  // [n_out][n_embd]; what the next step takes in place of g
    float * logits  = nullptr;  // [n_out][n_vocab]; needs k == 0
    int     k       = 0;
    int32_t * ids   = nullptr;  // [n_out][k] draft ids, the most probable first
    float *   probs = nullptr;  // [n_out][k] theirs, of the whole draft vocabulary; not finite if the row is not

    // one of the stages by name, for all n rows; n_out == n, k == 0: g, attn_in-L, attn_out-L, ffn_out-L of layer L, prenorm
    const char *         stage     = nullptr;
    std::vector<float> * stage_out = nullptr;
};

// Runs passes; owns the head's key-value cache: for each decoder layer n_slots regions of n_ctx cells, F16.
class runner {
  public:
    runner(const head & h, int n_slots, int n_ctx, int n_threads);
    ~runner();

    void run(const pass & p);

    int n_ctx() const { return n_ctx_; }

    // the rows [from, to) of a slot's keys, then values, layer by layer
    size_t cells_size(int from, int to) const;
    void   cells_get(int slot, int from, int to, uint8_t * out) const;
    void   cells_set(int slot, int from, int to, const uint8_t * data);

  private:
    struct built;
    built & get(const pass_shape & shape);
    struct builder;
    template <typename F> void each_region(int slot, int from, int to, F && f) const;
    void    set_inputs(const built & b, const pass & p);

    const head & h_;
    int n_slots_, n_ctx_;
    std::vector<ggml_backend_ptr>       backends_;
    ggml_context_ptr                    cache_ctx_;
    ggml_backend_buffer_ptr             cache_buffer_;
    struct cache { ggml_tensor * k, * v; };  // [n_embd_kv, n_slots * n_ctx]
    std::vector<cache>                  cache_;
    std::vector<std::unique_ptr<built>> built_;
    uint64_t                            clock_ = 0;
    std::vector<ggml_fp16_t>            mask_;
    std::vector<int32_t>                pos_;
    std::vector<int64_t>                cells_;
};

} // namespace eagle3
