"""Statistics about drafting: counted after every round, reset by the user."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

from .drafted import DRAFTERS, TARGET
from .round_tokens import RoundTokens


def _none() -> dict[str, int]:
    return dict.fromkeys(DRAFTERS, 0)


@dataclasses.dataclass(repr=False)
class EagleStats:
    """Counters since the model was loaded or since the last reset(). str() sums them up in one line.

    tokens: generated tokens. drafted, accepted: draft tokens. accepted_at: accepted draft tokens by position.
    drafted_from, accepted_from: draft tokens by who offered them: the name of the only source that did, such
    as "head", "text" or "grammar", or "both" if several did. A caller's own draft tokens are in none of them.
    Times in seconds: target (llama_decode in rounds), draft (the head), verify (the sampler), other (Python
    and bookkeeping), prompt (prompts, including the head's part).
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    drafted_from: dict[str, int] = dataclasses.field(default_factory=_none)
    accepted_from: dict[str, int] = dataclasses.field(default_factory=_none)
    target: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    prompt: float = 0.0

    def reset(self) -> None:
        """Sets all counters to zero."""
        names = list(self.drafted_from)
        vars(self).update(vars(EagleStats()))
        self.add_sources(names)

    def add_sources(self, names: Iterable[str]) -> None:
        """Counts these sources of drafts too, from zero."""
        for name in names:
            self.drafted_from.setdefault(name, 0)
            self.accepted_from.setdefault(name, 0)

    def __repr__(self) -> str:
        return f"<EagleStats since the load or the last reset(): {self}>"

    def __str__(self) -> str:
        """Tokens, tokens a second and a round, and the draft tokens by who offered them."""
        said = [f"{self.tokens} tokens"]
        if self.seconds:
            said.append(f"{self.tokens_per_second:.1f} a second")
        if self.rounds:
            said.append(f"{self.mean_accepted_length:.2f} a round")
        by = [f"{n} {self.accepted_from[n]} of {m}" for n, m in self.drafted_from.items() if m]
        drafts = f"{self.accepted} of {self.drafted} draft tokens accepted" if self.drafted else "no drafts"
        return ", ".join([*said, drafts]) + (f" ({', '.join(by)})" if by else "")

    def copy(self) -> EagleStats:
        """The counters as they are now."""
        return copy.deepcopy(self)

    def since(self, before: EagleStats) -> EagleStats:
        """The counts since an earlier copy(); all of it after a reset(). It has no accepted_at."""
        now = dataclasses.replace(self.copy(), accepted_at=[])
        for name, then in vars(before).items() if before.tokens <= self.tokens else ():
            if isinstance(then, dict):
                mine = getattr(now, name)
                mine.update({source: mine[source] - n for source, n in then.items()})
            elif not isinstance(then, list):
                setattr(now, name, getattr(now, name) - then)
        return now

    def count_round(self, out: RoundTokens) -> None:
        """Counts a round, or several, and their tokens as draft tokens alone: see tokens."""
        self.rounds += out.rounds
        if not out.drafted_from:
            return
        accepted = out.accepted
        self.drafted += out.drafted
        self.accepted += accepted
        self.accepted_at += [0] * (out.levels - len(self.accepted_at))
        for i in range(accepted):
            self.accepted_at[i] += 1
        self.add_sources(name for name in out.drafted_from if name != TARGET)
        for name in self.drafted_from:
            self.drafted_from[name] += out.drafted_from.get(name, 0)
            self.accepted_from[name] += out.sources.count(name)

    @property
    def accept_per_position(self) -> list[float]:
        """For draft positions 1, 2, ...: the share of all rounds whose draft token there was accepted."""
        return [n / self.rounds for n in self.accepted_at] if self.rounds else []

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per round, including the bonus."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of generation, without prompts."""
        return self.target + self.draft + self.verify + self.other

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, without the time for prompts."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def time_share(self) -> dict[str, float]:
        """Shares of the generation time by part. They add up to 1."""
        total = self.seconds or 1.0
        return {name: getattr(self, name) / total for name in ("target", "draft", "verify", "other")}
