"""Writes the head's GGUF, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from ...common.files import replacing
from ...common.gguf_reader import Value
from ...errors import EagleError, ErrorKind
from .safetensors_file import HeadTensor

QTYPES = {"f32": Q.F32, "f16": Q.F16, "bf16": Q.BF16, "q8_0": Q.Q8_0, "q4_0": Q.Q4_0}
# Q8_0 and Q4_0 scale their blocks by a float16
_LARGEST = {Q.F32: math.inf, Q.BF16: 3.38e38, Q.F16: 65504.0, Q.Q8_0: 65504.0, Q.Q4_0: 65504.0}
_BLOCK = 16 << 20  # entries converted at a time
_ALIGN = gguf.GGUF_DEFAULT_ALIGNMENT

Progress = Callable[[int, int], None]  # (bytes written, bytes in total)


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the output. blocks() yields its encoded data in order."""

    name: str
    shape: tuple[int, ...]  # rows first
    qtype: Q
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.qtype]
        return math.prod(self.shape) // block * size


def weight(name: str, tensor: HeadTensor, outtype: str, permute_heads: int = 0, n_dims: int = 0) -> OutTensor:
    """A tensor of the checkpoint. Vectors become F32; a matrix whose rows are not whole blocks becomes F16.

    permute_heads, n_dims: n_head and n_dims of interleave(); permute_heads 0 keeps the order. Encoding
    raises EagleError BAD_VALUE for NaN, an infinity, or a weight outside the range of the type.
    """
    qtype = QTYPES[outtype] if len(tensor.shape) == 2 else Q.F32
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0]:
        qtype = Q.F16

    def blocks() -> Iterator[np.ndarray]:
        rows = tensor.shape[0] if permute_heads else max(1, _BLOCK // math.prod(tensor.shape[1:]))
        for lo in range(0, tensor.shape[0], rows):
            data = tensor.read(lo, min(lo + rows, tensor.shape[0]))
            data = interleave(data, permute_heads, n_dims) if permute_heads else data
            yield _encode(tensor.name, data, qtype)

    return OutTensor(name, tensor.shape, qtype, blocks)


def constant(name: str, data: np.ndarray) -> OutTensor:
    """A tensor that the converter computed, float32 or int64."""
    if data.dtype == np.int64:
        return OutTensor(name, data.shape, Q.I64, lambda: iter([data]))
    return OutTensor(name, data.shape, Q.F32, lambda: iter([_encode(name, data, Q.F32)]))


def interleave(w: np.ndarray, n_head: int, n_dims: int) -> np.ndarray:
    """Reorders the rows of q or k, [n_head * head_dim, ...], for rotary embeddings of n_dims of each head's.

    Checkpoints rotate the pairs (i, i + n_dims / 2), llama.cpp the pairs (2i, 2i + 1).
    """
    out = w.reshape(n_head, w.shape[0] // n_head, -1).copy()
    halves = out[:, :n_dims].reshape(n_head, 2, n_dims // 2, -1)  # head, half, i
    out[:, :n_dims] = halves.swapaxes(1, 2).reshape(n_head, n_dims, -1)
    return out.reshape(w.shape)


def _encode(name: str, data: np.ndarray, qtype: Q) -> np.ndarray:
    largest = float(np.abs(data).max(initial=0.0))
    if not math.isfinite(largest):
        raise EagleError(
            ErrorKind.BAD_VALUE, f"tensor {name} contains NaN or an infinity: download the head again"
        )
    if largest > _LARGEST[qtype]:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {name} has weights up to {largest:.3g}, too large for "
            f"{qtype.name}: use --outtype bf16 or f32",
        )
    if qtype in (Q.Q8_0, Q.Q4_0):  # tiny values: their float16 scale is 0, and its inverse would overflow
        data = np.where(np.abs(data) < 1e-30, np.float32(0), data)
    return gguf.quants.quantize(np.ascontiguousarray(data), qtype)


def write_gguf(
    out: Path,
    arch: str,
    metadata: dict[str, Value],
    tensors: list[OutTensor],
    progress: Progress | None = None,
) -> int:
    """Writes the file and returns its size in bytes. `out` is created or replaced only when all is written.

    Raises EagleError NO_SPACE or BAD_FILE, and the errors of the tensors' encoding.
    """
    total, done = sum(t.n_bytes for t in tensors), 0
    with replacing(out) as part:
        _write_header(part, arch, metadata, tensors)
        with part.open("ab") as f:
            _pad(f)
            for tensor in tensors:
                for block in tensor.blocks():
                    f.write(np.ascontiguousarray(block).data.cast("B"))
                    done += block.nbytes
                    if progress is not None:
                        progress(done, total)
                _pad(f)
            return f.tell()


def _write_header(part: Path, arch: str, metadata: dict[str, Value], tensors: list[OutTensor]) -> None:
    writer = gguf.GGUFWriter(part, arch)
    for key, v in metadata.items():
        writer.add_key_value(key, v.value, v.type, v.item_type)
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.qtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _pad(f: BinaryIO) -> None:
    f.write(bytes(-f.tell() % _ALIGN))
