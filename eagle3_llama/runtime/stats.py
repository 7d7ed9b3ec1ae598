"""What drafting did: counted by the round, reset by the user."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EagleStats:
    """Counters since load or the last reset().

    Times are seconds: `target` in llama_decode of rounds, `draft` in the head, `verify` in the sampler,
    `other` in Python and bookkeeping, `prompt` in prompts (head included). tokens counts generated ones.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    target: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    prompt: float = 0.0

    def reset(self) -> None:
        """Back to zero."""
        self.__init__()  # type: ignore[misc]

    def count_round(self, n_drafted: int, n_sampled: int) -> None:
        """One round drafted n_drafted tokens and sampled n_sampled, the last of them the bonus."""
        self.rounds += 1
        self.drafted += n_drafted
        self.accepted += n_sampled - 1
        while len(self.accepted_at) < n_drafted:
            self.accepted_at.append(0)
        for i in range(n_sampled - 1):
            self.accepted_at[i] += 1

    @property
    def accept_per_position(self) -> list[float]:
        """Share of all rounds in which the draft's token at position 1, 2, ... was accepted (unconditional)."""
        return [n / self.rounds for n in self.accepted_at] if self.rounds else []

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round, counting the bonus."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def seconds(self) -> float:
        """Time of generation, prompts not included."""
        return self.target + self.draft + self.verify + self.other

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prompts not included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def time_share(self) -> dict[str, float]:
        """Where generation's time went; sums to 1."""
        total = self.seconds or 1.0
        return {name: getattr(self, name) / total for name in ("target", "draft", "verify", "other")}
