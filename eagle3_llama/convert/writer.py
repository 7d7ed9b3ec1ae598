"""The head's GGUF: upstream llama.cpp's keys and tensor names for its eagle3 architecture."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Callable

import gguf
import numpy as np

from ..errors import EagleError, ErrorKind
from .geometry import Geometry
from .layouts import GGUF_NAMES, Layout
from .rope import rope_scaling
from .source import Head
from .target import Target

OUTTYPES = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16,
            "q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16,
              "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0}


def write_head(head: Head, layout: Layout, geometry: Geometry, target: Target, layers: list[int], out: Path, outtype: str,
               notes: list[str], progress: Callable[[int, int], None] | None) -> int:
    """Writes out through a temporary file beside it; returns the number of tensors."""
    if outtype not in OUTTYPES:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"--outtype {outtype!r} is unknown; known are {', '.join(OUTTYPES)}")
    names = [n for n in GGUF_NAMES if (n != "output" or geometry.has_output) and (n != "tok_embd" or geometry.has_embeddings)]
    try:
        fd, part = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent)
        os.close(fd)
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot write into {out.parent}: {e.strerror or e}") from e
    try:
        writer = gguf.GGUFWriter(part, "eagle3")
        _keys(writer, geometry, target, layers, outtype, head)
        keys, factors = rope_scaling(head.config, geometry.n_embd_head, geometry.rope_theta)
        for method, value in keys:
            getattr(writer, method)(value)
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        for i, ours in enumerate(names):
            _tensor(writer, ours, _weight(head, layout, geometry, ours), outtype, notes)
            if progress:
                progress(i + 1, len(names))
        if geometry.d2t is not None:
            writer.add_tensor("d2t", geometry.d2t.astype(np.int64))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, out)
    except OSError as e:
        kind = ErrorKind.NO_SPACE if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ErrorKind.BAD_FILE
        raise EagleError(kind, f"cannot write {out}: {e.strerror or e}") from e
    finally:
        if os.path.exists(part):
            os.unlink(part)
    return len(names) + (geometry.d2t is not None) + (factors is not None)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _keys(w: gguf.GGUFWriter, g: Geometry, target: Target, layers: list[int], outtype: str, head: Head) -> None:
    w.add_type("model")
    w.add_name(f"{head.path.resolve().name} (EAGLE-3 head)")
    w.add_file_type(FILE_TYPES[outtype])
    w.add_block_count(1)
    w.add_context_length(g.n_ctx)
    w.add_embedding_length(g.n_embd)
    w.add_feed_forward_length(g.n_ff)
    w.add_head_count(g.n_head)
    w.add_head_count_kv(g.n_head_kv)
    w.add_key_length(g.n_embd_head)
    w.add_value_length(g.n_embd_head)
    w.add_rope_dimension_count(g.n_embd_head)
    w.add_rope_freq_base(g.rope_theta)
    w.add_layer_norm_rms_eps(g.norm_eps)
    w.add_vocab_size(target.n_vocab)
    w.add_array("eagle3.target_layers", layers)
    w.add_uint32("eagle3.target_hidden_size", g.n_embd_target)
    w.add_bool("eagle3.norm_before_residual", False)
    w.add_bool("eagle3.norm_before_fc", False)
    for key, value, kind, element in target.tokenizer:
        w.add_key_value(key, value, kind, element)


def _weight(head: Head, layout: Layout, g: Geometry, ours: str) -> np.ndarray:
    x = head.floats(layout.tensor(ours))
    if ours == "wq":
        return interleave(x, g.n_head)
    return interleave(x, g.n_head_kv) if ours == "wk" else x


def interleave(x: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k from Hugging Face's half-split rotary layout to GGUF's, which pairs neighbours."""
    rows, columns = x.shape
    return x.reshape(n_head, 2, rows // n_head // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensor(w: gguf.GGUFWriter, ours: str, x: np.ndarray, outtype: str, notes: list[str]) -> None:
    name = GGUF_NAMES[ours]
    if x.ndim == 1:
        w.add_tensor(name, x)
        return
    kind = OUTTYPES[outtype]
    if outtype in ("q8_0", "q4_0") and x.shape[1] % 32:
        notes.append(f"{name} stays f16: rows of {x.shape[1]} values are no multiple of 32")
        kind = OUTTYPES["f16"]
    if kind is OUTTYPES["f16"] and np.abs(x).max(initial=0) > 65504:
        raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name} has values beyond float16: take --outtype bf16 or f32")
    w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(x), kind), raw_dtype=kind)
