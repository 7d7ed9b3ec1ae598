"""What drafting costs and brings on this machine: the cost of rows, of drafts, and the best fixed length."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, Callable, Sequence

from .chat import chat_tokens, generate
from .params import EagleParams

PROMPTS = [
    "Explain to a friend how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey?",
]
PAYS = 1.02  # predicted gain below which plain decoding is taken: measurement noise


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Costs are seconds. speedup[k] is predicted tokens/s over plain with n_max = k; best is the best k, or 0."""

    rows: dict[int, float]
    draft: dict[int, float]
    accept: list[float]
    speedup: dict[int, float]
    best: int

    def limit(self, k: int) -> float:
        """Speed-up with a head that costs nothing: accepted length over the cost of k + 1 rows."""
        return (1 + sum(self.accept[:k])) * self.rows[1] / self.rows[k + 1]


def measure_rows(llm: Any, sizes: Sequence[int], rounds: int = 9, context: int = 200,
                 step: Callable[[], None] = lambda: None) -> dict[int, float]:
    """Median seconds of one target decode of n rows with logits, after `context` tokens; sizes alternate."""
    engine = llm._engine
    fill_context(llm, context)
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for r in range(rounds + 1):
        for n in sizes:
            start = time.perf_counter()
            engine.decode(100, [101 + i for i in range(n - 1)])
            if r:  # the first builds graphs
                times[n].append(time.perf_counter() - start)
            engine.commit(0)
        step()
    return {n: statistics.median(t) for n, t in times.items()}


def measure_draft(llm: Any, lengths: Sequence[int], rounds: int = 9) -> dict[int, float]:
    """Median seconds the head takes to draft k tokens after a round that kept one row."""
    engine = llm._engine
    times: dict[int, list[float]] = {k: [] for k in lengths}
    for r in range(rounds + 1):
        for k in lengths:
            engine.decode(100, [])
            engine.commit(1)
            start = time.perf_counter()
            engine.draft(101, EagleParams(n_max=k))
            if r:
                times[k].append(time.perf_counter() - start)
    return {k: statistics.median(t) for k, t in times.items()}


def fill_context(llm: Any, n: int) -> None:
    """The slot holds n tokens of ordinary text afterwards."""
    llm.reset()
    text = llm.tokenize((" ".join(PROMPTS) * (n // 20 + 1)).encode(), special=False)
    llm.eval(text[:n])


def tune(llm: Any, max_n: int = 3, n_predict: int = 48, step: Callable[[], None] = lambda: None) -> Tuning:
    """Measures costs and acceptance with the head at hand and picks the best fixed n_max in 0..max_n.

    step is called some STEPS(max_n) times, for a progress bar. Leaves llm's settings and statistics as they were.
    """
    before, stats = llm.eagle_params, dataclasses.replace(llm.stats, accepted_at=list(llm.stats.accepted_at))
    llm.eagle_params = EagleParams(n_max=max_n)
    llm.stats.reset()
    for prompt in PROMPTS:
        for _ in generate(llm, chat_tokens(llm, prompt), n_predict, temp=0.0):
            step()
    accept = (llm.stats.accept_per_position + [0.0] * max_n)[:max_n]
    other = (llm.stats.verify + llm.stats.other) / max(llm.stats.rounds, 1)
    rows = measure_rows(llm, range(1, max_n + 2), step=step)
    draft = {0: 0.0, **measure_draft(llm, range(1, max_n + 1))}
    speedup = {k: (1 + sum(accept[:k])) * (rows[1] + other) / (rows[k + 1] + draft[k] + other) for k in range(max_n + 1)}
    best = max(speedup, key=lambda k: speedup[k])
    llm.stats.__dict__.update(stats.__dict__)
    llm.eagle_params = before
    llm.reset()
    return Tuning(rows, draft, accept, speedup, best if speedup[best] >= PAYS else 0)


def steps(n_predict: int = 48) -> int:
    """How often tune() calls step, at most."""
    return len(PROMPTS) * n_predict + 10
