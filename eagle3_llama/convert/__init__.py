"""EAGLE-3 heads from their checkpoints to GGUF, as upstream llama.cpp's `eagle3` architecture reads them.

    from eagle3_llama.convert import convert
    report = convert("head/", "target.gguf", "head.gguf", outtype="q8_0")

source -> layout (names) -> geometry (sizes) -> layers, vocabulary, rope -> metadata -> writer. Loads no native code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import EagleError, ErrorKind
from .files import reading
from .geometry import Geometry, measure
from .layers import infer_layers
from .layouts import detect, rename
from .metadata import build_metadata, check_variant
from .rope import read_rope
from .safetensors_file import HeadTensor
from .source import read_source
from .target import read_target
from .vocabulary import absolute_ids
from .writer import QTYPES, OutTensor, Progress, constant, weight, write_gguf

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True)
class ConvertReport:
    out: Path
    n_bytes: int
    n_tensors: int
    layout: str  # the project whose format it was
    layers: list[int]  # captured inputs of target layers
    draft_vocab: int
    notes: list[str]  # what was inferred and why, one line each


def convert(head_dir: str | os.PathLike[str], target: str | os.PathLike[str], out: str | os.PathLike[str], outtype: str = "f16",
            extract_layers: Sequence[int] | None = None, progress: Progress | None = None) -> ConvertReport:  # fmt: skip
    """Convert the checkpoint in `head_dir` for the GGUF `target`, whose tokenizer and sizes it takes; write `out`.

    `outtype`: f32, f16, bf16, q8_0 or q4_0, of the matrices. `extract_layers`: inputs of target layers, ascending,
    where config.json is wrong. `progress(bytes_done, bytes_total)` is called as the file grows.
    Raises EagleError naming tensor or key; `out` is then as it was before.
    """
    head_dir, target, out = Path(head_dir), Path(target), Path(out)
    if outtype not in QTYPES:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"--outtype is {outtype!r:.40}, expected one of {', '.join(QTYPES)}")
    _check_out(head_dir, target, out)
    source = read_source(head_dir)
    config, model = source.config, read_target(target)
    layout = detect(config, source.tensors)
    tensors = rename(layout, source.tensors)
    check_variant(config, layout, tensors)
    g = measure(config, layout, tensors, model)
    layers, note = infer_layers(config, layout, g.n_features, model.n_layer, extract_layers)
    rope = read_rope(config, g.head_dim)
    outs = [constant("rope_freqs.weight", rope.factors)] if rope.factors is not None else []
    outs += _tensors(tensors, g, outtype)
    metadata = build_metadata(head_dir.resolve().name, outtype, config, g, layers, rope, model)
    n_bytes = write_gguf(out, metadata, outs, progress)
    notes = (note, *_notes(layout.name, g, tensors, outs, outtype))
    return ConvertReport(out, n_bytes, len(outs), layout.name, layers, g.draft_vocab, list(notes))


def _tensors(tensors: dict[str, HeadTensor], g: Geometry, outtype: str) -> list[OutTensor]:
    heads = {"blk.0.attn_q.weight": g.n_head, "blk.0.attn_k.weight": g.n_head_kv}
    names = [name for name in g.shapes() if name in tensors and name not in ("d2t", "t2d")]
    outs = [weight(name, tensors[name], outtype, heads.get(name, 0)) for name in names]
    if "d2t" in tensors:
        outs.append(constant("d2t", absolute_ids(tensors["d2t"], tensors.get("t2d"), g.target_vocab)))
    return outs


def _notes(layout: str, g: Geometry, tensors: dict[str, HeadTensor], outs: list[OutTensor], outtype: str) -> list[str]:
    own = {name: "its own" if name in tensors else "the target's" for name in ("token_embd.weight", "output.weight")}
    notes = [f"layout {layout}: hidden size {g.hidden}, {g.n_head}/{g.n_head_kv} heads of {g.head_dim}, "
             f"draft vocabulary {g.draft_vocab} of {g.target_vocab}",
             f"embeddings are {own['token_embd.weight']}, output matrix is {own['output.weight']}"]  # fmt: skip
    short = [t.name for t in outs if len(t.shape) == 2 and t.qtype is not QTYPES[outtype]]
    if short:
        notes.append(f"f16 instead of {outtype}, for their rows are no multiple of 32: {', '.join(short)}")
    return notes


def _check_out(head_dir: Path, target: Path, out: Path) -> None:
    """That writing can succeed, and destroys nothing that is read."""
    with reading(out):
        if out.exists() and not out.is_file():
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{out} is no regular file: name the GGUF to write")
        if not out.parent.is_dir():
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"folder {out.parent} of the output does not exist: create it")
        inputs = [target, *head_dir.glob("*.json"), *head_dir.glob("*.safetensors"), *head_dir.glob("*.bin")]
        if out.exists() and any(path.exists() and path.samefile(out) for path in inputs):
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"{out} is what is to be converted: name another file to write")
