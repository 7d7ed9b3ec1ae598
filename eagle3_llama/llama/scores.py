"""Logits of a generation without an n_ctx x n_vocab array, or with one that grows page by page."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np


class OffsetRows(np.ndarray):
    """An array [n, n_vocab] whose first index starts at row0.

    llama-cpp-python indexes scores by position in the sequence. This holds only the rows that it reads.
    """

    row0: int = 0

    def __array_finalize__(self, obj: object) -> None:
        self.row0 = getattr(obj, "row0", 0)

    def __getitem__(self, key: object) -> np.ndarray:
        plain = self.view(np.ndarray)
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if isinstance(first, slice):
            first = slice(self._shifted(first.start), self._shifted(first.stop), first.step)
        elif isinstance(first, (int, np.integer)):
            if 0 <= first < self.row0:
                raise IndexError(f"logits of position {first} were not kept; rows start at {self.row0}")
            first = self._shifted(first)
        index = (first, *rest)
        row: np.ndarray = plain[index]
        return row

    def _shifted(self, i: Any) -> Any:
        """An index of the text's positions as one of the rows. None, or one from the end, stays."""
        return i if i is None or i < 0 else max(i - self.row0, 0)


class ScoreRows:
    """Collects rows of logits, float32 [n_vocab] each, from position row0 on.

    keep_all: False keeps only the last one.
    """

    def __init__(self, n_vocab: int, row0: int, keep_all: bool) -> None:
        self.row0 = row0
        self.keep_all = keep_all
        self.n = 0
        self._rows = np.empty((64 if keep_all else 1, n_vocab), np.float32)

    def add(self, row: np.ndarray) -> np.ndarray:
        """Calls put() with the position after the last one."""
        return self.put(self.row0 + self.n, row)

    def put(self, position: int, row: np.ndarray) -> np.ndarray:
        """Copies the row of a position and returns the copy. Drops later ones; skipped ones are nan."""
        if not self.keep_all:
            self.row0 = position
        i = position - self.row0
        while i >= len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self.n : i] = np.nan
        self._rows[i] = row
        self.n = i + 1
        kept: np.ndarray = self._rows[i]
        return kept

    def array(self) -> OffsetRows:
        """The array that llama-cpp-python may index as `_scores`."""
        out = self._rows[: self.n].view(OffsetRows)
        out.row0 = self.row0
        return out


def reserved_rows(n: int, n_vocab: int) -> np.ndarray:
    """float32 [n, n_vocab] that takes memory only for rows that were written. Others are undefined."""
    if sys.platform != "linux":  # other systems do so with any large array
        return np.empty((n, n_vocab), np.float32)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # otherwise Linux refuses more than the free memory
    pages = mmap.mmap(-1, n * n_vocab * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(pages, np.float32).reshape(n, n_vocab)
