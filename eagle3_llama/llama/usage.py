"""Counts of tokens, as OpenAI's usage object reports them."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class TokenUsage:
    """Tokens of one or more generations.

    prompt: of the prompts, of which `reused` were in the KV cache already. completion: generated, without
    those that end a text. drafted: draft tokens. accepted: accepted draft tokens that reached the caller.
    """

    prompt: int = 0
    reused: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, n) + getattr(other, n) for n in _NAMES))

    def __sub__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*(getattr(self, n) - getattr(other, n) for n in _NAMES))

    def copy(self) -> TokenUsage:
        return dataclasses.replace(self)

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
