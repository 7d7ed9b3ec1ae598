"""Which project wrote a head, and what it calls the tensors. One table of names, one entry a layout."""

from __future__ import annotations

import dataclasses
from typing import Callable

from ..errors import EagleError, ErrorKind
from .source import Head

# our name -> GGUF name, and its shape in terms of the geometry (rows, columns), as in PyTorch
GGUF_NAMES = {
    "fc": "fc.weight",
    "attn_norm": "blk.0.attn_norm.weight",
    "hidden_norm": "blk.0.attn_norm_2.weight",
    "wq": "blk.0.attn_q.weight",
    "wk": "blk.0.attn_k.weight",
    "wv": "blk.0.attn_v.weight",
    "wo": "blk.0.attn_output.weight",
    "ffn_norm": "blk.0.ffn_norm.weight",
    "ffn_gate": "blk.0.ffn_gate.weight",
    "ffn_up": "blk.0.ffn_up.weight",
    "ffn_down": "blk.0.ffn_down.weight",
    "output_norm": "output_norm.weight",
    "output": "output.weight",
    "tok_embd": "token_embd.weight",
}

_MIDLAYER = {
    "fc": "fc.weight",
    "attn_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "wq": "midlayer.self_attn.q_proj.weight",
    "wk": "midlayer.self_attn.k_proj.weight",
    "wv": "midlayer.self_attn.v_proj.weight",
    "wo": "midlayer.self_attn.o_proj.weight",
    "ffn_norm": "midlayer.post_attention_layernorm.weight",
    "ffn_gate": "midlayer.mlp.gate_proj.weight",
    "ffn_up": "midlayer.mlp.up_proj.weight",
    "ffn_down": "midlayer.mlp.down_proj.weight",
    "output_norm": "norm.weight",
    "output": "lm_head.weight",
    "tok_embd": "embed_tokens.weight",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """name: for the user. tensors: our name -> the checkpoint's. fits: whether a config is of this project."""

    name: str
    tensors: dict[str, str]
    fits: Callable[[dict], bool]

    def tensor(self, ours: str) -> str:
        return self.tensors[ours]


def _architectures(config: dict) -> list[str]:
    names = config.get("architectures")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


LAYOUTS = [
    Layout("AngelSlim", _MIDLAYER, lambda c: "Eagle3LlamaForCausalLM" in _architectures(c)),
    Layout("SpecForge", _MIDLAYER, lambda c: "LlamaForCausalLMEagle3" in _architectures(c)),
    Layout("SafeAILab", _MIDLAYER, lambda c: "LlamaForCausalLM" in _architectures(c) and "draft_vocab_size" in c),
]

# tensors that no layout here can hold: taking the head without them would draft nonsense
FOREIGN = {
    "midlayer.self_attn.q_norm.weight": "q and k norms", "midlayer.self_attn.q_proj.bias": "attention biases",
    "fc_norm.0.weight": "per-feature norms (EAGLE-3.1)", "fc2.weight": "a second projection", "fc.bias": "a biased fc (EAGLE-1)",
    "input_norm.weight": "a norm before fc", "layers.0.self_attn.q_proj.weight": "layers.N.* names",
}


def detect(head: Head) -> Layout:
    """The layout of a head; EagleError BAD_CONFIG if none fits."""
    for name, what in FOREIGN.items():
        if name in head.entries:
            raise EagleError(ErrorKind.UNSUPPORTED, f"tensor {name}: heads with {what} are not supported yet")
    for layout in LAYOUTS:
        if layout.fits(head.config):
            return layout
    raise EagleError(ErrorKind.BAD_CONFIG, f"config.json: key architectures is {head.config.get('architectures')!r}, "
                     f"which is no EAGLE-3 layout known here ({', '.join(x.name for x in LAYOUTS)})")
