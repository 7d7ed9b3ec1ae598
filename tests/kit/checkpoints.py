"""Tiny head checkpoints with real names and config keys, and a target GGUF that fits them."""

import json
import struct

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FF, VOCAB, DRAFT, LAYERS = 64, 4, 2, 96, 128, 48, 12
ARCHITECTURES = {
    "SafeAILab": "LlamaForCausalLM",
    "SpecForge": "LlamaForCausalLMEagle3",
    "AngelSlim": "Eagle3LlamaForCausalLM",
}


def write_target(path, n_embd=HIDDEN, n_layer=LAYERS, n_vocab=VOCAB, architecture="llama", name=""):
    """Keys and tokenizer only: all a conversion needs."""
    w = gguf.GGUFWriter(path, architecture)
    if name:
        w.add_name(name)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_block_count(n_layer)
    w.add_embedding_length(n_embd)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"<{i}>" for i in range(n_vocab)])
    w.add_token_types([1] * n_vocab)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return path


def checkpoint(layout="SpecForge", head_dim=HIDDEN // HEADS, seed=0):
    """(config, tensors): float16 weights, d2t as offsets."""
    rng = np.random.default_rng(seed)
    weight = lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float16)
    ids = np.sort(rng.choice(VOCAB, DRAFT, replace=False))
    mask = np.zeros(VOCAB, bool)
    mask[ids] = True
    tensors = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": weight(DRAFT, HIDDEN),
        "norm.weight": weight(HIDDEN),
        "d2t": (ids - np.arange(DRAFT)).astype(np.int64),
        "t2d": mask,
        "midlayer.input_layernorm.weight": weight(HIDDEN),
        "midlayer.hidden_norm.weight": weight(HIDDEN),
        "midlayer.post_attention_layernorm.weight": weight(HIDDEN),
        "midlayer.self_attn.q_proj.weight": weight(HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": weight(KV_HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": weight(KV_HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": weight(HIDDEN, HEADS * head_dim),
        "midlayer.mlp.gate_proj.weight": weight(FF, HIDDEN),
        "midlayer.mlp.up_proj.weight": weight(FF, HIDDEN),
        "midlayer.mlp.down_proj.weight": weight(HIDDEN, FF),
    }
    config = {
        "architectures": [ARCHITECTURES[layout]],
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FF,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
    }
    if layout == "SpecForge":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    if layout == "AngelSlim":
        config.update(head_dim=head_dim, target_model_type="qwen3")
    return config, tensors


def bfloat16(x):
    """float array -> uint16 bit patterns, truncated."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path, tensors, bf16=()):
    """By hand, so that bfloat16 and damaged headers can be written."""
    names = {"float16": "F16", "float32": "F32", "int64": "I64", "int32": "I32", "bool": "BOOL"}
    header, blobs, at = {}, [], 0
    for name, x in tensors.items():
        x, dtype = (bfloat16(x), "BF16") if name in bf16 else (x, names[str(x.dtype)])
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        blobs.append(x.tobytes())
        at += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def write_head(folder, config, tensors, shards=1, bf16=()):
    """A head's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, bf16)
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        write_safetensors(folder / name, part, bf16)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
