"""Counts of tokens, as OpenAI's usage object reports them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..runtime.drafted import DRAFTERS, SOURCES


@dataclasses.dataclass
class TokenUsage:
    """Tokens of one or more generations.

    prompt: of the prompts, of which `reused` were in the KV cache already. completion: generated, without
    those that end a text. drafted: draft tokens. accepted: accepted draft tokens that reached the caller. Of
    both, how many the head alone offered, the text alone, or both.
    """

    prompt: int = 0
    reused: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_head: int = 0
    drafted_text: int = 0
    drafted_both: int = 0
    accepted_head: int = 0
    accepted_text: int = 0
    accepted_both: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, n) + getattr(other, n) for n in _NAMES))

    def __sub__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, n) - getattr(other, n) for n in _NAMES))

    def copy(self) -> TokenUsage:
        return dataclasses.replace(self)

    def count_draft(self, drafted_from: Sequence[int]) -> None:
        """Counts a draft. drafted_from: its number of tokens by source, see RoundTokens."""
        if any(drafted_from):
            self.drafted += sum(drafted_from)
            self._count("drafted", drafted_from)

    def count_accepted(self, source: int) -> None:
        """Counts an accepted draft token. source: bits, see SOURCES."""
        self.accepted += 1
        self._count("accepted", [int(bits == source) for bits in range(len(SOURCES))])

    def _count(self, what: str, by_source: Sequence[int]) -> None:
        for name, n in zip(SOURCES, by_source):
            if name in DRAFTERS:
                setattr(self, f"{what}_{name}", getattr(self, f"{what}_{name}") + n)

    def by_source(self, what: str) -> dict[str, int]:
        """what ("drafted" or "accepted") by the names of the sources."""
        return {name: getattr(self, f"{what}_{name}") for name in DRAFTERS}

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
