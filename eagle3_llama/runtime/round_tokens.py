"""The tokens of a round: one record, from the engine to whoever reads them."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import EagleError
from .drafted import TARGET, Draft

NOTHING: Mapping[str, int] = types.MappingProxyType({})


class RoundTokens(NamedTuple):
    """The tokens that one round sampled: accepted draft tokens, then the bonus. Or the first after a prompt.

    Or those of several rounds without a draft, one of each.

    positions: of each token its position in the accepted draft, 0 if the target sampled it. sources: of each
    token who drafted it, the name of a source or BOTH; TARGET if the target sampled it, or the caller drafted
    it. drafted_from: number of draft tokens by who drafted them. levels: number of positions that the draft
    tokens were for, fewer than the draft tokens in a tree. rounds: of which the tokens are. failure: what
    failed in the row behind them, which plain decoding has not reached before its next step.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    sources: Sequence[str]
    drafted_from: Mapping[str, int] = NOTHING
    levels: int = 0
    rounds: int = 1
    failure: EagleError | None = None

    @classmethod
    def sampled(cls, tokens: Sequence[int], draft: Draft, failure: EagleError | None = None) -> RoundTokens:
        """The tokens that verification of a draft sampled. failure: then all tokens are of the draft."""
        n = len(tokens)
        if not draft.tokens:
            return cls.plain(tokens)
        if failure is not None:
            places = [*range(1, n + 1)]
            return cls(tokens, places, draft.along(tokens), draft.counts(), draft.levels, failure=failure)
        sources = [*draft.along(tokens[:-1]), TARGET]
        return cls(tokens, [*range(1, n), 0], sources, draft.counts(), draft.levels)

    @classmethod
    def plain(cls, tokens: Sequence[int]) -> RoundTokens:
        """The tokens of rounds without a draft."""
        n = len(tokens)
        return cls(tokens, [0] * n, [TARGET] * n, rounds=n)

    @classmethod
    def first(cls, token: int) -> RoundTokens:
        """The token that was sampled after a prompt: nothing was drafted."""
        return cls([token], [0], [TARGET])

    @property
    def drafted(self) -> int:
        """Number of draft tokens."""
        return sum(self.drafted_from.values())

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens among the tokens."""
        return sum(position > 0 for position in self.positions)

    def cut(self, n: int) -> RoundTokens:
        """The same round with its first n tokens alone."""
        return self._replace(tokens=self.tokens[:n], positions=self.positions[:n], sources=self.sources[:n])
