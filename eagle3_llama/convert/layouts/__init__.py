"""Which project wrote a checkpoint: a table of names each. A new layout is a file here and a line in LAYOUTS."""

from __future__ import annotations

from ...errors import EagleError, ErrorKind
from ..config import Config
from ..safetensors_file import HeadTensor
from .base import Layout
from .midlayer import ANGELSLIM, SAFEAILAB, SPECFORGE

LAYOUTS = (ANGELSLIM, SPECFORGE, SAFEAILAB)  # the first that matches

__all__ = ["LAYOUTS", "Layout", "detect", "rename"]


def detect(config: Config, tensors: dict[str, HeadTensor]) -> Layout:
    """Raises EagleError BAD_CONFIG if no layout matches."""
    for layout in LAYOUTS:
        if layout.matches(config, set(tensors)):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    some = ", ".join(sorted(tensors)[:3]) or "none"
    raise EagleError(ErrorKind.BAD_CONFIG, f"key architectures of config.json is {config.architectures()}, with tensors "
                     f"{some}: no known layout of a head ({known})")  # fmt: skip


def rename(layout: Layout, tensors: dict[str, HeadTensor]) -> dict[str, HeadTensor]:
    """GGUF name -> tensor. Raises EagleError UNSUPPORTED for a tensor that the layout does not know."""
    out = {}
    for name, tensor in tensors.items():
        if name in layout.tensors:
            out[layout.tensors[name]] = tensor
        elif not any(name.endswith(end) for end in layout.ignored):
            raise EagleError(ErrorKind.UNSUPPORTED, f"tensor {name} is not part of an EAGLE-3 head in the layout "
                             f"of {layout.name}: this variant is not supported")  # fmt: skip
    return out
