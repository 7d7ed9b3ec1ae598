"""Expensive requests to a server, many at once: what scripts/measure/server_load.py hostile sends."""

from __future__ import annotations

import functools
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from load_client import chunks

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
    """The requests of hostile() to a port of this machine. It ends when the clients have their answers.

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
        _send(port, "GET", "/health", None)
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
    data = _send(port, "POST", "/v1/chat/completions", body, left(), lag)
    if not stream:
        found = json.loads(data)["choices"][0]["logprobs"]["content"]
    else:
        parts = (c["choices"][0]["logprobs"] or {"content": []} for _, c in chunks(bytearray(data)))
        found = [t for part in parts for t in part["content"]]
    # there may be fewer than 20, because tokens that are parts of characters look alike
    if not all(0 < len(t["top_logprobs"]) <= 20 for t in found):
        raise RuntimeError("a token has no top_logprobs, or too many")
    return len(found)


def tokenize(port: int) -> None:
    _send(port, "POST", "/tokenize", {"content": TEXT})


def _chat(port: int, seconds: float) -> None:
    """A short chat. It waits for a slot behind the long answers, so it has as long as they have."""
    body = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
    _send(port, "POST", "/v1/chat/completions", body, seconds)


def _send(
    port: int, method: str, path: str, body: dict[str, Any] | None, seconds: float = 300.0, lag: float = 0.0
) -> bytes:
    """The bytes of the answer, read after `lag` seconds.

    Raises RuntimeError for a status other than 200, TimeoutError after `seconds`.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    content = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        time.sleep(lag)
        data = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {data[:200]!r}")
        return data
    finally:
        connection.close()
