"""The draft vocabulary: the target token of each draft id."""

from __future__ import annotations

import numpy as np

from ...errors import EagleError, ErrorKind
from .safetensors_file import HeadTensor


def absolute_ids(d2t: HeadTensor, t2d: HeadTensor | None, n_vocab: int, are_ids: bool = False) -> np.ndarray:
    """The target id of each draft token, int64 [draft vocabulary].

    A checkpoint's d2t contains offsets: target id = i + d2t[i]. A GGUF's contains the ids themselves
    (are_ids). t2d has one flag per target token. Raises EagleError BAD_VALUE if an id is outside the
    vocabulary of n_vocab tokens, if one occurs twice, or if t2d contradicts d2t.
    """
    offsets = d2t.read_all()
    here = np.zeros_like(offsets) if are_ids else np.arange(offsets.size)
    outside = (offsets < -here) | (offsets >= n_vocab - here)  # written so that nothing overflows
    if outside.any():
        i = int(outside.argmax())
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {d2t.name}: entry {i} is {int(offsets[i])}, which means target "
            f"token {int(here[i]) + int(offsets[i])}, outside the vocabulary 0..{n_vocab - 1}",
        )
    ids = offsets + here
    counts = np.bincount(ids, minlength=n_vocab)
    if (counts > 1).any():
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {d2t.name} names target token {int(counts.argmax())} "
            f"{int(counts.max())} times: it is damaged, or does not contain offsets",
        )
    if t2d is not None and not np.array_equal(t2d.read_all() != 0, counts > 0):
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {t2d.name} does not match the tokens in {d2t.name}: download the head again",
        )
    return ids
