"""Converts EAGLE heads from their checkpoints to GGUF.

    from eagle3_llama.heads.convert import convert
    report = convert("head/", "target.gguf", "head.gguf", outtype="q8_0")

The output follows llama.cpp's `eagle3` architecture wherever that architecture supports the head. The steps
are: source -> layout (names) -> variant (norms), geometry (sizes) -> layers, vocabulary, rope -> metadata ->
writer. No step loads native code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...common.files import reading
from ...common.model_files import check_models
from ...errors import EagleError, ErrorKind
from .geometry import Geometry, measure
from .layers import infer_layers
from .layouts import Layout, detect, rename
from .metadata import build_metadata
from .names import named_target
from .rope import Rope, read_rope
from .safetensors_file import HeadTensor
from .source import read_source
from .target import read_target
from .unsupported import refuse_unsupported
from .variant import read_variant, unused_tensors
from .vocabulary import absolute_ids
from .writer import QTYPES, OutTensor, Progress, constant, weight, write_gguf

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True)
class ConvertReport:
    out: Path
    n_bytes: int
    n_tensors: int
    layout: str  # the project that defined the checkpoint's format
    layers: list[int]  # the target layers whose inputs are captured
    draft_vocab: int
    notes: list[str]  # what the converter inferred and why, one line each
    other_layers: list[int] | None = None  # what config.json's list may mean as well: only a trial can tell
    guessed_layers: bool = False  # config.json lists none, although such heads do: only a trial can tell


def convert(
    head: str | os.PathLike[str],
    target: str | os.PathLike[str],
    out: str | os.PathLike[str],
    outtype: str | None = None,
    extract_layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Converts a head for the GGUF `target` and writes the GGUF `out`.

    head: a checkpoint folder, or a GGUF head. target: the converter takes its tokenizer and sizes.
    outtype: the type of the matrices, f32, f16, bf16, q8_0 or q4_0; default: f16, or the type in a GGUF head.
    extract_layers: ascending ids of target layers whose inputs the head reads, if config.json is wrong.
    progress(bytes_done, bytes_total) is called while the file is written.

    Raises EagleError, which names the tensor or key. `out` is unchanged then.
    """
    head, target, out = Path(head), Path(target), Path(out)
    outtype = outtype.lower() if outtype is not None else None
    if outtype is not None and outtype not in QTYPES:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"--outtype is {outtype!r:.40}, expected one of {', '.join(QTYPES)}"
        )
    _check_out(head, target, out)
    check_models(target, head if head.is_file() and head.suffix == ".gguf" else None, whole=False)
    source, model = read_source(head), read_target(target)
    outtype = outtype or source.outtype
    if source.layout is None:
        refuse_unsupported(source.config, source.tensors)
    layout = source.layout or detect(source.config, source.tensors)
    config, tensors = layout.flatten(source.config), rename(layout, source.tensors)
    variant = read_variant(config, layout, tensors)
    for name in unused_tensors(variant, layout):
        tensors.pop(name, None)
    g = measure(config, layout, tensors, model, variant)
    found = infer_layers(config, layout, g, model, extract_layers)
    rope = source.rope or read_rope(config, g.head_dim)
    outs = [constant("rope_freqs.weight", rope.factors)] if rope.factors is not None else []
    outs += _tensors(tensors, g, layout, outtype, rope)
    metadata = build_metadata(head.resolve().stem, outtype, config, variant, g, found.ids, rope, model)
    n_bytes = write_gguf(out, g.arch, metadata, outs, progress)
    notes = [found.why, *variant.notes, *_notes(layout.name, g, tensors, outs, outtype)]
    if named := named_target(config, target):
        notes.append(named)
    return ConvertReport(
        out, n_bytes, len(outs), layout.name, found.ids, g.draft_vocab, notes, found.other, found.guessed
    )


def _tensors(
    tensors: dict[str, HeadTensor], g: Geometry, layout: Layout, outtype: str, rope: Rope
) -> list[OutTensor]:
    outs = []
    for name in g.shapes():
        if name in tensors and name not in ("d2t", "t2d") and not name.startswith("fc_norm."):
            heads = 0 if layout.interleaved else _rotated_heads(name, g)
            outs.append(weight(name, tensors[name], outtype, heads, rope.n_dims))
    if "fc_norm.weight" in tensors:
        outs.append(constant("fc_norm.weight", tensors["fc_norm.weight"].read_all()))
    elif "fc_norm.0.weight" in tensors:
        norms = [tensors[f"fc_norm.{i}.weight"].read_all() for i in range(g.n_features)]
        outs.append(constant("fc_norm.weight", np.stack(norms)))
    if "d2t" in tensors:
        ids = absolute_ids(tensors["d2t"], tensors.get("t2d"), g.target_vocab, layout.interleaved)
        outs.append(constant("d2t", ids))
    return outs


def _rotated_heads(name: str, g: Geometry) -> int:
    """The number of attention heads in a tensor that rotary embeddings apply to, 0 for any other tensor."""
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])(_norm)?\.(weight|bias)", name)
    if found is None:
        return 0
    return 1 if found[2] else g.n_head if found[1] == "q" else g.n_head_kv


def _notes(
    layout: str, g: Geometry, tensors: dict[str, HeadTensor], outs: list[OutTensor], outtype: str
) -> list[str]:
    own = {
        name: "its own" if name in tensors else "the target's"
        for name in ("token_embd.weight", "output.weight")
    }
    n = len(g.reads_token)
    notes = [
        f"layout {layout}: {n} decoder layer{'s' * (n > 1)}, hidden size {g.hidden}, "
        f"{g.n_head}/{g.n_head_kv} heads of {g.head_dim}, "
        f"draft vocabulary {g.draft_vocab} of {g.target_vocab}",
        f"embeddings are {own['token_embd.weight']}, output matrix is {own['output.weight']}",
    ]
    matrices = (t for t in outs if len(t.shape) == 2 and t.name != "fc_norm.weight")
    odd = [t.name for t in matrices if t.qtype is not QTYPES[outtype]]
    if odd:
        notes.append(f"f16 instead of {outtype}, because row lengths are no multiple of 32: {', '.join(odd)}")
    return notes


def _check_out(head: Path, target: Path, out: Path) -> None:
    """Checks that `out` can be written, and that it is not one of the inputs."""
    with reading(out):
        if out.exists() and not out.is_file():
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{out} is not a regular file: name the GGUF to write")
        if not out.parent.is_dir():
            message = f"the output folder {out.parent} does not exist: create it"
            raise EagleError(ErrorKind.BAD_ARGUMENT, message)
        files = [p for end in ("json", "safetensors", "bin") for p in head.glob(f"*.{end}")]
        inputs = [target, head] if head.is_file() else [target, *files]
        if out.exists() and any(path.exists() and path.samefile(out) for path in inputs):
            message = f"{out} is an input of the conversion: choose another output file"
            raise EagleError(ErrorKind.BAD_ARGUMENT, message)
