"""Checkpoint layouts, one table of names per project. A new layout is a file here and an entry in LAYOUTS."""

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

# detect() takes the first that matches
LAYOUTS = (SPECULATORS, TWO_PROJECTIONS, MODELOPT, SPECFORGE, ANGELSLIM, SAFEAILAB, EAGLE1)

__all__ = ["EAGLE1_GGUF", "EAGLE3_GGUF", "LAYOUTS", "Layout", "detect", "rename"]


def detect(config: Config, tensors: dict[str, HeadTensor]) -> Layout:
    """The layout of a checkpoint. Raises EagleError BAD_CONFIG if no layout matches."""
    for layout in LAYOUTS:
        if layout.matches(config, set(tensors)):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    some = ", ".join(sorted(tensors)[:3]) or "none"
    raise EagleError(
        ErrorKind.BAD_CONFIG,
        f"key architectures of config.json is {config.architectures()} and the tensors begin with "
        f"{some}: this is not a known head layout ({known})",
    )


def rename(layout: Layout, tensors: dict[str, HeadTensor]) -> dict[str, HeadTensor]:
    """GGUF name -> tensor.

    Raises EagleError UNSUPPORTED for a tensor that the layout does not have, BAD_VALUE if a weight occurs
    twice.
    """
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
                f"tensor {name} does not belong to a head in the layout "
                f"of {layout.name}: this variant is not supported",
            )
    return out
