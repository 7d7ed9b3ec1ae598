"""What the converter has to know of a layout, and the names that nearly all of them share."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..config import Config

# GGUF names: upstream llama.cpp, src/models/eagle3.cpp; fc_norm, fc2, biases and q/k norms are ours
NAMES = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "d2t": "d2t",
    "t2d": "t2d",  # only checked against d2t
    **{f"{name}.{i}.weight": f"fc_norm.{i}.weight" for name in ("fc_norm", "fc_norms") for i in range(64)},
}
BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for kind in ("weight", "bias")
        for theirs, ours in (
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        )
    },
}


class Ids(enum.Enum):
    """What a config's list of layer ids counts."""

    OUTPUTS = "outputs"  # of layers: one less than llama.cpp's layer_inp
    INPUTS = "inputs"  # of layers, n_layer being after the last: llama.cpp's layer_inp


LAYER_IDS = (
    ("eagle_config.eagle_aux_hidden_state_layer_ids", Ids.OUTPUTS),  # SpecForge, ModelOpt; SGLang adds one
    ("eagle_aux_hidden_state_layer_ids", Ids.INPUTS),  # vLLM takes them as they are
)


@dataclass(frozen=True)
class Layout:
    name: str
    matches: Callable[[Config, set[str]], bool]  # config, names of the tensors
    blocks: tuple[str, ...]  # names of decoder layers, {i} for the number; where there is none it is 0
    names: Mapping[str, str] = field(
        default_factory=lambda: NAMES
    )  # of tensors outside the decoder layers -> GGUF
    block_names: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    arch: str = "eagle3"  # of the GGUF; "eagle" takes one feature and no final norm
    layer_ids: tuple[tuple[str, Ids], ...] = (
        LAYER_IDS  # config keys that list the captured layers, the first present counts
    )
    ignored: tuple[str, ...] = (
        "rotary_emb.inv_freq",
    )  # ends of the names of tensors that hold nothing of the head
    flatten: Callable[[Config], Config] = lambda config: (
        config
    )  # its config with the keys where the others have them
    norm_output_gates: bool = (
        False  # its key norm_output says whether there is a final norm, not what is fed back
    )
    norm_before_residual: bool = False  # where config.json does not say
    interleaved: bool = False  # rows of q and k are in llama.cpp's order already, d2t holds ids, not offsets

    def gguf_name(self, name: str) -> str | None:
        """A tensor's name in the checkpoint -> in the GGUF, None if the layout does not know it."""
        name = name.removeprefix("model.")
        for block in self.blocks:
            pattern = re.escape(block).replace(re.escape("{i}"), r"(\d{1,4})") + r"\.(.*)"
            found = re.fullmatch(pattern, name)
            if found and found[found.lastindex] in self.block_names:
                return f"blk.{int(found[1]) if found.lastindex == 2 else 0}.{self.block_names[found[found.lastindex]]}"
        return self.names.get(name)

    def source_name(self, name: str) -> str:
        """A GGUF name -> the checkpoint's, for messages."""
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        if found:
            theirs = next((t for t, ours in self.block_names.items() if ours == found[2]), None)
            return f"{self.blocks[-1].format(i=found[1])}.{theirs}" if theirs else name
        return next((theirs for theirs, ours in self.names.items() if ours == name), name)
