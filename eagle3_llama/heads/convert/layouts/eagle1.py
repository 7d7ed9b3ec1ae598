"""EAGLE-1: fc combines token embedding and feature into one state, then decoder layers follow.

EAGLE-2 uses the same weights and drafts trees.
"""

from __future__ import annotations

from ..config import Config
from .base import Layout


def _matches(config: Config, names: set[str]) -> bool:
    bare = {n.removeprefix("model.") for n in names}
    return (
        "fc.weight" in bare
        and "layers.0.self_attn.q_proj.weight" in bare
        and not bare & {"fc2.weight", "d2t"}
        and not any(n.endswith("hidden_norm.weight") for n in bare)
    )


EAGLE1 = Layout("EAGLE-1", _matches, ("layers.{i}",), arch="eagle")
