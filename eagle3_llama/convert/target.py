"""What a head takes from its target's GGUF: sizes and tokenizer.

An own reader of the metadata: gguf.GGUFReader trusts lengths it finds and takes seconds for a vocabulary.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
from gguf import GGUFValueType as T

from ..errors import EagleError, ErrorKind
from .files import reading

_SCALARS = {T.UINT8: "<B", T.INT8: "<b", T.UINT16: "<H", T.INT16: "<h", T.UINT32: "<I", T.INT32: "<i", T.FLOAT32: "<f",
            T.UINT64: "<Q", T.INT64: "<q", T.FLOAT64: "<d", T.BOOL: "<?"}  # fmt: skip
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class Value:
    """One key's value as it is to be written again; strings are bytes, arrays lists."""

    value: Any
    type: T
    item_type: T | None = None


@dataclass(frozen=True)
class Target:
    architecture: str
    n_layer: int  # layers that a token passes; those of multi-token prediction are not counted
    n_embd: int
    n_vocab: int
    n_ctx: int | None
    tokenizer: dict[str, Value]


def read_target(path: Path) -> Target:
    """Raises EagleError: BAD_FILE (no GGUF), TRUNCATED, BAD_VALUE (naming the key), HEAD_MISMATCH (a head, no model)."""
    with reading(path), path.open("rb") as f:
        keys = _Reader(f, path).read()
    arch = _string(path, keys, "general.architecture")
    if arch.startswith("eagle"):
        raise EagleError(ErrorKind.HEAD_MISMATCH, f"{path} is a head itself (general.architecture is {arch}): "
                         "give the target model")  # fmt: skip
    tokens = keys.get(_TOKENS)
    if tokens is None or tokens.item_type is not T.STRING or not tokens.value:
        raise EagleError(ErrorKind.BAD_VALUE, f"key {_TOKENS} of {path} is missing: give the target with its tokenizer")
    n_layer = _integer(path, keys, f"{arch}.block_count") - _integer(path, keys, f"{arch}.nextn_predict_layers", 0)
    tokenizer = {k: v for k, v in keys.items() if k.startswith("tokenizer.ggml.") and not (v.type is T.ARRAY and not v.value)}
    n_ctx = _integer(path, keys, f"{arch}.context_length", -1)
    return Target(arch, n_layer, _integer(path, keys, f"{arch}.embedding_length"), len(tokens.value),
                  n_ctx if n_ctx > 0 else None, tokenizer)  # fmt: skip


def _string(path: Path, keys: dict[str, Value], key: str) -> str:
    value = keys.get(key)
    if value is None or value.type is not T.STRING:
        raise EagleError(ErrorKind.BAD_VALUE, f"key {key} of {path} is missing or no string")
    return value.value.decode("utf-8", "replace")


def _integer(path: Path, keys: dict[str, Value], key: str, default: int | None = None) -> int:
    """A size above 0, or the default."""
    if key not in keys and default is not None:
        return default
    value = keys[key].value if key in keys else None
    if type(value) is not int or not (default is not None and value == 0) and not 1 <= value < 1 << 30:
        raise EagleError(ErrorKind.BAD_VALUE, f"key {key} of {path} is missing or not a size")
    return value


class _Reader:
    """Walks the metadata; no read goes, and no count is believed, beyond the size of the file."""

    def __init__(self, f: BinaryIO, path: Path) -> None:
        self.f, self.path, self.pos = f, path, 0
        self.size = path.stat().st_size

    def read(self) -> dict[str, Value]:
        if self.f.read(4) != b"GGUF":
            raise EagleError(ErrorKind.BAD_FILE, f"{self.path} is not a GGUF file: give the target as GGUF")
        self.pos = 4
        if (version := self.scalar(T.UINT32)) not in (2, 3):
            raise EagleError(ErrorKind.BAD_FILE, f"{self.path} is GGUF version {version}, expected 2 or 3, little-endian")
        n_tensors, n_keys = self.scalar(T.UINT64), self.scalar(T.UINT64)
        keys: dict[str, Value] = {}
        for _ in range(n_keys):
            name = self.string().decode("utf-8", "replace")
            keys[name] = self.value(self.type())
        self.check_data(n_tensors, keys)
        return keys

    def value(self, type_: T) -> Value:
        if type_ is not T.ARRAY:
            return Value(self.string() if type_ is T.STRING else self.scalar(type_), type_)
        item, n = self.type(), self.scalar(T.UINT64)
        if item is T.STRING:
            return Value([self.string() for _ in range(n)], type_, item)
        if item is T.ARRAY:
            raise EagleError(ErrorKind.BAD_FILE, f"{self.path} has nested arrays in its metadata, which GGUF "
                             "files of models do not")  # fmt: skip
        fmt = _SCALARS[item]
        data = self.take(n * struct.calcsize(fmt))
        return Value([v for (v,) in struct.iter_unpack(fmt, data)], type_, item)

    def check_data(self, n_tensors: int, keys: dict[str, Value]) -> None:
        """That the data of every tensor ends within the file."""
        ends = dict(self.tensor_end() for _ in range(n_tensors))
        alignment = _integer(self.path, keys, "general.alignment", 32) or 1
        start = -(-self.pos // alignment) * alignment
        for name, end in ends.items():
            if start + end > self.size:
                raise EagleError(ErrorKind.TRUNCATED, f"{self.path} is truncated: tensor {name} ends at byte "
                                 f"{start + end}, the file has {self.size}")  # fmt: skip

    def tensor_end(self) -> tuple[str, int]:
        name = self.string().decode("utf-8", "replace")
        if (n_dims := self.scalar(T.UINT32)) > 4:
            raise EagleError(ErrorKind.BAD_FILE, f"{self.path} is damaged: tensor {name} has {n_dims} dimensions")
        shape = [v for (v,) in struct.iter_unpack("<Q", self.take(8 * n_dims))]
        type_id, offset = self.scalar(T.UINT32), self.scalar(T.UINT64)
        try:
            block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
        except (ValueError, KeyError):
            return name, offset  # a type newer than the gguf package; its size is not known
        return name, offset + math.prod(shape) // block * n_bytes

    def type(self) -> T:
        type_id = self.scalar(T.UINT32)
        try:
            return T(type_id)
        except ValueError:
            raise EagleError(ErrorKind.BAD_FILE, f"{self.path} is damaged: unknown metadata type "
                             f"{type_id} at byte {self.pos}") from None  # fmt: skip

    def scalar(self, type_: T) -> Any:
        fmt = _SCALARS[type_]
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> bytes:
        return self.take(self.scalar(T.UINT64))

    def take(self, n: int) -> bytes:
        if n > self.size - self.pos:
            raise EagleError(ErrorKind.TRUNCATED, f"{self.path} is truncated or damaged: its metadata goes on "
                             f"after its end, {self.size} bytes")  # fmt: skip
        self.pos += n
        data = self.f.read(n)
        if len(data) != n:
            raise EagleError(ErrorKind.TRUNCATED, f"{self.path} was cut short while it was read")
        return data
