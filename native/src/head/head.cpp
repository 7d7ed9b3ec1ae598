#include "head/head.hpp"

#include "target/capture.hpp"

#include "llama-ext.h"
#include "head/head_keys.hpp"
#include "head/head_memory.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

namespace eagle3 {

namespace {

std::string shape_of(const ggml_tensor * t) {
    return format("[%" PRId64 ", %" PRId64 "]", t->ne[0], t->ne[1]);
}

// Says whether the kernels can multiply by a type, which not every type of a GGUF allows. These are those
// that can be read as floats.
bool is_weight_type(ggml_type type) {
    return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

struct loader : head_keys {
    // Returns a weight by its name; ne1 = 0 stands for a vector.
    ggml_tensor * get(const std::string & name, int64_t ne0, int64_t ne1, bool optional = false) {
        ggml_tensor * t = ggml_get_tensor(h.ctx.get(), name.c_str());
        if (t == nullptr) {
            require(optional, EAGLE3_E_FORMAT, "tensor " + name + " is missing");
            return nullptr;
        }
        const bool ok = t->ne[0] == ne0 && t->ne[1] == (ne1 ? ne1 : 1) && t->ne[2] == 1 && t->ne[3] == 1;
        require(ok, EAGLE3_E_FORMAT,
            format("tensor %s has shape %s, expected [%" PRId64 ", %" PRId64 "]", name.c_str(),
                shape_of(t).c_str(), ne0, ne1 ? ne1 : 1));
        require(ne1 || t->type == GGML_TYPE_F32, EAGLE3_E_FORMAT, "tensor " + name + " must be F32");
        require(is_weight_type(t->type), EAGLE3_E_FORMAT,
            format(
                "tensor %s is of type %s, which is not a weight's", name.c_str(), ggml_type_name(t->type)));
        return t;
    }

    ggml_tensor * find(const std::string & name, int64_t ne0, int64_t ne1 = 0) {
        return get(name, ne0, ne1, true);
    }

    void check_target() {
        // Such a device asks the target how to split every tensor, by its name, and the head's are named like
        // the target's.
        for (int i = 0; i < llama_model_n_devices(h.target); ++i) {
            require(
                ggml_backend_dev_type(llama_model_get_device(h.target, i)) != GGML_BACKEND_DEVICE_TYPE_META,
                EAGLE3_E_UNSUPPORTED,
                "the target's tensors are split over devices, and a head's cannot be: load it with another "
                "split_mode");
        }
        const int n_layer = llama_model_n_layer(h.target);
        const int n_embd  = llama_model_n_embd(h.target);
        require(h.n_embd_target == n_embd, EAGLE3_E_MISMATCH,
            format("this head is for a target of hidden size %d, "
                   "the target has %d: take the head trained for this model",
                h.n_embd_target, n_embd));
        const int n = (int) h.layers.size(), bad = first_bad_layer(h.layers.data(), n, n_layer);
        if (bad < n) {
            require(is_layer(h.layers[bad], n_layer), EAGLE3_E_MISMATCH,
                format("this head reads layer %d, "
                       "the target has layers 0..%d: take the head trained for this model",
                    h.layers[bad], n_layer));
            throw error(EAGLE3_E_FORMAT, key("target_layers") + " is not ascending");
        }
        check_vocab();
    }

    void check_vocab() {
        h.n_vocab_target = llama_vocab_n_tokens(llama_model_get_vocab(h.target));
        const int64_t id = meta.find("tokenizer.ggml.tokens");
        if (id >= 0 && gguf_get_kv_type(meta.gguf.get(), id) == GGUF_TYPE_ARRAY) {
            const int n = (int) gguf_get_arr_n(meta.gguf.get(), id);
            require(n == h.n_vocab_target, EAGLE3_E_MISMATCH,
                format("this head is for a vocabulary of %d tokens, "
                       "the target has %d: take the head trained for this model",
                    n, h.n_vocab_target));
        }
    }

    // Returns a weight of the target that the head has none of its own for.
    ggml_tensor * shared(const char * what, std::initializer_list<const char *> names) {
        for (const char * name : names) {
            if (const ggml_tensor * t = llama_model_get_tensor(h.target, name)) {
                require(t->ne[0] == h.n_embd, EAGLE3_E_FORMAT,
                    format("tensor %s is missing, and the target's has width %" PRId64 " instead of %d",
                        names.begin()[0], t->ne[0], h.n_embd));
                return const_cast<ggml_tensor *>(t);  // graphs only read it
            }
        }
        throw error(EAGLE3_E_MISMATCH, format("neither head nor target has %s (%s)", what, names.begin()[0]));
    }

    void find_weights() {
        const ggml_tensor * map = ggml_get_tensor(h.ctx.get(), "d2t");
        h.n_vocab               = map ? (int) std::min<int64_t>(map->ne[0], INT32_MAX) : h.n_vocab_target;
        require(h.n_vocab >= 1 && h.n_vocab <= h.n_vocab_target && (!map || ggml_nelements(map) == h.n_vocab),
            EAGLE3_E_MISMATCH,
            format("tensor d2t has %d entries, the target's vocabulary %d", h.n_vocab, h.n_vocab_target));
        require(!map || map->type == GGML_TYPE_I64, EAGLE3_E_FORMAT, "tensor d2t must be I64");
        find_inputs();
        for (size_t i = 0; i < h.blocks.size(); ++i) {
            find_block(h.blocks[i], format("blk.%zu.", i), i == 0 && arch == "eagle3" && !h.embd_fc);
        }
        h.output_norm = meta.boolean(key("final_norm"), arch == "eagle3")
                            ? get("output_norm.weight", h.n_embd, 0)
                            : nullptr;
        require(h.output_norm || !h.norm_output, EAGLE3_E_FORMAT,
            "key " + key("norm_output") + " is true, but there is no final norm");
        h.rope_freqs = find("rope_freqs.weight", h.rope.n_dims / 2);
        h.tok_embd   = find("token_embd.weight", h.n_embd, h.n_vocab_target);
        h.output     = find("output.weight", h.n_embd, h.n_vocab);
        if (h.tok_embd == nullptr) {
            h.tok_embd = shared("token embeddings", {"token_embd.weight"});
        }
        if (h.output == nullptr) {
            require(map == nullptr, EAGLE3_E_FORMAT,
                "tensor output.weight is missing, but d2t names a draft vocabulary");
            h.output = shared("an output matrix", {"output.weight", "token_embd.weight"});
        }
    }

    // Finds what makes the first layer's state of features and tokens.
    void find_inputs() {
        arch == "eagle3" ? find_fusion() : find_eagle1_inputs();
        if (h.feature_norm_eps > 0.0f) {
            find_feature_norm();
        }
    }

    void find_fusion() {
        const int64_t n_embd = h.n_embd, n_features = h.n_features();
        // A single feature may be g itself.
        h.fc      = get("fc.weight", n_features, n_embd, n_features == n_embd);
        h.fc_bias = h.fc ? find("fc.bias", n_embd) : nullptr;
        h.fc_norm = find("fc_norm.weight", h.n_embd_target, (int64_t) h.layers.size());
        require(!h.fc_norm || h.fc_norm->type == GGML_TYPE_F32, EAGLE3_E_FORMAT,
            "tensor fc_norm.weight must be F32");
        if (meta.boolean(key("norm_before_fc"))) {
            h.input_norm = get("enc.output_norm.weight", n_features, 0);
        }
        h.embd_fc      = find("fc2.weight", 2 * n_embd, n_embd);
        h.embd_fc_bias = find("fc2.bias", n_embd);
    }

    void find_eagle1_inputs() {
        const int64_t n_embd = h.n_embd;
        require(h.n_features() == n_embd, EAGLE3_E_FORMAT,
            format("an EAGLE-1 head takes one feature of its own width %d, this one's "
                   "have %d",
                h.n_embd, h.n_features()));
        h.embd_fc      = get("fc.weight", 2 * n_embd, n_embd);
        h.embd_fc_bias = find("fc.bias", n_embd);
    }

    // The head reads the target's last state after its final norm.
    void find_feature_norm() {
        require(h.layers.size() == 1, EAGLE3_E_FORMAT,
            format("key %s is for heads that read one layer, this one reads %zu",
                key("feature_norm_epsilon").c_str(), h.layers.size()));
        h.feature_norm = shared("a final norm", {"output_norm.weight"});
        require(h.feature_norm->type == GGML_TYPE_F32, EAGLE3_E_MISMATCH,
            "the target's output_norm.weight is not F32");
    }

    void find_block(block & b, const std::string & at, bool reads_token) {
        const int64_t n_embd = h.n_embd, n_q = (int64_t) h.n_head * h.n_embd_head, n_kv = h.n_embd_kv();
        b.hidden_norm = find(at + "attn_norm_2.weight", n_embd);
        if (b.hidden_norm == nullptr) {
            b.hidden_norm = get(at + "hidden_norm.weight", n_embd, 0, !reads_token);
        }
        const int64_t n_in = b.hidden_norm ? 2 * n_embd : n_embd;
        b.attn_norm        = get(at + "attn_norm.weight", n_embd, 0, !b.hidden_norm);
        b.wq               = get(at + "attn_q.weight", n_in, n_q);
        b.wk               = get(at + "attn_k.weight", n_in, n_kv);
        b.wv               = get(at + "attn_v.weight", n_in, n_kv);
        b.wo               = get(at + "attn_output.weight", n_q, n_embd);
        b.bq               = find(at + "attn_q.bias", n_q);
        b.bk               = find(at + "attn_k.bias", n_kv);
        b.bv               = find(at + "attn_v.bias", n_kv);
        b.bo               = find(at + "attn_output.bias", n_embd);
        b.q_norm           = find(at + "attn_q_norm.weight", h.n_embd_head);
        b.k_norm           = find(at + "attn_k_norm.weight", h.n_embd_head);
        b.ffn_norm         = get(at + "ffn_norm.weight", n_embd, 0);
        b.ffn_gate         = get(at + "ffn_gate.weight", n_embd, h.n_ff);
        b.ffn_up           = get(at + "ffn_up.weight", n_embd, h.n_ff);
        b.ffn_down         = get(at + "ffn_down.weight", h.n_ff, n_embd);
        b.b_gate           = find(at + "ffn_gate.bias", h.n_ff);
        b.b_up             = find(at + "ffn_up.bias", h.n_ff);
        b.b_down           = find(at + "ffn_down.bias", n_embd);
    }

    template <typename F> void each_tensor(F && f) const {
        for (ggml_tensor * t = ggml_get_first_tensor(h.ctx.get()); t;
            t                = ggml_get_next_tensor(h.ctx.get(), t)) {
            f(t);
        }
    }

    // Every weight of the file is one that the graph reads: what it does not know would be left out in
    // silence.
    void check_names() {
        std::set<const ggml_tensor *> used = {h.fc, h.fc_bias, h.fc_norm, h.input_norm, h.embd_fc,
            h.embd_fc_bias, h.output_norm, h.tok_embd, h.output, h.rope_freqs};
        for (const block & b : h.blocks) {
            used.insert({b.attn_norm, b.hidden_norm, b.wq, b.wk, b.wv, b.wo, b.bq, b.bk, b.bv, b.bo, b.q_norm,
                b.k_norm, b.ffn_norm, b.ffn_gate, b.ffn_up, b.ffn_down, b.b_gate, b.b_up, b.b_down});
        }
        each_tensor([&](ggml_tensor * t) {
            require(used.count(t) || strcmp(t->name, "d2t") == 0, EAGLE3_E_FORMAT,
                format("tensor %s is not one that this version knows", t->name));
        });
    }

    // Checks that all weights are in the file, before memory is taken for them.
    void check_size(uint64_t size) const {
        each_tensor([&](ggml_tensor * t) {
            const uint64_t offset = offset_of(t), n = ggml_nbytes(t);
            require(offset <= size && n <= size - offset, EAGLE3_E_FORMAT,
                format("the file is truncated: tensor %s ends beyond it", t->name));
        });
    }

    uint64_t offset_of(const ggml_tensor * t) const {
        return gguf_get_data_offset(meta.gguf.get()) +
               gguf_get_tensor_offset(meta.gguf.get(), gguf_find_tensor(meta.gguf.get(), t->name));
    }

    void read_data(std::ifstream & file) {
        std::vector<char> buf;
        each_tensor([&](ggml_tensor * t) {
            buf.resize(ggml_nbytes(t));
            file.seekg((std::streamoff) offset_of(t));
            file.read(buf.data(), (std::streamsize) buf.size());
            require(file.good(), EAGLE3_E_FILE, format("cannot read tensor %s", t->name));
            require(t->type == GGML_TYPE_I64 || ggml_validate_row_data(t->type, buf.data(), buf.size()),
                EAGLE3_E_FORMAT, format("tensor %s has values that are NaN or infinite", t->name));
            ggml_backend_tensor_set(t, buf.data(), 0, buf.size());
        });
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
        std::vector<int64_t> ids(h.n_vocab);
        ggml_backend_tensor_get(map, ids.data(), 0, ids.size() * sizeof(int64_t));
        std::vector<bool> seen(h.n_vocab_target);
        for (int i = 0; i < h.n_vocab; ++i) {
            require(ids[i] >= 0 && ids[i] < h.n_vocab_target, EAGLE3_E_FORMAT,
                format("d2t[%d] is %" PRId64 ", outside the target's vocabulary of %d", i, ids[i],
                    h.n_vocab_target));
            require(
                !seen[ids[i]], EAGLE3_E_FORMAT, format("d2t names target token %" PRId64 " twice", ids[i]));
            seen[ids[i]] = true;
            h.d2t[i]     = (int32_t) ids[i];
        }
    }
};

}  // namespace

ggml_backend_dev_t output_device(const llama_model * target) {
    for (const char * name : {"output_norm.weight", "output.weight"}) {  // OLMo's last norm has no weight
        const ggml_tensor * t = llama_model_get_tensor(target, name);
        if (t && t->buffer && !ggml_backend_buffer_is_host(t->buffer)) {
            const auto buft = ggml_backend_buffer_get_type(t->buffer);
            if (ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft)) {
                return dev;
            }
        }
    }
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

std::unique_ptr<head> load_head(const std::string & path, const llama_model * target) {
    std::ifstream file(std::filesystem::u8path(path), std::ios::binary);  // as ggml opens it on Windows
    require(file.good(), EAGLE3_E_FILE, "cannot open " + path);
    file.seekg(0, std::ios::end);
    const uint64_t size = (uint64_t) file.tellg();

    auto h    = std::make_unique<head>();
    h->target = target;

    ggml_context * ctx      = nullptr;
    gguf_init_params params = {/*.no_alloc =*/true, /*.ctx =*/&ctx};
    gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), params));
    h->ctx.reset(ctx);
    require(gguf && ctx, EAGLE3_E_FORMAT, path + " is not a valid GGUF file (truncated or damaged)");

    loader l{{{std::move(gguf)}, *h, {}}};
    l.read_geometry();
    l.read_rope();
    l.check_target();
    l.find_weights();
    l.check_names();
    l.check_size(size);

    h->device = output_device(target);
    require(h->device != nullptr, EAGLE3_E_INTERNAL, "no device for the head");
    allocate_weights(*h);
    l.read_data(file);
    l.read_d2t();
    bring_tables(*h);
    return h;
}

}  // namespace eagle3
