#!/usr/bin/env python3
"""How near many clients come to the speed that the costs of rows allow.

    scripts/measure/batcher_limit.py --fmt Q8_0 --clients 4,8 --rounds 5

The limit is the speed with speculation, relative to without, if the target's rows of the very same rounds
took what was measured at load, with so many tokens in the KV cache, and nothing else took time. The batcher
runs in this process, without HTTP. Only rounds of all clients count. Run it alone on the machine.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import time
from typing import Annotated, Any, NamedTuple

import typer
from load_client import Files, Format, texts_of
from rich.console import Console
from rich.table import Table

from eagle3_llama import EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.machine import cores

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    fmt: Format = "Q8_0",
    clients: Annotated[str, typer.Option(help="numbers of clients, comma-separated")] = "4,8",
    rounds: int = 2,
    n_predict: int = 96,
    prompts: Annotated[int, typer.Option(help="number of prompts, in groups of one a client")] = 16,
    files: Files = None,
) -> None:
    texts = texts_of(files, prompts)
    counts = [int(c) for c in clients.split(",")]
    table = Table("clients", "on / off", "limit", "of limit", "rows a round", title=f"SmolLM2 {fmt}")
    settings = BatchSettings(
        str(smollm2(fmt)), str(shipped_head()), n_parallel=max(counts), n_ctx=2048, n_threads=cores()
    )
    with Batcher(settings) as batcher:
        seen_by = _Rounds(batcher.engine)
        costs = batcher.engine.planner.costs
        for c in counts:
            groups = [texts[i :: len(texts) // c][:c] for i in range(len(texts) // c)]
            seen: dict[bool, list[_RoundSeen]] = {True: [], False: []}
            for i, group in enumerate(groups * rounds):
                for on in (True, False) if i % 2 == 0 else (False, True):
                    seen_by.rounds.clear()
                    _answers_at_once(batcher, group, n_predict, on)
                    seen[on] += [r for r in seen_by.rounds if r.n_slots == c]
            speed = {on: sum(r.tokens for r in rs) / sum(r.seconds for r in rs) for on, rs in seen.items()}
            decode = lambda r: costs.decode(r.rows, r.n_past)
            ideal = {on: sum(r.tokens for r in rs) / sum(map(decode, rs)) for on, rs in seen.items()}
            ratio, most = speed[True] / speed[False], ideal[True] / ideal[False]
            rows = statistics.mean(r.rows for r in seen[True])
            table.add_row(str(c), f"{ratio:.3f}", f"{most:.3f}", f"{ratio / most:.2f}", f"{rows:.1f}")
    Console(highlight=False).print(table)


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


if __name__ == "__main__":
    app()
