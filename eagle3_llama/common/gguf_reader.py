"""Reads an untrusted GGUF: its keys, the positions of its tensors, and on demand their values.

Unlike gguf.GGUFReader, it checks every length in the file and does not take seconds to read a vocabulary.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGUFValueType as T

from ..errors import EagleError, ErrorKind
from .files import reading
from .no_models import MOST, not_gguf

_SCALARS = {
    T.UINT8: "<B",
    T.INT8: "<b",
    T.UINT16: "<H",
    T.INT16: "<h",
    T.UINT32: "<I",
    T.INT32: "<i",
    T.FLOAT32: "<f",
    T.UINT64: "<Q",
    T.INT64: "<q",
    T.FLOAT64: "<d",
    T.BOOL: "<?",
}


@dataclass(frozen=True)
class Value:
    """The value and type of one key, as they are written again. Strings are bytes, arrays are lists."""

    value: Any
    type: T
    item_type: T | None = None


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor.

    shape: rows first. qtype: None if the type is newer than the gguf package. offset: bytes from the start of
    the file at `path`, which is one of several if the model is split.
    """

    name: str
    shape: tuple[int, ...]
    qtype: gguf.GGMLQuantizationType | None
    offset: int
    n_bytes: int
    path: Path


@dataclass(frozen=True)
class Gguf:
    """The keys and tensors of a file, or of all files of a model; size: their bytes.

    string() and size_of() raise EagleError BAD_VALUE, naming the key.
    """

    path: Path
    keys: dict[str, Value]
    tensors: dict[str, TensorInfo]
    size: int

    def string(self, key: str, default: str | None = None) -> str:
        value = self.keys.get(key)
        if value is None and default is not None:
            return default
        if value is None or value.type is not T.STRING:
            raise EagleError(ErrorKind.BAD_VALUE, f"key {key} of {self.path} is missing or not a string")
        return value.value.decode("utf-8", "replace")

    def size_of(self, key: str, default: int | None = None) -> int:
        """An integer above 0, or the default if the key is missing. With a default, 0 is allowed too."""
        if key not in self.keys and default is not None:
            return default
        value = self.keys[key].value if key in self.keys else None
        if type(value) is not int or not (default is not None and value == 0) and not 1 <= value < 1 << 30:
            raise EagleError(ErrorKind.BAD_VALUE, f"key {key} of {self.path} is missing or not a size")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The unchecked value, or the default. Strings are bytes, arrays are lists."""
        return self.keys[key].value if key in self.keys else default

    def floats(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """A tensor as float32 in its shape, rows first; with `rows`, these rows of a matrix alone.

        Raises EagleError MISSING_TENSOR, and UNSUPPORTED for a type that the gguf package cannot read.
        """
        info = self.tensors.get(name)
        if info is None or info.qtype is None:
            raise EagleError(ErrorKind.MISSING_TENSOR, f"{self.path} has no readable tensor {name}")
        per_row = info.n_bytes // max(math.prod(info.shape[:-1]), 1)
        data = np.memmap(info.path, np.uint8, "r", info.offset, (info.n_bytes,)).reshape(-1, per_row)
        shape = info.shape if rows is None else (len(rows), *info.shape[1:])
        try:
            found = gguf.quants.dequantize(data if rows is None else data[rows], info.qtype)
        except NotImplementedError as e:
            raise EagleError(
                ErrorKind.UNSUPPORTED,
                f"tensor {name} of {self.path} has type {info.qtype.name}, which the gguf package "
                "cannot read",
            ) from e
        return np.array(found, np.float32).reshape(shape)


def read_gguf(path: Path) -> Gguf:
    """Reads the metadata. Raises EagleError: BAD_FILE (not a GGUF, or damaged), TRUNCATED, BAD_VALUE."""
    with reading(path), path.open("rb") as f:
        return _Walk(f, path).read()


def read_architecture(path: Path, most: int | None = None) -> str:
    """general.architecture. Reads no further than that key, which files have first. Raises as read_gguf().

    most: bytes in which the key has to be; a file that has it later is called damaged.
    """
    with reading(path), path.open("rb") as f:
        return _Walk(f, path, most).architecture()


def read_beginning(path: Path) -> tuple[dict[str, str], int]:
    """The texts among the keys before the vocabulary, and the number of tensors. Raises as read_gguf()."""
    with reading(path), path.open("rb") as f:
        return _Walk(f, path).beginning()


def find_size(path: Path, key: str) -> int | None:
    """The value of a key that is a uint32, without a walk through a vocabulary; None if there is none."""
    words = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", T.UINT32)
    with reading(path), path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(words, 0, MOST) + len(words)
        return int.from_bytes(data[at : at + 4], "little") if at >= len(words) else None


class _Walk:
    """Walks through the metadata. Before each read it checks the length against the size of the file."""

    def __init__(self, f: BinaryIO, path: Path, most: int | None = None) -> None:
        self.f, self.path, self.pos = f, path, 0
        size = path.stat().st_size
        self.size = size if most is None else min(size, most)

    def read(self) -> Gguf:
        n_tensors, n_keys = self.begin()
        keys: dict[str, Value] = {}
        for _ in range(n_keys):
            name = self.string().decode("utf-8", "replace")
            keys[name] = self.value(self.type())
        return Gguf(self.path, keys, self.tensors(n_tensors, keys), self.size)

    def architecture(self) -> str:
        for _ in range(self.begin()[1]):
            name, value = self.string(), self.value(self.type())
            if name == b"general.architecture":
                return Gguf(self.path, {name.decode(): value}, {}, self.size).string(name.decode())
        raise EagleError(ErrorKind.BAD_VALUE, f"key general.architecture of {self.path} is missing")

    def beginning(self) -> tuple[dict[str, str], int]:
        n_tensors, n_keys = self.begin()
        found: dict[str, str] = {}
        for _ in range(n_keys):
            name, type_ = self.string().decode("utf-8", "replace"), self.type()
            if name.startswith("tokenizer.") and type_ is T.ARRAY:
                break
            value = self.value(type_).value
            if type_ is T.STRING:
                found[name] = value.decode("utf-8", "replace")
        return found, n_tensors

    def begin(self) -> tuple[int, int]:
        """Reads the header. Returns the numbers of tensors and keys."""
        first = self.f.read(64)
        if first[:4] != b"GGUF":
            raise EagleError(ErrorKind.BAD_FILE, not_gguf(self.path, first))
        self.f.seek(4)
        self.pos = 4
        if (version := self.scalar(T.UINT32)) not in (2, 3):
            raise EagleError(
                ErrorKind.BAD_FILE, f"{self.path} is GGUF version {version}, expected 2 or 3, little-endian"
            )
        return self.scalar(T.UINT64), self.scalar(T.UINT64)

    def value(self, type_: T) -> Value:
        if type_ is not T.ARRAY:
            return Value(self.string() if type_ is T.STRING else self.scalar(type_), type_)
        item, n = self.type(), self.scalar(T.UINT64)
        if item is T.STRING:
            return Value([self.string() for _ in range(n)], type_, item)
        if item is T.ARRAY:
            raise EagleError(
                ErrorKind.BAD_FILE,
                f"{self.path} has nested arrays in its metadata, which no model's GGUF file has",
            )
        fmt = _SCALARS[item]
        data = self.take(n * struct.calcsize(fmt))
        return Value([v for (v,) in struct.iter_unpack(fmt, data)], type_, item)

    def tensors(self, n_tensors: int, keys: dict[str, Value]) -> dict[str, TensorInfo]:
        infos = [self.tensor() for _ in range(n_tensors)]
        given = keys.get("general.alignment")
        alignment = given.value if given is not None else gguf.GGUF_DEFAULT_ALIGNMENT
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise EagleError(
                ErrorKind.BAD_VALUE,
                f"key general.alignment of {self.path} is {alignment!r:.40}, which is not an alignment",
            )
        start = -(-self.pos // alignment) * alignment
        out: dict[str, TensorInfo] = {}
        for name, shape, qtype, offset, n_bytes in infos:
            if start + offset + n_bytes > self.size:
                raise EagleError(
                    ErrorKind.TRUNCATED,
                    f"{self.path} is truncated: tensor {name} ends at byte "
                    f"{start + offset + n_bytes}, the file has {self.size}",
                )
            if name in out:
                raise EagleError(
                    ErrorKind.BAD_FILE, f"{self.path} is damaged: it has two tensors named {name}"
                )
            out[name] = TensorInfo(name, shape, qtype, start + offset, n_bytes, self.path)
        return out

    def tensor(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType | None, int, int]:
        name = self.string().decode("utf-8", "replace")
        if (n_dims := self.scalar(T.UINT32)) > 4:
            raise EagleError(
                ErrorKind.BAD_FILE, f"{self.path} is damaged: tensor {name} has {n_dims} dimensions"
            )
        shape = tuple(v for (v,) in struct.iter_unpack("<Q", self.take(8 * n_dims)))[::-1]
        type_id, offset = self.scalar(T.UINT32), self.scalar(T.UINT64)
        try:
            qtype = gguf.GGMLQuantizationType(type_id)
            block, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
        except (ValueError, KeyError):
            return name, shape, None, offset, 0  # the type is newer than the gguf package: unknown size
        if shape and shape[-1] % block:
            raise EagleError(
                ErrorKind.BAD_FILE,
                f"{self.path} is damaged: the row length of tensor {name} is not a multiple of {block}",
            )
        return name, shape, qtype, offset, math.prod(shape) // block * n_bytes

    def type(self) -> T:
        type_id = self.scalar(T.UINT32)
        try:
            return T(type_id)
        except ValueError:
            raise EagleError(
                ErrorKind.BAD_FILE,
                f"{self.path} is damaged: unknown metadata type {type_id} at byte {self.pos}",
            ) from None

    def scalar(self, type_: T) -> Any:
        fmt = _SCALARS[type_]
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> bytes:
        return self.take(self.scalar(T.UINT64))

    def take(self, n: int) -> bytes:
        if n > self.size - self.pos:
            raise EagleError(
                ErrorKind.TRUNCATED,
                f"{self.path} is truncated or damaged: its metadata ends after the file, {self.size} bytes",
            )
        self.pos += n
        data = self.f.read(n)
        if len(data) != n:
            raise EagleError(ErrorKind.TRUNCATED, f"{self.path} became shorter while it was being read")
        return data
