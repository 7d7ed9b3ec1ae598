"""Write the head's GGUF, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from ...common.files import replacing
from ...common.gguf_reader import Value
from ...errors import EagleError, ErrorKind
from .safetensors_file import HeadTensor

QTYPES = {"f32": Q.F32, "f16": Q.F16, "bf16": Q.BF16, "q8_0": Q.Q8_0, "q4_0": Q.Q4_0}
_LARGEST = {
    Q.F32: math.inf,
    Q.BF16: 3.38e38,
    Q.F16: 65504.0,
    Q.Q8_0: 65504.0,
    Q.Q4_0: 65504.0,
}  # blocks scale by a float16
_BLOCK = 16 << 20  # entries converted at a time
_ALIGN = gguf.GGUF_DEFAULT_ALIGNMENT

Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the output; `blocks()` gives it encoded, in order."""

    name: str
    shape: tuple[int, ...]  # rows first
    qtype: Q
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.qtype]
        return math.prod(self.shape) // block * size


def weight(name: str, tensor: HeadTensor, outtype: str, permute_heads: int = 0) -> OutTensor:
    """Vectors are F32; a matrix whose rows do not divide into blocks becomes F16.

    `permute_heads`: see `interleave`. Encoding raises EagleError BAD_VALUE for a NaN, an infinity, or a weight
    that the type cannot hold.
    """
    qtype = QTYPES[outtype] if len(tensor.shape) == 2 else Q.F32
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0]:
        qtype = Q.F16

    def blocks() -> Iterator[np.ndarray]:
        rows = tensor.shape[0] if permute_heads else max(1, _BLOCK // math.prod(tensor.shape[1:]))
        for lo in range(0, tensor.shape[0], rows):
            data = tensor.read(lo, min(lo + rows, tensor.shape[0]))
            yield _encode(tensor.name, interleave(data, permute_heads) if permute_heads else data, qtype)

    return OutTensor(name, tensor.shape, qtype, blocks)


def constant(name: str, data: np.ndarray) -> OutTensor:
    """What was computed: float32 or int64."""
    if data.dtype == np.int64:
        return OutTensor(name, data.shape, Q.I64, lambda: iter([data]))
    return OutTensor(name, data.shape, Q.F32, lambda: iter([_encode(name, data, Q.F32)]))


def interleave(w: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k, [n_head * head_dim, ...]: from pairs (i, i + head_dim/2) to llama.cpp's pairs (2i, 2i + 1)."""
    halves = w.reshape(n_head, 2, w.shape[0] // n_head // 2, -1)  # head, half, i
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(w.shape)


def _encode(name: str, data: np.ndarray, qtype: Q) -> np.ndarray:
    largest = float(np.abs(data).max(initial=0.0))
    if not math.isfinite(largest):
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {name} has a weight that is NaN or infinite: download the head again",
        )
    if largest > _LARGEST[qtype]:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {name} has weights up to {largest:.3g}, too large for "
            f"{qtype.name}: use --outtype bf16 or f32",
        )
    if qtype in (Q.Q8_0, Q.Q4_0):  # what a float16 scale rounds to nothing, and whose inverse overflows
        data = np.where(np.abs(data) < 1e-30, np.float32(0), data)
    return gguf.quants.quantize(np.ascontiguousarray(data), qtype)


def write_gguf(
    out: Path,
    arch: str,
    metadata: dict[str, Value],
    tensors: list[OutTensor],
    progress: Progress | None = None,
) -> int:
    """The file's size in bytes. `out` appears or is replaced only once all is written.

    Raises EagleError NO_SPACE or BAD_FILE, or what the tensors raise.
    """
    total, done = sum(t.n_bytes for t in tensors), 0
    with replacing(out) as part:
        _write_header(part, arch, metadata, tensors)
        with part.open("ab") as f:
            _pad(f)
            for tensor in tensors:
                for block in tensor.blocks():
                    f.write(memoryview(np.ascontiguousarray(block)).cast("B"))
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


def _pad(f) -> None:
    f.write(bytes(-f.tell() % _ALIGN))
