"""Rows of the context that no text makes: llama-cpp-python's handlers decode images and sound there."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from ..errors import EagleError, ErrorKind

_REMEMBERED = 64  # images whose ids are still known when a prompt comes back with them


class MediaRows:
    """Gives the rows of images ids of their own in input_ids.

    Prompts and what the context holds are compared by ids, which the rows of an image do not have:
    llama-cpp-python leaves there what was there before. Ids drawn at random, the same in every run, are no
    text's and no other image's; and they are ids of the vocabulary, so that whoever looks at input_ids need
    not know.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._given: collections.deque[tuple[int, list[int]]] = collections.deque(maxlen=_REMEMBERED)

    def ids(self, start: int, n: int, n_vocab: int) -> np.ndarray:
        """int32 [n] for the n positions from start on."""
        ids = self._random.integers(0, n_vocab, n, np.int32)
        self._given.append((start, ids.tolist()))
        return ids

    def check(self, tokens: Sequence[int], n_kept: int) -> None:
        """Raises EagleError if tokens, a prompt, hold an image of which the context keeps not all.

        n_kept: the first tokens of the prompt, which it keeps.
        """
        for start, ids in self._given:
            if n_kept < start + len(ids) and tokens[start : start + len(ids)] == ids:
                raise EagleError(
                    ErrorKind.CONTEXT_TAKEN,
                    "the prompt holds an image that the context no longer holds: another call has used the "
                    "model since, or every row's logprobs are asked for (echo); send the message again",
                )
