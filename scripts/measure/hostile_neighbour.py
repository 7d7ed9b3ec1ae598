#!/usr/bin/env python3
"""What a hostile client costs the one beside it: the time per token of a usual answer, alone and beside it.

    scripts/measure/hostile_neighbour.py [--rounds 9] [--n-predict 1500] [--fmt Q8_0] [--no-keys]

The usual client's answer is free text, streamed, and never ends before --n-predict tokens. The other client
sends hostile_cases.py's requests, one after the other, for as long as that answer takes. Answers alone and
beside it take turns. "usual" has a second client that sends the same request instead: what a neighbour costs
who asks nothing odd. The figures are the medians of the ratios to the answers alone just before and after.

Each client has its own API key, by which the server knows it. With --no-keys all are one client to it, for
which nothing waits.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from hostile_cases import PREFIX, case
from hostile_soak import OPTIONS, post, templates
from load_client import Format, Server
from rich.console import Console
from rich.table import Table

ENDLESS = {"ignore_eos": True}
TEXT = "Tell a long story."


def seconds_a_token(server: Server, n_predict: int) -> float:
    """Of a usual answer, from its first token to its last."""
    start = time.perf_counter()
    first, last = server.first_and_last(TEXT, n_predict, {"report": False}, ENDLESS)
    n = last["usage"]["completion_tokens"]
    return (time.perf_counter() - start - first) / max(n - 1, 1)


def beside(other: Callable[[], None], work: Callable[[], float]) -> float:
    """The value of work() while other() is called again and again."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            other()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        return work()
    finally:
        ended.set()
        thread.join(120)


def hostile(server: Server, seeds: Iterator[int], key: str) -> Callable[[], None]:
    def send() -> None:
        post(server.port, case(next(seeds)), key)

    return send


def with_key(server: Server, key: str) -> Server:
    """The same server, asked with another key."""
    other = copy.copy(server)
    other.key = key
    return other


def main(
    rounds: int = 9,
    n_predict: Annotated[int, typer.Option(help="tokens of an answer")] = 1500,
    seed: Annotated[int, typer.Option(help="number of the first case")] = 0,
    fmt: Format = "Q8_0",
    keys: Annotated[bool, typer.Option(help="each client has a key of its own")] = True,
) -> None:
    """Measure what a hostile client costs the one beside it."""
    found: dict[str, list[float]] = {"usual": [], "hostile": []}
    options = [*OPTIONS, "--max-tokens-cap", str(n_predict)]
    own, other = ("own-key", "other-key") if keys else ("", "")
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file, tempfile.NamedTemporaryFile("w") as known:
        file.write(PREFIX + templates.text("Qwen-Qwen3-0.6B"))
        file.flush()
        known.write(f"own: {own}\nother: {other}\n")
        known.flush()
        options += ["--chat-template-file", file.name]
        options += ["--api-key-file", known.name] if keys else []
        with Server(fmt, 2, n_predict + 512, options=options) as server:
            work = lambda: seconds_a_token(with_key(server, own), n_predict)
            others: dict[str, Any] = {
                "usual": lambda: seconds_a_token(with_key(server, other), 64),
                "hostile": hostile(server, itertools.count(seed), other),
            }
            before = [work() for _ in range(3)][-1]
            for name, _ in itertools.product(found, range(rounds)):
                with_it = beside(others[name], work)
                after = work()
                found[name].append(with_it / statistics.fmean((before, after)))
                before = after
    table = Table("beside a client that is", "time per token, of alone", "least", "most")
    for name, ratios in found.items():
        table.add_row(name, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
