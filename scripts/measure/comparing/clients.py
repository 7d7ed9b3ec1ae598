"""How near many clients come to the speed that the costs of rows allow: compare.py --clients.

The limit is the speed with speculation, relative to without, if the target's rows of the very same rounds
took what was measured at load, with so many tokens in the KV cache, and nothing else took time. The batcher
runs in this process, without HTTP. Only rounds of all clients count.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from serving.client import texts_of
from tables import table

from eagle3_llama import EagleParams
from eagle3_llama.batching import Batcher, BatchSettings

from .prompts import files

COLUMNS = ("target", "clients", "on / off", "limit", "of limit", "rows a round")


def run(given: argparse.Namespace, target: Any) -> None:
    """The table of all numbers of clients, who ask --prompts prompts in groups, --rounds times."""
    counts, lines = [int(c) for c in given.clients.split(",")], []
    texts = texts_of(files(given.kinds) if given.kinds else None, max(given.prompts, *counts))
    settings = BatchSettings(
        target.path, target.head, n_parallel=max(counts), n_ctx=given.n_ctx, n_threads=given.t
    )
    with Batcher(settings) as batcher:
        seen_by = _Rounds(batcher.engine)
        for c in counts:
            groups = [texts[i :: len(texts) // c][:c] for i in range(len(texts) // c)]
            seen: dict[bool, list[_RoundSeen]] = {True: [], False: []}
            for i, group in enumerate(groups * given.rounds):
                for on in (True, False) if i % 2 == 0 else (False, True):
                    seen_by.rounds.clear()
                    _answers_at_once(batcher, group, given.n, on)
                    seen[on] += [r for r in seen_by.rounds if r.n_slots == c]
            costs = batcher.engine.planner.costs  # without a head, they are measured at the first draft
            if (
                not all(seen.values()) or costs is None
            ):  # one client's rounds without a draft run several in one call
                raise ValueError(f"no round had all of {c} clients: take 2 or more, and more tokens by -n")
            speed = {on: sum(r.tokens for r in rs) / sum(r.seconds for r in rs) for on, rs in seen.items()}
            decode = lambda r, costs=costs: costs.decode(r.rows, r.n_past)
            ideal = {on: sum(r.tokens for r in rs) / sum(map(decode, rs)) for on, rs in seen.items()}
            ratio, most = speed[True] / speed[False], ideal[True] / ideal[False]
            rows = statistics.mean(r.rows for r in seen[True])
            figures = f"{ratio:.3f}", f"{most:.3f}", f"{ratio / most:.2f}", f"{rows:.1f}"
            lines.append([Path(target.path).stem, str(c), *figures])
    print(table(COLUMNS, lines), flush=True)


class _RoundSeen(NamedTuple):
    n_slots: int
    rows: int
    n_past: float  # tokens in the KV cache of a slot, on average
    tokens: int
    seconds: float


class _Rounds:
    """Records the rounds of an engine."""

    def __init__(self, engine: Any) -> None:
        self.rounds: list[_RoundSeen] = []
        run = engine.round

        def recorded(asks: Any, samplers: Any) -> Any:
            n_past = statistics.mean(engine.n_past(ask.slot) for ask in asks)
            start = time.perf_counter()
            out = run(asks, samplers)
            rows, tokens = sum(1 + r.drafted for r in out), sum(len(r.tokens) for r in out)
            self.rounds.append(_RoundSeen(len(asks), rows, n_past, tokens, time.perf_counter() - start))
            return out

        engine.round = recorded


def _answers_at_once(batcher: Batcher, texts: list[str], n_predict: int, on: bool) -> None:
    """A thread for each prompt."""

    def ask(text: str) -> None:
        with batcher.request(params=None if on else EagleParams(n_max=0)) as llm:
            llm.create_chat_completion(
                [{"role": "user", "content": text}], max_tokens=n_predict, temperature=0.0
            )

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(ask, texts))
