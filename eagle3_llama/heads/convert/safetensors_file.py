"""Reads an untrusted safetensors file without torch, which the safetensors package needs for bfloat16.

Format (https://github.com/huggingface/safetensors#format): 8 bytes with the length N, N bytes of JSON, the
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ...common.files import parse_object, reading
from ...errors import EagleError, ErrorKind

_MAX_HEADER = 100 << 20  # the format's own limit
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of a checkpoint. Its data stays on disk until it is read.

    read(lo, hi) returns the rows lo..hi-1 (or entries of a vector): float32 for float dtypes, else int64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], np.ndarray]

    def read_all(self) -> np.ndarray:
        return self.read(0, self.shape[0])


def read_safetensors(path: Path) -> dict[str, HeadTensor]:
    """The tensors of one file. Raises EagleError BAD_FILE, TRUNCATED or BAD_VALUE, naming file and tensor."""
    with reading(path), path.open("rb") as f:
        size = path.stat().st_size
        n = int.from_bytes(f.read(8), "little")
        if size < 8 or 8 + n > size:
            kind, what = ErrorKind.TRUNCATED, "truncated"
            if n > _MAX_HEADER:  # such a length does not come from a truncated file
                kind, what = ErrorKind.BAD_VALUE, "not a safetensors file"
            raise EagleError(kind, f"{path} is {what}: its header should have {n} bytes, the file has {size}")
        if n > _MAX_HEADER:
            raise EagleError(
                ErrorKind.BAD_VALUE, f"{path} is not a safetensors file: its header would have {n} bytes"
            )
        header = parse_object(f.read(n), f"the header of {path}", ErrorKind.BAD_VALUE)
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, info, 8 + n, size) for name, info in header.items()}


def _tensor(path: Path, name: str, info: Any, start: int, size: int) -> HeadTensor:
    entry = info if isinstance(info, dict) else {}
    dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _naturals(shape) and _naturals(offsets) and len(offsets) == 2):
        raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name}: malformed entry in the header of {path}")
    if dtype not in _DTYPES:
        raise EagleError(
            ErrorKind.UNSUPPORTED, f"tensor {name} has dtype {dtype}: use an F32, F16 or BF16 checkpoint"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {name} has {end - begin} bytes, which does not fit shape {shape} of {dtype}",
        )
    if start + end > size:
        raise EagleError(
            ErrorKind.TRUNCATED,
            f"tensor {name} ends at byte {start + end} of {path}, which has {size}: download it again",
        )

    def read(lo: int, hi: int) -> np.ndarray:
        row = math.prod(shape[1:])
        raw = np.dtype(_DTYPES[dtype])
        with reading(path), path.open("rb") as f:
            f.seek(start + begin + lo * row * raw.itemsize)
            data = f.read((hi - lo) * row * raw.itemsize)
        if len(data) != (hi - lo) * row * raw.itemsize:
            raise EagleError(ErrorKind.TRUNCATED, f"tensor {name} of {path} is truncated: download it again")
        return widen(np.frombuffer(data, raw), dtype).reshape(hi - lo, *shape[1:])

    return HeadTensor(name, tuple(shape), dtype, read)


def widen(data: np.ndarray, dtype: str) -> np.ndarray:
    """Converts raw entries (BF16 as uint16) to float32 or int64."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # a too large float64 becomes infinite, which the writer refuses
        return data.astype(np.float32 if dtype in FLOATS else np.int64)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    short = isinstance(value, list) and len(value) <= 8
    return short and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
