"""GGUF heads: this project's, llama.cpp's, and older ones from before llama.cpp merged eagle3.

The older ones have the key extract_layers and tensors called hidden_norm.
"""

from __future__ import annotations

from .base import BLOCK, NAMES, Ids, Layout

_NAMES = {
    name: name for name in (*NAMES.values(), "fc_norm.weight", "fc2.weight", "fc2.bias", "rope_freqs.weight")
}
_BLOCK = {**{name: name for name in BLOCK.values()}, "hidden_norm.weight": "attn_norm_2.weight"}

# general.architecture tells which one a file has; matches() is not used
EAGLE3_GGUF, EAGLE1_GGUF = (
    Layout(
        "GGUF",
        lambda config, names: False,
        ("blk.{i}",),
        _NAMES,
        _BLOCK,
        arch,
        (("target_layers", Ids.INPUTS),),
        interleaved=True,
    )
    for arch in ("eagle3", "eagle")
)
