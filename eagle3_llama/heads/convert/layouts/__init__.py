"""Which project wrote a checkpoint: a table of names each. A new layout is a file here and a line in LAYOUTS."""

from __future__ import annotations

from ....errors import EagleError, ErrorKind
from ..config import Config
from ..safetensors_file import HeadTensor
from .base import Layout
from .eagle1 import EAGLE1
from .gguf_file import EAGLE1_GGUF, EAGLE3_GGUF
from .midlayer import ANGELSLIM, SAFEAILAB, SPECFORGE
from .modelopt import MODELOPT
from .speculators import SPECULATORS
from .two_projections import TWO_PROJECTIONS

LAYOUTS = (
    SPECULATORS,
    TWO_PROJECTIONS,
    MODELOPT,
    ANGELSLIM,
    SPECFORGE,
    SAFEAILAB,
    EAGLE1,
)  # the first that matches

__all__ = ["EAGLE1_GGUF", "EAGLE3_GGUF", "LAYOUTS", "Layout", "detect", "rename"]


def detect(config: Config, tensors: dict[str, HeadTensor]) -> Layout:
    """Raises EagleError BAD_CONFIG if no layout matches."""
    for layout in LAYOUTS:
        if layout.matches(config, set(tensors)):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    some = ", ".join(sorted(tensors)[:3]) or "none"
    raise EagleError(
        ErrorKind.BAD_CONFIG,
        f"key architectures of config.json is {config.architectures()}, with tensors "
        f"{some}: no known layout of a head ({known})",
    )


def rename(layout: Layout, tensors: dict[str, HeadTensor]) -> dict[str, HeadTensor]:
    """GGUF name -> tensor. Raises EagleError UNSUPPORTED for a tensor that the layout does not know, BAD_VALUE for two of one name."""
    out: dict[str, HeadTensor] = {}
    for name, tensor in tensors.items():
        ours = layout.gguf_name(name)
        if ours in out:
            raise EagleError(
                ErrorKind.BAD_VALUE,
                f"tensors {out[ours].name} and {name} are the same weight: download the head again",
            )
        if ours is not None:
            out[ours] = tensor
        elif not any(name.endswith(end) for end in layout.ignored):
            raise EagleError(
                ErrorKind.UNSUPPORTED,
                f"tensor {name} is not part of a head in the layout "
                f"of {layout.name}: this variant is not supported",
            )
    return out
