"""Expensive requests to a server, many at once: what scripts/measure/hostile.py load sends."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from .client import Format, Server, chunks, send

TEXT = "megabytes of words, " * 50_000  # a megabyte to tokenise


class Hostile(NamedTuple):
    """The results of the expensive requests."""

    answered: dict[str, int]  # by kind
    refused: list[str]  # the errors of the other requests
    rows: list[int]  # for each answer with logprobs, the number of tokens that have them
    slowest_health: float  # seconds
    most_memory: int  # bytes more than before

    def wrong(self, clients: int, tokens: int) -> list[str]:
        """What the server did wrong, one line each."""
        found = [f"refused: {said}" for said in self.refused]
        found += [f"{n} of {tokens} tokens have logprobs" for n in self.rows if n < tokens]
        if len(self.rows) < clients:
            found.append(f"{len(self.rows)} of {clients} answers with logprobs arrived")
        return found


def hostile_load(
    port: int, memory: Callable[[], int], clients: int, tokens: int, texts: int, seconds: float, lag: float
) -> Hostile:
    """The requests of load() to a port of this machine. It ends when the clients have their answers.

    seconds: the longest duration. memory(): the server's memory in bytes. lag: seconds for which one client
    does not read its stream.
    """
    end, over, before = time.monotonic() + seconds, threading.Event(), memory()
    answered: dict[str, int] = {}
    refused: list[str] = []
    rows: list[int] = []
    seen, lock = {"health": 0.0, "memory": before}, threading.Lock()

    def repeat(kind: str, work: Callable[[], Any], most: int, pause: float = 0.0) -> None:
        for _ in range(most):
            if over.is_set() or time.monotonic() > end:
                return
            try:
                result = work()
            except Exception as e:
                with lock:
                    refused.append(f"{kind}: {e!s:.200}")
                continue
            with lock:
                answered[kind] = answered.get(kind, 0) + 1
                if kind == "logprobs":
                    rows.append(result)
            over.wait(pause)

    def look() -> None:
        start = time.perf_counter()
        _send(port, "/health")
        seen["health"] = max(seen["health"], time.perf_counter() - start)
        seen["memory"] = max(seen["memory"], memory())

    left = lambda: max(end - time.monotonic(), 0.1)
    ask = lambda i: functools.partial(_logprobs, port, i, tokens, left, lag if i == 1 else 0.0)
    asking = [threading.Thread(target=repeat, args=("logprobs", ask(i), 1)) for i in range(clients)]
    beside = [
        threading.Thread(target=repeat, args=x)
        for x in (
            ("tokenize", lambda: tokenize(port), texts, 0.05),
            ("tokenize", lambda: tokenize(port), texts, 0.05),
            ("chat", lambda: _chat(port, left()), 10_000, 0.2),
            ("health", look, 1_000_000, 0.1),
        )
    ]
    for t in asking + beside:
        t.start()
    for t in asking:
        t.join()
    over.set()
    for t in beside:
        t.join()
    look()
    return Hostile(answered, refused, rows, seen["health"], seen["memory"] - before)


def load(
    fmt: Format = "Q8_0",
    clients: Annotated[int, typer.Option(help="clients that request logprobs once each")] = 8,
    tokens: int = 2000,
    texts: Annotated[int, typer.Option(help="most texts of a megabyte to tokenise")] = 200,
    n_parallel: int = 4,
    minutes: Annotated[float, typer.Option(help="stop after this time, even if requests are left")] = 9.0,
) -> None:
    """Send expensive requests.

    Clients request long answers with the logprobs of the 20 most likely tokens. Half of them stream, and one
    of these does not read for a minute. At the same time, others tokenise megabytes, chat, and ask for
    /health. It fails if memory grows by 300 MB, if a request is refused or has no answer, or if /health takes
    a second.
    """
    with Server(fmt, n_parallel, 4096) as server:
        server.chat("Name three rivers.", 8)
        tokenize(server.port)  # the first requests allocate memory that the server keeps
        seen = hostile_load(server.port, server.memory, clients, tokens, texts, 60 * minutes, lag=60.0)
    grown = seen.most_memory / 1e6
    wrong = seen.wrong(clients, tokens) + ([f"memory grew by {grown:.0f} MB"] if grown >= 300 else [])
    wrong += [f"/health took {seen.slowest_health:.2f} s"] if seen.slowest_health >= 1 else []
    Console(highlight=False).print(
        f"answered: {seen.answered}; tokens with logprobs {seen.rows}; memory {grown:+.1f} MB at most; "
        f"/health {1000 * seen.slowest_health:.0f} ms at most"
    )
    Console(highlight=False).print("\n".join(wrong) or "nothing wrong")
    raise typer.Exit(1 if wrong else 0)


def _logprobs(port: int, i: int, tokens: int, left: Callable[[], float], lag: float) -> int:
    """The number of an answer's tokens that have logprobs. Every second client streams."""
    stream = i % 2 == 1
    body = {
        "messages": [{"role": "user", "content": f"Tell story {i}."}],
        "max_tokens": tokens,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": stream,
        "logit_bias": {"0": -100, "1": -100, "2": -100},
    }
    data = _send(port, "/v1/chat/completions", body, left(), lag)
    if not stream:
        found = json.loads(data)["choices"][0]["logprobs"]["content"]
    else:
        parts = (c["choices"][0]["logprobs"] or {"content": []} for c in chunks(data))
        found = [t for part in parts for t in part["content"]]
    # there may be fewer than 20, because tokens that are parts of characters look alike
    if not all(0 < len(t["top_logprobs"]) <= 20 for t in found):
        raise RuntimeError("a token has no top_logprobs, or too many")
    return len(found)


def tokenize(port: int) -> None:
    _send(port, "/tokenize", {"content": TEXT})


def _chat(port: int, seconds: float) -> None:
    """A short chat. It waits for a slot behind the long answers, so it has as long as they have."""
    body = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
    _send(port, "/v1/chat/completions", body, seconds)


def _send(port: int, path: str, body: Any = None, seconds: float = 300.0, lag: float = 0.0) -> bytearray:
    """The bytes of the answer. Raises RuntimeError for a status other than 200, OSError after `seconds`."""
    content = None if body is None else json.dumps(body).encode()
    status, data = send(port, path, content, seconds=seconds, lag=lag)
    if status != 200:
        raise RuntimeError(f"{status}: {bytes(data[:200])!r}")
    return data
