"""A head's directory: config.json and its tensors. Nothing in it is trusted.

safetensors is read by hand (header, then slices of the file): its numpy reader knows no bfloat16, and a
damaged header must be an error that names the tensor.
Source of the format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind

MAX_HEADER = 100 << 20  # safetensors' own limit
MAX_DIM = 1 << 40
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32,
          "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor on disk: shape as in PyTorch, bytes at offset of file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int


class Head:
    """config.json as a dict, and tensors by name."""

    def __init__(self, path: Path, config: dict[str, Any], entries: dict[str, Entry]) -> None:
        self.path, self.config, self.entries = path, config, entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; EagleError MISSING_TENSOR names it."""
        return self._entry(name).shape

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"tensor {name} is missing from {self.path}")
        return self.entries[name]

    def integers(self, name: str) -> np.ndarray:
        """An integer tensor as int64."""
        e = self._entry(name)
        if e.dtype not in ("I64", "I32", "I16", "I8", "U8", "BOOL"):
            raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name} is {e.dtype}, expected integers")
        return self._read(e).astype(np.int64)

    def floats(self, name: str) -> np.ndarray:
        """A weight as float32; NaN and infinity are refused."""
        e = self._entry(name)
        if e.dtype not in ("F64", "F32", "F16", "BF16"):
            raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name} is {e.dtype}, expected F32, F16 or BF16")
        raw = self._read(e)
        out = (raw.astype(np.uint32) << 16).view(np.float32) if e.dtype == "BF16" else raw.astype(np.float32)
        if not np.isfinite(out).all():
            raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name} has NaN or infinite values: the checkpoint is damaged")
        return out

    def _read(self, e: Entry) -> np.ndarray:
        dtype, n = np.dtype(DTYPES[e.dtype]), math.prod(e.shape)
        with open(e.file, "rb") as f:
            f.seek(e.offset)
            raw = f.read(n * dtype.itemsize)
        if len(raw) != n * dtype.itemsize:
            raise EagleError(ErrorKind.TRUNCATED, f"tensor {e.name}: {e.file.name} is truncated")
        return np.frombuffer(raw, dtype).reshape(e.shape)


def open_head(path: Path) -> Head:
    """Reads config.json and the headers of the safetensors of a head's directory."""
    if not path.is_dir():
        raise EagleError(ErrorKind.BAD_FILE, f"no such directory: {path}")
    config = _json_object(path / "config.json")
    entries: dict[str, Entry] = {}
    for file in _files(path):
        for name, entry in _header(file).items():
            if name in entries:
                raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name} is in two files, {entries[name].file.name} and {file.name}")
            entries[name] = entry
    return Head(path, config, entries)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot read {file}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise EagleError(ErrorKind.BAD_CONFIG, f"{file.name} is no JSON: {e}") from e
    if not isinstance(data, dict):
        raise EagleError(ErrorKind.BAD_CONFIG, f"{file.name} is no JSON object")
    return data


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _json_object(index).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) and weight_map else None
        if names is None or not all(isinstance(n, str) and n == Path(n).name and n not in ("", ".", "..") for n in names):
            raise EagleError(ErrorKind.BAD_CONFIG, f"{index.name}: weight_map does not name files of this directory")
        return [path / n for n in sorted(names)]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for p in path.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle, which is not read: save it as safetensors first" if pickles else ""
    raise EagleError(ErrorKind.BAD_FILE, f"{path} has no model.safetensors{hint}")


def _header(file: Path) -> dict[str, Entry]:
    try:
        size = file.stat().st_size
        with open(file, "rb") as f:
            prefix = f.read(8)
            n = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= n <= min(MAX_HEADER, size - 8):
                raise EagleError(ErrorKind.TRUNCATED, f"{file.name} is truncated or no safetensors file (header of {n} bytes in {size})")
            header = json.loads(f.read(n))
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot read {file}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise EagleError(ErrorKind.BAD_VALUE, f"{file.name}: its safetensors header is damaged ({type(e).__name__})") from e
    if not isinstance(header, dict):
        raise EagleError(ErrorKind.BAD_VALUE, f"{file.name}: its safetensors header is no object")
    return {name: _entry(file, name, item, 8 + n, size) for name, item in header.items() if name != "__metadata__"}


def _entry(file: Path, name: str, item: Any, base: int, size: int) -> Entry:
    bad = EagleError(ErrorKind.BAD_VALUE, f"{file.name}: tensor {name[:200]!r} has a damaged header entry")
    if not isinstance(item, dict):
        raise bad
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    ints = lambda xs: isinstance(xs, list) and all(type(x) is int and 0 <= x < MAX_DIM for x in xs)  # noqa: E731
    if not (isinstance(dtype, str) and ints(shape) and len(shape) <= 4 and ints(offsets) and len(offsets) == 2):
        raise bad
    if dtype not in DTYPES:
        raise EagleError(ErrorKind.BAD_VALUE, f"tensor {name[:200]} is {dtype[:20]}, which no head uses")
    if offsets[1] - offsets[0] != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise bad
    if base + offsets[1] > size:
        raise EagleError(ErrorKind.TRUNCATED, f"tensor {name}: {file.name} is truncated, it has {size} bytes of {base + offsets[1]}")
    return Entry(name, dtype, tuple(shape), file, base + offsets[0])
