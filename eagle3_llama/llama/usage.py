"""Counts of tokens, as OpenAI's usage object reports them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..runtime.drafted import DRAFTERS, TARGET


@dataclasses.dataclass
class TokenUsage:
    """Tokens of one or more generations.

    prompt: of the prompts, of which `reused` were in the KV cache already. completion: generated, without
    those that end a text. drafted: draft tokens. accepted: accepted draft tokens that reached the caller.
    drafted_from, accepted_from: of both, how many each source offered; see EagleStats.
    """

    prompt: int = 0
    reused: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_from: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    accepted_from: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, n) + getattr(other, n) for n in _NAMES))

    def __sub__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, n) - getattr(other, n) for n in _NAMES))

    def copy(self) -> TokenUsage:
        return self + TokenUsage()

    def count_draft(self, drafted_from: Mapping[str, int]) -> None:
        """Counts a draft. drafted_from: its number of tokens by source, see RoundTokens."""
        for name, n in drafted_from.items():
            self.drafted += n
            if name != TARGET:
                self.drafted_from[name] += n

    def count_accepted(self, source: str) -> None:
        """Counts an accepted draft token. source: who drafted it, see RoundTokens."""
        self.accepted += 1
        if source != TARGET:
            self.accepted_from[source] += 1

    def by_source(self, what: str) -> dict[str, int]:
        """what ("drafted" or "accepted") by the names of the sources."""
        return {**dict.fromkeys(DRAFTERS, 0), **getattr(self, f"{what}_from")}

    def prediction(self) -> dict[str, int]:
        """OpenAI's completion_tokens_details."""
        return {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens_details": self.prediction(),
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }


_NAMES = [f.name for f in dataclasses.fields(TokenUsage)]
