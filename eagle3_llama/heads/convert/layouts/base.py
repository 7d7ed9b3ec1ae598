"""The description of a layout, and the tensor names that nearly all layouts share."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..config import Config

# Checkpoint name -> GGUF name. GGUF names come from llama.cpp, src/models/eagle3.cpp. Those of fc_norm, fc2,
# biases and q/k norms are ours.
NAMES = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "d2t": "d2t",
    "t2d": "t2d",  # not written, only checked against d2t
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
    """The meaning of the layer ids in a config."""

    INPUTS = "inputs"  # id k is the input of layer k, llama.cpp's layer_inp k; n_layer is the last output
    EITHER = "either"  # some projects list inputs here, others outputs: layer_inp k + 1


LAYER_IDS = (
    ("eagle_config.eagle_aux_hidden_state_layer_ids", Ids.EITHER),  # SpecForge, ModelOpt; see layers.py
    ("eagle_aux_hidden_state_layer_ids", Ids.INPUTS),  # vLLM uses them unchanged
    ("eagle_config.target_hidden_layer_ids", Ids.EITHER),  # verl-SpeCo reads these keys too
    ("target_hidden_layer_ids", Ids.EITHER),
    ("target_layer_ids", Ids.EITHER),
    ("eagle_config.target_layer_ids", Ids.EITHER),
)


@dataclass(frozen=True)
class Layout:
    """How one project stores its heads.

    matches(config, tensor names): whether a checkpoint has this layout.
    blocks: prefixes of the decoder layers' tensors, {i} is the layer's number; without {i} the number is 0.
    names, block_names: tensor names outside and inside the decoder layers -> GGUF names.
    arch: the GGUF architecture; "eagle" heads take one feature and have no final norm.
    layer_ids: config keys that list the captured layers; the first key that is present counts.
    lists_layers: its heads list their layers; one that does not may read others than EAGLE's rule says.
    ignored: suffixes of tensor names to skip, because they are not weights of the head.
    flatten: moves the keys of a config to the places where the other layouts have them.
    norm_output_gates: the key norm_output tells whether there is a final norm, not which state is fed back.
    norm_before_residual: the value if config.json does not have the key.
    interleaved: rows of q and k are in llama.cpp's order already, and d2t contains ids instead of offsets.
    """

    name: str
    matches: Callable[[Config, set[str]], bool]
    blocks: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    block_names: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    arch: str = "eagle3"
    layer_ids: tuple[tuple[str, Ids], ...] = LAYER_IDS
    lists_layers: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    flatten: Callable[[Config], Config] = lambda config: config
    norm_output_gates: bool = False
    norm_before_residual: bool = False
    interleaved: bool = False

    def gguf_name(self, name: str) -> str | None:
        """The GGUF name of a checkpoint's tensor, None if the layout does not have such a tensor."""
        name = name.removeprefix("model.")
        for block in self.blocks:
            pattern = re.escape(block).replace(re.escape("{i}"), r"(\d{1,4})") + r"\.(.*)"
            found = re.fullmatch(pattern, name)
            *number, rest = found.groups() if found else ("",)
            if rest in self.block_names:
                return f"blk.{int(number[0]) if number else 0}.{self.block_names[rest]}"
        return self.names.get(name)

    def source_name(self, name: str) -> str:
        """The checkpoint's name of a GGUF tensor, for messages."""
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        if found:
            theirs = next((t for t, ours in self.block_names.items() if ours == found[2]), None)
            return f"{self.blocks[-1].format(i=found[1])}.{theirs}" if theirs else name
        return next((theirs for theirs, ours in self.names.items() if ours == name), name)
