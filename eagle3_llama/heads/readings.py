"""Other readings of a head, which the self-test tries beside it.

A head still runs if its file has embeddings or a rope base that it was not trained with. A trial shows it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..common.gguf_reader import Gguf, TensorInfo, read_gguf
from ..common.model_reader import read_model
from .convert.writer import OutTensor, write_gguf

EMBEDDINGS, PLAIN_BASE = "the target's embeddings", "rope base 10000"
MENDS = {  # how to convert the head so
    EMBEDDINGS: "remove embed_tokens.weight from the checkpoint, and convert it again",
    PLAIN_BASE: "set rope_theta to 10000 in config.json, and convert it again",
}
ROWS = 512  # rows of the embeddings to compare
_EMBEDDING, _ARCH = "token_embd.weight", "general.architecture"


def other_readings(head: Path, target: Path, folder: Path) -> dict[str, Path]:
    """GGUFs in the folder, by what they change. Raises EagleError as read_gguf(), and NO_SPACE."""
    file, lender = read_gguf(head), read_model(target)
    base = f"{file.string(_ARCH)}.rope.freq_base"
    found: dict[str, Path] = {}
    if _have_one_shape(file, lender):
        found[EMBEDDINGS] = folder / "embeddings.gguf"
        _write(found[EMBEDDINGS], file, lambda name: name != _EMBEDDING)
    given = file.keys.get(base)
    if given is not None and isinstance(given.value, float) and given.value != 10000.0:
        found[PLAIN_BASE] = folder / "base.gguf"
        changed = {**file.keys, base: dataclasses.replace(given, value=10000.0)}
        _write(found[PLAIN_BASE], dataclasses.replace(file, keys=changed))
    return found


def embeddings_alike(head: Path, target: Path) -> float | None:
    """The mean cosine between a head's own embeddings and its target's. None if it has none of that shape."""
    file, lender = read_gguf(head), read_model(target)
    if not _have_one_shape(file, lender):
        return None
    n = file.tensors[_EMBEDDING].shape[0]
    rows = np.linspace(0, n - 1, min(n, ROWS)).astype(np.int64)
    a, b = (f.floats(_EMBEDDING, rows).astype(np.float64) for f in (file, lender))
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean((a * b).sum(1) / np.maximum(size, 1e-30)))


def _have_one_shape(file: Gguf, lender: Gguf) -> bool:
    ours, theirs = (f.tensors.get(_EMBEDDING) for f in (file, lender))
    return ours is not None and theirs is not None and ours.shape == theirs.shape


def _write(out: Path, file: Gguf, keep: Callable[[str], bool] = lambda _: True) -> None:
    keys = {key: value for key, value in file.keys.items() if key != _ARCH}
    tensors = [_copy(info) for name, info in file.tensors.items() if keep(name) and info.qtype is not None]
    write_gguf(out, file.string(_ARCH), keys, tensors)


def _copy(info: TensorInfo) -> OutTensor:
    """The same bytes. A tensor of no rows has none."""
    assert info.qtype is not None

    def blocks() -> Iterator[np.ndarray]:
        if math.prod(info.shape):
            yield np.memmap(info.path, np.uint8, "r", info.offset, (info.n_bytes,))

    return OutTensor(info.name, info.shape, info.qtype, blocks)
