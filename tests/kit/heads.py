"""A random head of every layout with real names and config keys, and its weights for the NumPy reference.

Names, config keys and variants are written down here anew, from the projects that define them: nothing of the
converter's.
"""

from dataclasses import dataclass, field

import numpy as np
from tiny_models import N_EMBD, N_HEAD, N_KV, N_VOCAB

from eagle3_llama.heads.compare.reference import ReferenceHead, ReferenceRope

N_LAYER, DRAFT, FF, D = 12, 96, 128, 16  # layers of the target: EAGLE's rule takes 2, 6, 9
EPS, BASE = 1e-6, 20000.0

_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_norm_2.weight": "hidden_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for kind in ("weight", "bias")
        for ours, theirs in {
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }.items()
    },
}
_TOP = {
    "output_norm.weight": "norm.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
}


@dataclass
class Head:
    """A checkpoint's config and tensors. truth: the reference. layers: what the converter should find."""

    config: dict
    tensors: dict
    truth: ReferenceHead
    d2t: np.ndarray
    layers: list
    outputs: tuple = ()


@dataclass
class Recipe:
    """What a layout's head is made of; each flag is a variant that some project publishes."""

    prefix: str = "midlayer"  # of decoder layers, {i} for the number
    config: dict = field(default_factory=dict)
    kind: str = "eagle3"  # eagle1, two_projections
    layers: tuple = (2, 6, 9)
    n_blocks: int = 1
    hidden: int = N_EMBD
    head_dim: int = D
    own_vocab: bool = True  # d2t and lm_head
    embeddings: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    input_norm: bool = False
    fc_norm: str = ""  # name of the norms in the checkpoint
    final_norm: bool = True
    first_norm: bool = False  # EAGLE-1 with an input norm in its first layer
    last_state: bool = False  # EAGLE-3 without fc: the feature is the target's last state after its norm
    norm_before_residual: bool = False
    norm_output: bool = False
    rope: ReferenceRope = field(default_factory=lambda: ReferenceRope(BASE))
    names: str = ""  # before every tensor


def _layer_ids(*ids):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


def _llama3():
    inv = BASE ** (-np.arange(0, D, 2) / D)
    wavelength = 2 * np.pi / inv
    smooth = np.clip((512 / wavelength - 1.0) / (4.0 - 1.0), 0, 1)
    return ReferenceRope(BASE, "llama3", divisors=1 / ((1 - smooth) / 8.0 + smooth))


_LLAMA = {"architectures": ["LlamaForCausalLM"]}
_EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"]}
_SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
}
_MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}

RECIPES = {
    "SafeAILab": Recipe(config=_LLAMA),
    "SafeAILab, wider than its target": Recipe(
        config={**_LLAMA, "target_hidden_size": N_EMBD}, hidden=96, embeddings=True
    ),
    "SpecForge": Recipe(config={**_EAGLE3, **_layer_ids(1, 5, 8)}),
    "SpecForge, no final norm": Recipe(
        config={**_EAGLE3, **_layer_ids(1, 5, 8), "norm_output": False}, final_norm=False
    ),
    "SpecForge, EAGLE-3.1": Recipe(
        config={**_EAGLE3, **_layer_ids(1, 5, 8), "fc_norm": True, "norm_output": True},
        fc_norm="fc_norm",
        norm_output=True,
    ),
    "SpecForge, eight layers": Recipe(
        config={**_EAGLE3, "eagle_aux_hidden_state_layer_ids": [0, 1, 3, 5, 7, 9, 11, 12]},
        layers=(0, 1, 3, 5, 7, 9, 11, 12),
    ),
    "SpecForge, one layer": Recipe(config={**_EAGLE3, "eagle_aux_hidden_state_layer_ids": [2]}, layers=(2,)),
    "verl-SpeCo, five layers": Recipe(
        config={**_EAGLE3, "num_aux_hidden_states": 5, "target_layer_ids": [2, 4, 6, 8, 10]},
        layers=(2, 4, 6, 8, 10),
    ),
    "AngelSlim": Recipe(
        config={"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", "head_dim": 24},
        head_dim=24,
    ),
    "speculators, llama": Recipe(
        "layers.{i}",
        {**_SPECULATORS, "norm_before_residual": True, "norm_before_fc": True},
        input_norm=True,
        norm_before_residual=True,
        embeddings=True,
    ),
    "speculators, qwen3": Recipe(
        "layers.{i}",
        {
            **_SPECULATORS,
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": False,
            "norm_output": True,
            "fc_norm": True,
            "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
        },
        n_blocks=2,
        qk_norm=True,
        fc_norm="fc_norm",
        norm_output=True,
        names="model.",
    ),
    "speculators, four layers": Recipe(
        "layers.{i}",
        {**_SPECULATORS, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 5, 8, 11]},
        layers=(2, 5, 8, 11),
        norm_before_residual=True,
    ),
    "speculators, biases": Recipe(
        "layers.{i}", {**_SPECULATORS, "norm_before_residual": False}, attention_bias=True, mlp_bias=True
    ),
    "ModelOpt, target's output matrix": Recipe(
        "layers.{i}",
        {**_EAGLE3, "eagle_config": {**_MODELOPT, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}},
        own_vocab=False,
    ),
    "ModelOpt, Megatron names": Recipe("midlayer.{i}", {**_EAGLE3, "eagle_config": _MODELOPT}, n_blocks=3),
    "ModelOpt, midlayer": Recipe(
        "midlayer",
        {**_EAGLE3, "eagle_config": {**_MODELOPT, "eagle_aux_hidden_state_layer_ids": [0, 1, 4]}},
        layers=(0, 1, 4),
    ),
    "ModelOpt, without fc": Recipe(
        "layers.{i}",
        {**_EAGLE3, "eagle_config": {**_MODELOPT, "use_aux_hidden_state": False}},
        layers=(N_LAYER,),
        last_state=True,
    ),
    "EAGLE-1": Recipe(
        "layers.{i}",
        {**_LLAMA, "bias": True},
        "eagle1",
        (N_LAYER,),
        own_vocab=False,
        embeddings=True,
        fc_bias=True,
        final_norm=False,
    ),
    "EAGLE-1, no bias": Recipe(
        "layers.{i}",
        {**_LLAMA, "bias": False},
        "eagle1",
        (N_LAYER,),
        n_blocks=2,
        own_vocab=False,
        final_norm=False,
    ),
    "EAGLE-1, ModelOpt's norms": Recipe(
        "layers.{i}",
        {**_EAGLE3, "eagle_config": {**_MODELOPT, "use_aux_hidden_state": False}},
        "eagle1",
        (N_LAYER,),
        own_vocab=False,
        first_norm=True,
    ),
    "two projections": Recipe("layers.{i}", _LLAMA, "two_projections"),
    "two projections, two layers": Recipe(
        "layers.{i}", _EAGLE3, "two_projections", n_blocks=2, own_vocab=False
    ),
    "linear rope": Recipe(
        config={**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
        rope=ReferenceRope(BASE, "linear", 4.0),
    ),
    "partial rope": Recipe(
        config={
            **_EAGLE3,
            "rope_parameters": {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": 0.5},
        },
        head_dim=24,
        qk_norm=True,
        rope=ReferenceRope(BASE, n_dims=12),
    ),
    "llama3 rope": Recipe(
        config={
            **_LLAMA,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        rope=_llama3(),
    ),
    "yarn rope": Recipe(
        config={
            **_LLAMA,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
        rope=ReferenceRope(BASE, "yarn", 4.0, 128, attention_factor=0.1 * np.log(4.0) + 1),
    ),
}
# They differ in what they read of the target, in how many layers they have, and in the rope.
FEW = ["speculators, qwen3", "EAGLE-1", "two projections", "yarn rope"]


def make(name, shared, seed=0, **size):
    """A Head. shared: float32 token_embd, output and output_norm weights of the target, and its epsilon.

    size: n_embd, n_layer, n_vocab of a target that is not tiny_models' own.
    """
    r, rng = RECIPES[name], np.random.default_rng(seed)
    n_target, n_vocab, n_layer = (
        size.get("n_embd", N_EMBD),
        size.get("n_vocab", N_VOCAB),
        size.get("n_layer", N_LAYER),
    )
    hidden = n_target if r.hidden == N_EMBD else r.hidden
    d = r.head_dim
    layers = _layers(r, n_layer)
    matrix = lambda rows, columns: (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(
        np.float16
    )
    vector = lambda n: (1 + 0.2 * rng.standard_normal(n)).astype(np.float16)
    w, n_draft = {}, min(DRAFT, n_vocab - 1)
    if r.kind != "eagle1" and not r.last_state:
        w["fc.weight"] = matrix(hidden, len(layers) * n_target)
    if r.kind != "eagle3":
        w["fc2.weight"] = matrix(hidden, 2 * hidden)
    if r.fc_bias:
        w["fc2.bias"] = vector(hidden)
    if r.fc_norm:
        w["fc_norm.weight"] = np.stack([vector(n_target) for _ in layers])
    if r.input_norm:
        w["enc.output_norm.weight"] = vector(len(layers) * n_target)
    for i in range(r.n_blocks):
        _block(
            w,
            f"blk.{i}.",
            r,
            hidden,
            d,
            r.kind == "eagle3" and i == 0,
            i > 0 or r.kind != "eagle1" or r.first_norm,
            matrix,
            vector,
        )
    if r.final_norm:
        w["output_norm.weight"] = vector(hidden)
    if r.own_vocab:
        w["output.weight"] = matrix(n_draft, hidden)
    if r.embeddings:
        w["token_embd.weight"] = matrix(n_vocab, hidden)
    d2t = np.sort(rng.choice(n_vocab, n_draft, replace=False)) if r.own_vocab else np.arange(n_vocab)
    head = Head(
        _config(r, hidden, n_target, d, n_draft, n_vocab), _tensors(r, w, d2t, n_vocab), None, d2t, layers
    )
    lent = {k: v for k, v in shared.items() if k in ("token_embd.weight", "output.weight") and k not in w}
    feature_norm = (
        (shared["output_norm.weight"], shared["eps"]) if r.kind == "eagle1" or r.last_state else None
    )
    head.truth = ReferenceHead(
        {k: v.astype(np.float32) for k, v in {**lent, **w}.items()},
        N_HEAD,
        N_KV,
        d,
        EPS,
        r.rope,
        r.norm_before_residual,
        r.norm_output,
        feature_norm,
    )
    return head


def _layers(r, n_layer):
    """The recipe's layers for the tiny target. For others, --extract-layers with as many as they have."""
    return (
        list(r.layers)
        if n_layer == N_LAYER
        else [n_layer]
        if r.kind == "eagle1" or r.last_state
        else list(range(n_layer + 1))[: len(r.layers)]
    )


def _block(w, at, r, hidden, d, reads_token, input_norm, matrix, vector):
    width = 2 * hidden if reads_token else hidden
    if input_norm:
        w[at + "attn_norm.weight"] = vector(hidden)
    if reads_token:
        w[at + "attn_norm_2.weight"] = vector(hidden)
    for x, n in (("q", N_HEAD), ("k", N_KV), ("v", N_KV)):
        w[f"{at}attn_{x}.weight"] = matrix(n * d, width)
        if r.attention_bias:
            w[f"{at}attn_{x}.bias"] = vector(n * d)
        if r.qk_norm and x != "v":
            w[f"{at}attn_{x}_norm.weight"] = vector(d)
    w[at + "attn_output.weight"], w[at + "ffn_norm.weight"] = matrix(hidden, N_HEAD * d), vector(hidden)
    if r.attention_bias:
        w[at + "attn_output.bias"] = vector(hidden)
    for x, shape in (("gate", (FF, hidden)), ("up", (FF, hidden)), ("down", (hidden, FF))):
        w[f"{at}ffn_{x}.weight"] = matrix(*shape)
        if r.mlp_bias:
            w[f"{at}ffn_{x}.bias"] = vector(shape[0])


def _tensors(r, w, d2t, n_vocab):
    out = {}
    for name, x in w.items():
        if name.startswith("blk."):
            _, i, rest = name.split(".", 2)
            out[f"{r.prefix.format(i=i)}.{_BLOCK[rest]}"] = x
        elif name == "fc_norm.weight":
            out.update({f"{r.fc_norm}.{i}.weight": row for i, row in enumerate(x)})
        elif r.kind == "eagle1" and name.startswith("fc2."):
            out[name.replace("fc2", "fc")] = x
        else:
            out[_TOP.get(name, name)] = x
    if r.final_norm is False and r.kind == "eagle3":
        out["norm.weight"] = np.full(
            len(w["blk.0.ffn_norm.weight"]), 7.0, np.float16
        )  # there, but not to be used
    if r.own_vocab:
        out["t2d"] = np.isin(np.arange(n_vocab), d2t)
        out["d2t"] = (d2t - np.arange(len(d2t))).astype(np.int64)
    return {r.names + name: x for name, x in out.items()}


def _config(r, hidden, n_target, d, n_draft, n_vocab):
    inner = {
        "hidden_size": hidden,
        "num_attention_heads": N_HEAD,
        "num_key_value_heads": N_KV,
        "intermediate_size": FF,
        "head_dim": d,
        "num_hidden_layers": r.n_blocks,
        "rms_norm_eps": EPS,
        "rope_theta": BASE,
        "max_position_embeddings": 512,
        "vocab_size": n_vocab,
        "hidden_act": "silu",
    }
    if r.attention_bias or r.mlp_bias:
        inner.update(attention_bias=r.attention_bias, mlp_bias=r.mlp_bias)
    outer = {**r.config, **({"target_hidden_size": n_target} if "target_hidden_size" in r.config else {})}
    if r.own_vocab:
        outer["draft_vocab_size"] = n_draft
    if "speculators_config" in outer:
        return {
            **outer,
            "transformer_layer_config": {**inner, "model_type": "qwen3" if r.qk_norm else "llama"},
        }
    return {**inner, **outer}
