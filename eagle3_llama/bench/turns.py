"""One answer in one mode, taking turns with plain decoding of the same prompt."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

from ..llama.chat import generate

TURN = 16  # tokens that each mode generates before it is the other's turn


@dataclasses.dataclass
class Run:
    """One answer in one mode.

    seconds: from the first token to the last. rounds: (index of the round's first token, sampled tokens,
    draft tokens). The first token of an answer comes from the prompt's decode and belongs to no round.
    shares: seconds by part, only for EagleLlama; as sources: by source, its accepted draft tokens and all of
    them. plain: plain decoding of the same prompt, taking turns with
    this run. None for plain decoding itself, and for modes that cannot pause between tokens.
    """

    tokens: list[int]
    seconds: float
    rounds: list[tuple[int, int, int]]
    shares: dict[str, float]
    plain: Run | None = None
    sources: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def take_turns(llm: Any, plain: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
    """Generates one answer with llm, taking turns with plain decoding of the same prompt, unless llm is that.

    A turn takes about a tenth of a second. So changes in the machine's speed affect both alike.
    """
    both = (llm,) if llm is plain else (llm, plain)
    answers = [Answering(x, prompt, n_predict, sampling) for x in both]
    turns = itertools.cycle((answers, answers[::-1]))
    while any([a.go_on(TURN) for a in next(turns)]):  # a list, so that any() skips no answer
        pass
    run, *beside = (a.run() for a in answers)
    return dataclasses.replace(run, plain=beside[0] if beside else None)


class Answering:
    """An answer that is generated piece by piece. The constructor generates the first token, untimed."""

    def __init__(self, llm: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> None:
        llm.reset()
        self._watch = _Watch(llm)
        self._generator = generate(llm, prompt, n_predict, **sampling)
        self._tokens: list[int] = []
        self._seconds = 0.0
        self.go_on(1)
        self._seconds = 0.0

    def go_on(self, n: int) -> bool:
        """Generates up to n more tokens. Returns whether the answer may continue."""
        start, end = time.perf_counter(), len(self._tokens) + n
        for token in itertools.islice(self._generator, n):
            self._watch.saw(len(self._tokens))
            self._tokens.append(token)
        self._seconds += time.perf_counter() - start
        return len(self._tokens) == end

    def run(self) -> Run:
        watch, rounds = self._watch, self._watch.rounds(len(self._tokens))
        return Run(self._tokens, self._seconds, rounds, watch.shares(), sources=watch.sources())


class Counting:
    """A LlamaDraftModel that counts its calls and draft tokens. llama-cpp-python calls it once a round."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rounds, self.drafted = inner, 0, 0

    def __call__(self, ids: Any, **kwargs: Any) -> Any:
        draft = self.inner(ids, **kwargs)
        self.rounds += 1
        self.drafted += len(draft)
        return draft


class _Watch:
    """Records where rounds begin while an answer is generated."""

    def __init__(self, llm: Any) -> None:
        self.stats = getattr(llm, "stats", None)
        self.counts = self.stats
        self.starts: list[tuple[int, int]] = []  # (index of the round's first token, draft tokens so far)
        if self.stats is not None:
            self.stats.reset()
        elif getattr(llm, "draft_model", None) is not None:
            inner = llm.draft_model
            self.counts = llm.draft_model = Counting(inner.inner if isinstance(inner, Counting) else inner)

    def saw(self, index: int) -> None:
        if self.counts is not None and self.counts.rounds > len(self.starts):
            self.starts.append((index, self.counts.drafted))

    def rounds(self, n_tokens: int) -> list[tuple[int, int, int]]:
        return rounds_from(self.starts, n_tokens)

    def shares(self) -> dict[str, float]:
        if self.stats is None:
            return {}
        return {name: getattr(self.stats, name) for name in ("target", "draft", "verify", "other")}

    def sources(self) -> dict[str, tuple[int, int]]:
        if self.stats is None:
            return {}
        drafted, accepted = self.stats.drafted_from, self.stats.accepted_from
        return {source: (accepted[source], n) for source, n in drafted.items() if n}


def rounds_from(starts: list[tuple[int, int]], n_tokens: int) -> list[tuple[int, int, int]]:
    """Rounds as in Run. starts: index of each round's first token, and the draft tokens until then."""
    ends = [start for start, _ in starts[1:]] + [n_tokens]
    drafted = [drafted for _, drafted in starts]
    before = [0, *drafted[:-1]]
    return [(start, end - start, d - b) for (start, _), end, d, b in zip(starts, ends, drafted, before)]
