"""A tiny random llama and an EAGLE-3 head for it, as GGUF files: for mechanics, not for sense."""

import itertools

import gguf
import numpy as np

N_EMBD, N_HEAD, N_KV, N_LAYER, N_VOCAB, N_DRAFT = 64, 4, 2, 4, 320, 96
EOS = 2
PROMPT = [1, 60, 70, 80, 90, 100]


def _tokenizer(w):
    """SentencePiece style: specials, 256 byte tokens, and some letters."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens += [f"▁{chr(97 + i % 26)}{i}" for i in range(N_VOCAB - len(tokens))]
    types = [2, 3, 3] + [6] * 256 + [1] * (N_VOCAB - 259)
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([-float(i) for i in range(N_VOCAB)])
    w.add_token_types(types)
    w.add_bos_token_id(1)
    w.add_eos_token_id(EOS)
    w.add_unk_token_id(0)


def _common(w, n_layer, n_embd=N_EMBD):
    w.add_block_count(n_layer)
    w.add_context_length(1024)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(2 * n_embd)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(N_KV)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(n_embd // N_HEAD)
    _tokenizer(w)


def _finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _layer(w, i, rng, n_in, kind, n_embd=N_EMBD):
    d, n_ff = n_embd // N_HEAD, 2 * n_embd
    shapes = {"attn_q": (n_embd, n_in), "attn_k": (N_KV * d, n_in), "attn_v": (N_KV * d, n_in), "attn_output": (n_embd, n_embd),
              "ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    for name, shape in shapes.items():
        _matrix(w, f"blk.{i}.{name}.weight", rng, shape, kind)
    for name in ("attn_norm", "ffn_norm"):
        w.add_tensor(f"blk.{i}.{name}.weight", np.ones(n_embd, np.float32))


def _matrix(w, name, rng, shape, kind):
    x = (rng.standard_normal(shape) * 0.3).astype(np.float32)
    w.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)


def target(path, seed=0, kind="F32", n_embd=N_EMBD, n_layer=N_LAYER):
    """A llama; kind is a GGML type's name."""
    rng, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    w = gguf.GGUFWriter(path, "llama")
    _common(w, n_layer, n_embd)
    _matrix(w, "token_embd.weight", rng, (N_VOCAB, n_embd), kind)
    _matrix(w, "output.weight", rng, (N_VOCAB, n_embd), kind)
    w.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    for i in range(n_layer):
        _layer(w, i, rng, n_embd, kind, n_embd)
    _finish(w)
    return path


def head(path, seed=1, kind="F32", layers=(1, 2, 3), **keys):
    """A head for target(); keys override integers such as target_hidden_size."""
    rng, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    w = gguf.GGUFWriter(path, "eagle3")
    _common(w, 1)
    w.add_array("eagle3.target_layers", list(layers))
    w.add_uint32("eagle3.target_hidden_size", keys.get("target_hidden_size", N_EMBD))
    _matrix(w, "fc.weight", rng, (N_EMBD, len(layers) * N_EMBD), kind)
    _matrix(w, "output.weight", rng, (N_DRAFT, N_EMBD), kind)
    w.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    w.add_tensor("blk.0.attn_norm_2.weight", np.ones(N_EMBD, np.float32))
    _layer(w, 0, rng, 2 * N_EMBD, kind)
    ids = np.sort(rng.choice(N_VOCAB, N_DRAFT, replace=False)).astype(np.int64)
    w.add_tensor("d2t", keys.get("d2t", ids))
    _finish(w)
    return path


def take(llm, n, prompt=PROMPT, **sampling):
    """The first n tokens that llm says after prompt."""
    llm.set_seed(5)
    generator = llm.generate(prompt, **{"temp": 0.0, **sampling})
    out = list(itertools.islice(generator, n))
    generator.close()
    return out
