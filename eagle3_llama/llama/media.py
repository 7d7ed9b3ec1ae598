"""Positions of the context that hold images or sound, which llama-cpp-python's handlers decode."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from ..errors import EagleError, ErrorKind

_REMEMBERED = 64  # images whose ids are still known when a later prompt has them


class MediaRows:
    """Gives the positions of images ids in input_ids.

    A prompt and the context are compared by ids, but an image has none: llama-cpp-python leaves the ids that
    were there before. Here an image gets random ids, the same in every run. They differ from those of any
    text or other image. They are ids of the vocabulary, so other code can read input_ids as before.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._given: collections.deque[tuple[int, list[int]]] = collections.deque(maxlen=_REMEMBERED)

    def ids(self, start: int, n: int, n_vocab: int) -> np.ndarray:
        """int32 [n], for the n positions that begin at start."""
        ids = self._random.integers(0, n_vocab, n, np.int32)
        self._given.append((start, ids.tolist()))
        return ids

    def check(self, tokens: Sequence[int], n_kept: int) -> None:
        """Raises EagleError if a prompt has an image that the context does not keep whole.

        tokens: the prompt. n_kept: number of its first tokens that the context keeps.
        """
        for start, ids in self._given:
            if n_kept < start + len(ids) and tokens[start : start + len(ids)] == ids:
                raise EagleError(
                    ErrorKind.CONTEXT_TAKEN,
                    "the context no longer has an image of the prompt: another call has used the model since,"
                    " or the logprobs of every token were requested (echo); send the message again",
                )
