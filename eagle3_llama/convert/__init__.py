"""EAGLE heads of the wild to GGUF: `convert()`; needs no native library, and of the target only its GGUF."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Callable, Sequence

from .geometry import Geometry, read_geometry
from .layers import resolve_layers
from .layouts import detect
from .source import open_head
from .target import Target, read_target
from .writer import OUTTYPES, write_head


@dataclasses.dataclass(frozen=True)
class Report:
    """What was written: notes are lines for the user, e.g. where layer ids come from."""

    out: Path
    layout: str
    layers: list[int]
    notes: list[str]
    n_tensors: int


def convert(head_dir: str | os.PathLike[str], target: str | os.PathLike[str], out: str | os.PathLike[str], outtype: str = "f16",
            extract_layers: Sequence[int] | None = None, progress: Callable[[int, int], None] | None = None) -> Report:
    """Converts an EAGLE-3 head (config.json and safetensors) for a target GGUF and writes it to out.

    outtype is the type of matrices: f32, f16, bf16, q8_0, q4_0. extract_layers overrides the layer ids, which
    count as llama.cpp's layer_inp. progress(done, total) counts tensors. Raises EagleError naming the tensor or
    key; out is then left as it was. Upstream llama.cpp's draft-eagle3 reads the file too.
    """
    source = open_head(Path(head_dir))
    layout = detect(source)
    tgt: Target = read_target(Path(target))
    geometry: Geometry = read_geometry(source, layout, tgt)
    layers, note = resolve_layers(source.config, geometry.n_layers_captured, tgt.n_layer, extract_layers)
    notes = [note]
    n = write_head(source, layout, geometry, tgt, layers, Path(out), outtype, notes, progress)
    return Report(Path(out), layout.name, layers, notes, n)


__all__ = ["OUTTYPES", "Report", "convert"]
