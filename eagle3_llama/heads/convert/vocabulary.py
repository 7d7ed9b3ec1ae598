"""The draft vocabulary: which target token each draft id stands for."""

from __future__ import annotations

import numpy as np

from ...errors import EagleError, ErrorKind
from .safetensors_file import HeadTensor


def absolute_ids(d2t: HeadTensor, t2d: HeadTensor | None, n_vocab: int, are_ids: bool = False) -> np.ndarray:
    """[draft vocabulary] int64 target ids: checkpoints hold offsets, target = i + d2t[i]; GGUFs hold `are_ids`.

    Raises EagleError BAD_VALUE: an id outside the target's vocabulary of `n_vocab`, one named twice, or a t2d
    (one flag a target token) that says otherwise.
    """
    offsets = d2t.read_all()
    here = np.zeros_like(offsets) if are_ids else np.arange(offsets.size)
    outside = (offsets < -here) | (offsets >= n_vocab - here)  # compared so that nothing overflows
    if outside.any():
        i = int(outside.argmax())
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {d2t.name}: entry {i} is {int(offsets[i])}, so target "
            f"token {int(here[i]) + int(offsets[i])}, outside the vocabulary 0..{n_vocab - 1}",
        )
    ids = offsets + here
    counts = np.bincount(ids, minlength=n_vocab)
    if (counts > 1).any():
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {d2t.name} names target token {int(counts.argmax())} "
            f"{int(counts.max())} times: it is damaged, or holds no offsets",
        )
    if t2d is not None and not np.array_equal(t2d.read_all() != 0, counts > 0):
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"tensor {t2d.name} does not mark the tokens that {d2t.name} names: one of them is damaged",
        )
    return ids
