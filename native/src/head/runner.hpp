// The head's forward pass is computed by ggml graphs. Each is built once for its shape and kept; all share
// one compute buffer, and one buffer for what goes in and comes out. So a pass is one copy in, one graph and
// one copy out, for which the host waits once.
#pragma once

#include "head/head.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace eagle3 {

constexpr int MOST_FED   = 512;  // rows of a pass that feeds a prompt to a head on a device
constexpr int MOST_AHEAD = 15;   // steps behind a pass
constexpr int MAX_OUT    = 64;  // rows with outputs in a pass that finds ids, unless a runner has more states

// Rows of one slot lie one after the other; those of several are padded to a rectangle for attention, `most`
// for each slot.
struct row_layout {
    int n = 0, most = 0;

    bool operator==(const row_layout & o) const { return n == o.n && most == o.most; }
};

// This is where the vectors lie that a pass starts from: the caller gives them, or they are rows of one of
// the runner's tensors.
enum class source_of_x { caller, store, states };

// This is what a graph is built for. Two passes with equal shapes share a graph.
struct pass_shape {
    int slot = 0, n_slots = 1;  // the slots from `slot` on that rows may be of
    row_layout rows, out;       // outputs are wanted of `out`; none: only keys and values are made
    bool out_last = true;       // whether `out` are the last ones of `rows`
    int n_kv      = 0;          // cells attended to, padded
    int k         = 0;          // most probable ids of each output row; 0: its logits
    bool features = false;      // rows are target features, else g itself
    bool traced   = false;      // every stage can be read
    source_of_x x = source_of_x::caller;
    int ahead = 0, width = 0;  // steps behind the pass, and rows of each for each output
    bool whole = true;         // every one of the slots has an output, in the slots' order

    // Returns the largest shape of those that a shared buffer is made for together with this one.
    pass_shape rounded(int n_ctx) const;

    bool operator==(const pass_shape & o) const {
        return slot == o.slot && n_slots == o.n_slots && rows == o.rows && out == o.out &&
               out_last == o.out_last && n_kv == o.n_kv && k == o.k && features == o.features &&
               traced == o.traced && x == o.x && ahead == o.ahead && width == o.width && whole == o.whole;
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
    bool spare    = false;  // it fills up a size: its keys and values go to a cell that nothing sees
    int x         = 0;      // its row of the store or of the states, if they lie there
    int state     = 0;      // the row of the states for its state, if the pass finds ids
};

// This is one pass over the head.
struct pass {
    std::vector<pass_row> rows;  // those of a slot one after the other
    source_of_x from = source_of_x::caller;
    const float * x  = nullptr;  // [n][n_features] or [n][n_embd], if the caller has them
    bool features    = false;
    // Rows of further steps, [steps][n_out][width], of which tokens and paths are not read. With width 1,
    // each continues its row of the step before with the most probable id. Else width is k, and the rows of
    // an output continue those k ids of the step before that are most probable, with all that they follow.
    std::vector<pass_row> ahead;
    int width = 1;

    // These are outputs for the n_out rows that ask for them, in order; each may be null.
    float * g      = nullptr;  // [n_out][n_embd]
    float * state  = nullptr;  // [n_out][n_embd]; what the next step takes in place of g
    float * logits = nullptr;  // [n_out][n_vocab]; needs k == 0
    int k          = 0;
    int32_t * ids  = nullptr;  // [n_out][k] draft ids, the most probable first, then [steps][n_out][width][k]
    float * probs  = nullptr;  // the same; of the whole draft vocabulary; not finite if the row is not
    // For each row ahead, which id it continues: the number of a row of its output in the step before, times
    // k, plus the place of the id in ids. [steps][n_out][width]
    int32_t * chosen = nullptr;

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
    // ctx is the target's, whose number of threads each pass takes. n_states rows hold states of passes that
    // find ids. n_store rows hold features that stay on the device; 0: there is no store.
    runner(
        const head & h, int n_slots, int n_ctx, llama_context * ctx, int n_states = MAX_OUT, int n_store = 0);
    ~runner();

    void run(const pass & p);
    void forget_graphs();  // and the compute buffer: both come back as passes need them

    // Returns the most steps that a pass may have behind it: none where the host does not wait for a device,
    // or the head's tables are not on it.
    int most_ahead() const { return h_.d2t_ids ? MOST_AHEAD : 0; }
    ggml_tensor * store() const { return store_; }  // F32 [n_features, n_store], or null
    void store_get(int row, void * out) const;      // [n_features]
    void store_set(int row, const void * data);

    int n_ctx() const { return n_ctx_; }
    int n_threads() const { return n_threads_; }       // in the last pass
    size_t n_graphs() const { return built_.size(); }  // that are kept
    size_t n_built() const { return n_built_; }        // that were built so far
    size_t cache_bytes() const { return ggml_backend_buffer_get_size(cache_buffer_.get()); }
    size_t buffer_bytes() const;   // the compute buffer's
    size_t compute_bytes() const;  // with the descriptions of the graphs that are kept

    // The rows [from, to) of a slot's keys, then of its values, come layer by layer.
    size_t cells_size(int from, int to) const;
    void cells_get(int slot, int from, int to, uint8_t * out) const;
    void cells_set(int slot, int from, int to, const uint8_t * data);

  private:
    struct built;
    pass_shape shape_of(const pass & p, const std::vector<pass_row> & out) const;
    void read_outputs(const built & b, const pass & p, int n_out);
    const uint8_t * result(const built & b, const ggml_tensor * t) const;
    void read_ids(const built & b, const pass & p) const;
    void wait() const;
    static std::vector<ggml_tensor *> io_tensors(const built & b);
    size_t io_size(const built & b) const;
    void place(built & b, ggml_backend_buffer_t io) const;
    bool make_io(size_t size);
    bool is_kept(const pass_shape & shape) const;
    uint8_t * staged(const ggml_tensor * t) const;
    void set(ggml_tensor * t, const void * data) const;
    built & get(const pass_shape & shape);
    built & get_once(const pass_shape & shape);
    std::unique_ptr<built> build(const pass_shape & shape);
    std::unique_ptr<built> lay_out(const pass_shape & shape);
    std::unique_ptr<built> grow(const pass_shape & shape);
    ggml_backend_sched_ptr new_scheduler(int ahead) const;
    size_t graph_size(int ahead) const;
    size_t graph_bytes(int ahead) const;
    size_t kept_bytes() const;
    struct builder;
    template <typename F> void each_region(int slot, int from, int to, F && f) const;
    struct attention;
    struct step;
    static int rows_of(const built & b, int step);
    void set_ahead(const built & b, const pass & p);
    void set_inputs(const built & b, const pass & p);
    void set_step(const step & s, const pass_shape & shape, const std::vector<pass_row> & rows,
        const std::vector<pass_row> & out);
    void set_attention(const attention & a, const pass_shape & shape, const std::vector<pass_row> & rows);

    void take_threads();

    const head & h_;
    llama_context * ctx_;
    int n_slots_, n_ctx_, n_threads_ = 0;
    std::vector<ggml_backend_ptr> own_;     // backends that are not the context's
    std::vector<ggml_backend_t> backends_;  // the head's device first, the CPU last
    ggml_context_ptr cache_ctx_;
    ggml_backend_buffer_ptr cache_buffer_;
    struct cache {
        ggml_tensor *k, *v;
    };  // [n_embd_kv, n_slots * n_ctx]
    std::vector<cache> cache_;
    ggml_tensor *states_ = nullptr, *store_ = nullptr;  // lie in the cache's buffer
    // What goes into a graph and comes out lies in io_, and is made in staging_, in host memory. Where io_ is
    // host memory, there is no staging_.
    ggml_backend_buffer_ptr io_, staging_;
    std::vector<uint8_t> results_;
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
