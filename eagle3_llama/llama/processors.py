"""Logits processors in a sampler: they read the text before their row, and their errors are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import EagleError
from ..runtime.round_tokens import RoundTokens


class GuardedProcessors:
    """Logits processors whose errors are kept, because llama-cpp-python loses exceptions raised in a sampler.

    text: returns the token ids before the row, int32 [n]; in a round, those before its first token.
    n_good: with an error, the rows of the round before the one that it was raised for.
    """

    def __init__(self, processors: Sequence[Any], text: Callable[[], np.ndarray]) -> None:
        self.processors = processors
        self.text = text
        self.error: BaseException | None = None
        self.n_good = 0
        self._round: np.ndarray | None = None  # the text with the round's tokens
        self._begin = self._n = 0  # tokens before the first row, and before the next one

    def __call__(self, _: Any, scores: Any) -> Any:
        if self.error is not None:
            return scores
        ids = self._next_text()
        try:
            for processor in self.processors:
                scores[:] = processor(ids, scores)
        except BaseException as e:
            self.error, self.n_good = e, max(self._n - self._begin - 1, 0)
        return scores

    def begin_round(self, tokens: Sequence[int]) -> None:
        """The next rows follow the text and the first of these tokens, then the second too, and so on."""
        text = self.text()
        self._round = np.concatenate([text, np.asarray(tokens, np.intc)])
        self._begin = self._n = len(text)

    def end_round(self) -> None:
        self._round = None
        self._begin = self._n = 0

    def _next_text(self) -> np.ndarray:
        if self._round is None:
            return self.text()
        self._n += 1
        return self._round[: self._n]

    def take_error(self) -> BaseException | None:
        """The error, once."""
        error, self.error = self.error, None
        return error

    def raise_error(self) -> None:
        """Raises the error once."""
        if (error := self.take_error()) is not None:
            raise error


def good_rows(
    out: RoundTokens | EagleError, processors: GuardedProcessors | None
) -> tuple[RoundTokens | None, BaseException | None]:
    """The tokens of a round before anything failed, None if its first row did, and what failed behind them.

    Plain decoding has these tokens before it reaches the row that fails. An interrupt takes them along: who
    stops reading before it would never be interrupted.
    """
    error = processors.take_error() if processors is not None else None
    if isinstance(out, EagleError):
        return None, error or out
    if error is None:
        return out._replace(failure=None), out.failure
    if processors is None or processors.n_good == 0 or not isinstance(error, Exception):
        return None, error
    return out.cut(processors.n_good)._replace(failure=None), error
