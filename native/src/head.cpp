#include "head.hpp"

#include "gguf.h"
#include "llama-ext.h"

#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <set>

namespace eagle3 {

std::string format(const char * fmt, ...) {
    char buf[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(buf, sizeof(buf), fmt, args);
    va_end(args);
    return buf;
}

namespace {

// Typed access to a GGUF's keys. Nothing in the file is trusted: types and ranges are checked here.
struct metadata {
    gguf_context_ptr gguf;

    int64_t find(const std::string & key) const { return gguf_find_key(gguf.get(), key.c_str()); }

    static bool is_int(gguf_type t) {
        return t == GGUF_TYPE_UINT32 || t == GGUF_TYPE_INT32 || t == GGUF_TYPE_UINT64 || t == GGUF_TYPE_INT64;
    }

    int64_t integer_at(int64_t id) const {
        switch (gguf_get_kv_type(gguf.get(), id)) {
            case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf.get(), id);
            case GGUF_TYPE_INT32:  return gguf_get_val_i32(gguf.get(), id);
            case GGUF_TYPE_UINT64: return (int64_t) gguf_get_val_u64(gguf.get(), id);
            default:               return gguf_get_val_i64(gguf.get(), id);
        }
    }

    // an integer in lo..hi; `missing` if the key is absent, an error if that is negative
    int integer(const std::string & key, int64_t lo, int64_t hi, int missing = -1) const {
        const int64_t id = find(key);
        if (id < 0) {
            require(missing >= 0, EAGLE3_E_FORMAT, "key " + key + " is missing");
            return missing;
        }
        require(is_int(gguf_get_kv_type(gguf.get(), id)), EAGLE3_E_FORMAT, "key " + key + " is not an integer");
        const int64_t v = integer_at(id);
        require(v >= lo && v <= hi, EAGLE3_E_FORMAT,
                format("key %s is %" PRId64 ", expected %" PRId64 "..%" PRId64, key.c_str(), v, lo, hi));
        return (int) v;
    }

    float real(const std::string & key, float missing) const {
        const int64_t id = find(key);
        if (id < 0) {
            return missing;
        }
        require(gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_FLOAT32, EAGLE3_E_FORMAT, "key " + key + " is not a float");
        const float v = gguf_get_val_f32(gguf.get(), id);
        require(std::isfinite(v) && v >= 0.0f, EAGLE3_E_FORMAT, "key " + key + " is not a finite number >= 0");
        return v;
    }

    bool boolean(const std::string & key) const {
        const int64_t id = find(key);
        if (id < 0) {
            return false;
        }
        require(gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_BOOL, EAGLE3_E_FORMAT, "key " + key + " is not a boolean");
        return gguf_get_val_bool(gguf.get(), id);
    }

    std::string string(const std::string & key) const {
        const int64_t id = find(key);
        if (id < 0 || gguf_get_kv_type(gguf.get(), id) != GGUF_TYPE_STRING) {
            return "";
        }
        return gguf_get_val_str(gguf.get(), id);
    }

    std::vector<int32_t> integers(const std::string & key) const {
        std::vector<int32_t> out;
        const int64_t id = find(key);
        if (id < 0) {
            return out;
        }
        const bool is_array = gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_ARRAY;
        const gguf_type t = is_array ? gguf_get_arr_type(gguf.get(), id) : GGUF_TYPE_COUNT;
        require(t == GGUF_TYPE_INT32 || t == GGUF_TYPE_UINT32, EAGLE3_E_FORMAT, "key " + key + " is not a list of integers");
        const size_t n = gguf_get_arr_n(gguf.get(), id);
        require(n >= 1 && n <= 64, EAGLE3_E_FORMAT, format("key %s has %zu entries, expected 1..64", key.c_str(), n));
        const int32_t * data = (const int32_t *) gguf_get_arr_data(gguf.get(), id);
        out.assign(data, data + n);
        return out;
    }
};

std::string shape_of(const ggml_tensor * t) {
    return format("[%" PRId64 ", %" PRId64 "]", t->ne[0], t->ne[1]);
}

struct loader {
    metadata meta;
    head & h;

    // a weight by name; ne1 = 0 stands for a vector
    ggml_tensor * get(const char * name, int64_t ne0, int64_t ne1, bool optional = false) {
        ggml_tensor * t = ggml_get_tensor(h.ctx.get(), name);
        if (t == nullptr) {
            require(optional, EAGLE3_E_FORMAT, format("tensor %s is missing", name));
            return nullptr;
        }
        const bool ok = t->ne[0] == ne0 && t->ne[1] == (ne1 ? ne1 : 1) && t->ne[2] == 1 && t->ne[3] == 1;
        require(ok, EAGLE3_E_FORMAT, format("tensor %s has shape %s, expected [%" PRId64 ", %" PRId64 "]", name,
                shape_of(t).c_str(), ne0, ne1 ? ne1 : 1));
        require(ne1 || t->type == GGML_TYPE_F32, EAGLE3_E_FORMAT, format("tensor %s must be F32", name));
        return t;
    }

    void read_geometry() {
        const std::string arch = meta.string("general.architecture");
        require(arch == "eagle3", EAGLE3_E_FORMAT, format("general.architecture is \"%.60s\", expected \"eagle3\": "
                "not an EAGLE-3 head (convert it with eagle3-llama convert)", arch.c_str()));
        const int n_layer = meta.integer("eagle3.block_count", 1, 1024);
        require(n_layer == 1, EAGLE3_E_FORMAT, format("eagle3.block_count is %d: heads with more than one layer are not supported yet", n_layer));
        h.n_embd        = meta.integer("eagle3.embedding_length", 1, 1 << 20);
        h.n_ff          = meta.integer("eagle3.feed_forward_length", 1, 1 << 22);
        h.n_head        = meta.integer("eagle3.attention.head_count", 1, 1 << 14);
        h.n_head_kv     = meta.integer("eagle3.attention.head_count_kv", 1, 1 << 14, h.n_head);
        h.n_embd_head   = meta.integer("eagle3.attention.key_length", 1, 1 << 14, h.n_embd / h.n_head);
        require(h.n_head % h.n_head_kv == 0, EAGLE3_E_FORMAT, format("eagle3.attention.head_count %d is no multiple of head_count_kv %d", h.n_head, h.n_head_kv));
        h.n_embd_target = meta.integer("eagle3.target_hidden_size", 1, 1 << 20, h.n_embd);
        h.norm_eps      = meta.real("eagle3.attention.layer_norm_rms_epsilon", 1e-5f);
        h.norm_before_residual = meta.boolean("eagle3.norm_before_residual");
        h.norm_before_fc       = meta.boolean("eagle3.norm_before_fc");
        h.layers = meta.integers("eagle3.target_layers");
        if (h.layers.empty()) {
            h.layers = meta.integers("eagle3.extract_layers");  // files written before the merge upstream
        }
        require(!h.layers.empty(), EAGLE3_E_FORMAT, "key eagle3.target_layers is missing");
    }

    void read_rope() {
        rope_params & r = h.rope;
        r.n_dims    = meta.integer("eagle3.rope.dimension_count", 2, h.n_embd_head, h.n_embd_head);
        require(r.n_dims % 2 == 0, EAGLE3_E_FORMAT, "eagle3.rope.dimension_count is odd");
        r.freq_base = meta.real("eagle3.rope.freq_base", 10000.0f);
        const std::string type = meta.string("eagle3.rope.scaling.type");
        const float factor = meta.real("eagle3.rope.scaling.factor", 1.0f);
        require(factor > 0.0f, EAGLE3_E_FORMAT, "eagle3.rope.scaling.factor is 0");
        if (type == "linear" || type == "yarn") {
            r.freq_scale = 1.0f / factor;
        }
        r.n_ctx_orig = meta.integer("eagle3.rope.scaling.original_context_length", 1, 1 << 30,
                                    meta.integer("eagle3.context_length", 1, 1 << 30, 4096));
        if (type == "yarn") {
            r.ext_factor = 1.0f;
            r.beta_fast  = meta.real("eagle3.rope.scaling.yarn_beta_fast", 32.0f);
            r.beta_slow  = meta.real("eagle3.rope.scaling.yarn_beta_slow", 1.0f);
            // ggml scales by 1 + 0.1 ln(factor) itself; the file's factor is on top of that
            r.attn_factor = meta.real("eagle3.rope.scaling.attn_factor", 1.0f);
        }
    }

    void check_target() {
        const int n_layer = llama_model_n_layer(h.target);
        const int n_embd  = llama_model_n_embd(h.target);
        require(h.n_embd_target == n_embd, EAGLE3_E_MISMATCH, format("this head is for a target of hidden size %d, "
                "the target has %d: take the head trained for this model", h.n_embd_target, n_embd));
        for (size_t i = 0; i < h.layers.size(); ++i) {
            require(h.layers[i] >= 0 && h.layers[i] <= n_layer, EAGLE3_E_MISMATCH, format("this head reads layer %d, "
                    "the target has layers 0..%d: take the head trained for this model", h.layers[i], n_layer));
            require(i == 0 || h.layers[i] > h.layers[i - 1], EAGLE3_E_FORMAT, "eagle3.target_layers is not ascending");
        }
        h.n_vocab_target = llama_vocab_n_tokens(llama_model_get_vocab(h.target));
        const int64_t id = meta.find("tokenizer.ggml.tokens");
        if (id >= 0 && gguf_get_kv_type(meta.gguf.get(), id) == GGUF_TYPE_ARRAY) {
            const int n = (int) gguf_get_arr_n(meta.gguf.get(), id);
            require(n == h.n_vocab_target, EAGLE3_E_MISMATCH, format("this head is for a vocabulary of %d tokens, "
                    "the target has %d: take the head trained for this model", n, h.n_vocab_target));
        }
    }

    // a weight of the target that the head has none of its own for
    ggml_tensor * shared(const char * what, std::initializer_list<const char *> names) {
        for (const char * name : names) {
            if (const ggml_tensor * t = llama_model_get_tensor(h.target, name)) {
                require(t->ne[0] == h.n_embd, EAGLE3_E_FORMAT, format("tensor %s is missing, and the target's has width %"
                        PRId64 " instead of %d", names.begin()[0], t->ne[0], h.n_embd));
                return const_cast<ggml_tensor *>(t);  // graphs only read it
            }
        }
        throw error(EAGLE3_E_MISMATCH, format("neither head nor target has %s (%s)", what, names.begin()[0]));
    }

    void find_weights() {
        const int64_t n_embd = h.n_embd, n_q = (int64_t) h.n_head * h.n_embd_head, n_kv = h.n_embd_kv();
        const ggml_tensor * map = ggml_get_tensor(h.ctx.get(), "d2t");
        h.n_vocab = map ? (int) map->ne[0] : h.n_vocab_target;
        require(h.n_vocab >= 1 && h.n_vocab <= h.n_vocab_target, EAGLE3_E_MISMATCH, format("tensor d2t has %d entries, "
                "the target's vocabulary %d", h.n_vocab, h.n_vocab_target));
        h.fc          = get("fc.weight", h.n_features(), n_embd);
        h.fc_norm     = h.norm_before_fc ? get("enc.output_norm.weight", h.n_features(), 0) : nullptr;
        h.attn_norm   = get("blk.0.attn_norm.weight", n_embd, 0);
        h.hidden_norm = get("blk.0.attn_norm_2.weight", n_embd, 0, true);
        if (h.hidden_norm == nullptr) {
            h.hidden_norm = get("blk.0.hidden_norm.weight", n_embd, 0);
        }
        h.wq          = get("blk.0.attn_q.weight", 2 * n_embd, n_q);
        h.wk          = get("blk.0.attn_k.weight", 2 * n_embd, n_kv);
        h.wv          = get("blk.0.attn_v.weight", 2 * n_embd, n_kv);
        h.wo          = get("blk.0.attn_output.weight", n_q, n_embd);
        h.ffn_norm    = get("blk.0.ffn_norm.weight", n_embd, 0);
        h.ffn_gate    = get("blk.0.ffn_gate.weight", n_embd, h.n_ff);
        h.ffn_up      = get("blk.0.ffn_up.weight", n_embd, h.n_ff);
        h.ffn_down    = get("blk.0.ffn_down.weight", h.n_ff, n_embd);
        h.output_norm = get("output_norm.weight", n_embd, 0);
        h.rope_freqs  = get("rope_freqs.weight", h.rope.n_dims / 2, 0, true);
        h.tok_embd    = get("token_embd.weight", n_embd, h.n_vocab_target, true);
        h.output      = get("output.weight", n_embd, h.n_vocab, true);
        if (h.tok_embd == nullptr) {
            h.tok_embd = shared("token embeddings", {"token_embd.weight"});
        }
        if (h.output == nullptr) {
            require(map == nullptr, EAGLE3_E_FORMAT, "tensor output.weight is missing, but d2t names a draft vocabulary");
            h.output = shared("an output matrix", {"output.weight", "token_embd.weight"});
        }
    }

    void read_data(const std::string & path) {
        std::ifstream file(path, std::ios::binary);
        require(file.good(), EAGLE3_E_FILE, "cannot read " + path);
        file.seekg(0, std::ios::end);
        const uint64_t size = (uint64_t) file.tellg();
        std::vector<char> buf;
        for (ggml_tensor * t = ggml_get_first_tensor(h.ctx.get()); t; t = ggml_get_next_tensor(h.ctx.get(), t)) {
            const int64_t id = gguf_find_tensor(meta.gguf.get(), t->name);
            const uint64_t offset = gguf_get_data_offset(meta.gguf.get()) + gguf_get_tensor_offset(meta.gguf.get(), id);
            const uint64_t n = ggml_nbytes(t);
            require(offset <= size && n <= size - offset, EAGLE3_E_FORMAT,
                    format("%s is truncated: tensor %s ends beyond the file", path.c_str(), t->name));
            buf.resize(n);
            file.seekg((std::streamoff) offset);
            file.read(buf.data(), (std::streamsize) n);
            require(file.good(), EAGLE3_E_FILE, format("cannot read tensor %s", t->name));
            ggml_backend_tensor_set(t, buf.data(), 0, n);
        }
    }

    void read_d2t() {
        h.d2t.resize(h.n_vocab);
        const ggml_tensor * map = ggml_get_tensor(h.ctx.get(), "d2t");
        if (map == nullptr) {
            for (int i = 0; i < h.n_vocab; ++i) {
                h.d2t[i] = i;
            }
            return;
        }
        require(map->type == GGML_TYPE_I64, EAGLE3_E_FORMAT, "tensor d2t must be I64");
        std::vector<int64_t> ids(h.n_vocab);
        ggml_backend_tensor_get(map, ids.data(), 0, ids.size() * sizeof(int64_t));
        std::vector<bool> seen(h.n_vocab_target);
        for (int i = 0; i < h.n_vocab; ++i) {
            require(ids[i] >= 0 && ids[i] < h.n_vocab_target, EAGLE3_E_FORMAT, format("d2t[%d] is %" PRId64
                    ", outside the target's vocabulary of %d", i, ids[i], h.n_vocab_target));
            require(!seen[ids[i]], EAGLE3_E_FORMAT, format("d2t names target token %" PRId64 " twice", ids[i]));
            seen[ids[i]] = true;
            h.d2t[i] = (int32_t) ids[i];
        }
    }
};

// The device that holds the target's last norm holds its output too; the head goes there.
ggml_backend_dev_t output_device(const llama_model * target) {
    const ggml_tensor * t = llama_model_get_tensor(target, "output_norm.weight");
    if (t && t->buffer && !ggml_backend_buffer_is_host(t->buffer)) {
        if (ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer))) {
            return dev;
        }
    }
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

} // namespace

std::unique_ptr<head> load_head(const std::string & path, const llama_model * target) {
    require(std::ifstream(path, std::ios::binary).good(), EAGLE3_E_FILE, "cannot open " + path);

    auto h = std::make_unique<head>();
    h->target = target;

    ggml_context * ctx = nullptr;
    gguf_init_params params = {/*.no_alloc =*/ true, /*.ctx =*/ &ctx};
    gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), params));
    h->ctx.reset(ctx);
    require(gguf && ctx, EAGLE3_E_FORMAT, path + " is not a valid GGUF file (truncated or damaged)");

    loader l{{std::move(gguf)}, *h};
    l.read_geometry();
    l.read_rope();
    l.check_target();
    l.find_weights();

    h->device = output_device(target);
    require(h->device != nullptr, EAGLE3_E_INTERNAL, "no device for the head");
    h->buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(h->device)));
    require(h->buffer != nullptr, EAGLE3_E_MEMORY, "not enough memory for the head's weights");
    l.read_data(path);
    l.read_d2t();
    return h;
}

} // namespace eagle3
