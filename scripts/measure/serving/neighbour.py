"""What a hostile client costs the one beside it: scripts/measure/hostile.py neighbour."""

from __future__ import annotations

import contextlib
import copy
import functools
import http.client
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .cases import Case, case
from .client import Format, Server, bearer
from .hurting import OPTIONS, post, template_file

ENDLESS = {"ignore_eos": True}
TEXT = "Tell a long story."
CHAT = "/v1/chat/completions"
BEFORE = 1.0  # seconds for which the other client has been sending when the answer begins


Times = tuple[float, float]  # seconds to the first token, and seconds for each further one


def times_of(server: Server, n_predict: int) -> Times:
    """Of a usual answer."""
    start = time.perf_counter()
    _, last, first = server.streamed(TEXT, n_predict, **ENDLESS)
    n = last["usage"]["completion_tokens"]
    return first, (time.perf_counter() - start - first) / max(n - 1, 1)


def beside(other: Callable[[], object], connections: int, work: Callable[[], Times]) -> Times:
    """The value of work() while other() is called again and again, on several connections."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                other()

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(BEFORE)
        return work()
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, **more}).encode()


def tool(i: int) -> dict[str, Any]:
    properties = {f"p{i}_{k}": {"type": "string", "description": "a word"} for k in range(70)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}


TOOLS = chat(tools=[tool(i) for i in range(60)], tool_choice="required")
ESCAPES = b'{"messages": ["' + b":" * 50_001 + b'\\"' * 9_000
BODY = json.dumps({"prompt": "x", "max_tokens": 1, "metadata": {"k": "a:" * 900_000}}).encode()
# connections, and the request on each
KINDS = {
    "escapes": (1, Case("escapes", CHAT, ESCAPES)),
    "bodies": (2, Case("bodies", "/v1/completions", BODY)),
    "tools": (12, Case("tools", CHAT, TOOLS)),
    "counts": (2, Case("counts", f"{CHAT}/input_tokens", TOOLS)),
}


def unread(server: Server) -> Callable[[], None]:
    """Asks for the items of a stored answer, and reads nothing for as long as the server waits."""
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 1_500_000}]}
    talk = [{"role": "user", "content": "Hi."}, thoughts, {"role": "assistant", "content": "Yes?"}]
    asked = {"input": [*talk, {"role": "user", "content": "No."}], "max_output_tokens": 1}
    made = Case("items", "/v1/responses", json.dumps(asked).encode())
    status, data = post(server.port, made, server.key)  # the template shows no thoughts of earlier turns
    if status != 200:
        raise SystemExit(f"no answer was stored: {status} {data[:300]!r}")
    where = json.loads(data)["id"]

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        try:
            connection.request("GET", f"/v1/responses/{where}/input_items", headers=bearer(server.key))
            time.sleep(1.0)
        finally:
            connection.close()

    return ask


def hostile(server: Server, seeds: Iterator[int], key: str) -> Callable[[], None]:
    def send() -> None:
        post(server.port, case(next(seeds)), key)

    return send


def with_key(server: Server, key: str) -> Server:
    """The same server, asked with another key."""
    other = copy.copy(server)
    other.key = key
    return other


def neighbour(
    rounds: int = 9,
    n_predict: Annotated[int, typer.Option(help="tokens of an answer")] = 1500,
    seed: Annotated[int, typer.Option(help="number of the first case")] = 0,
    fmt: Format = "Q8_0",
    keys: Annotated[bool, typer.Option(help="each client has a key of its own")] = True,
    kind: Annotated[list[str] | None, typer.Option(help="these kinds alone")] = None,
) -> None:
    """Measure what a hostile client costs the one beside it: the time to the first token, and per token.

    The usual client's answer is free text, streamed, and never ends before --n-predict tokens. The other
    client sends its requests, one after the other on each of its connections, from a second before that
    answer until its end. Answers alone and beside it take turns. The figures are the medians of the ratios to
    the answers alone just before and after. The kinds of other clients:

    \b
    usual    sends the same request, shorter: what a neighbour costs who asks nothing odd
    hostile  the cases of `soak`
    escapes  bodies of 68 kB: a text of escaped quotes that never ends, and 50,000 colons
    bodies   bodies of 1.8 MB, on two connections
    tools    60 tools of 70 properties, on twelve connections
    counts   the same at the route that counts tokens, on two connections
    items    asks for the items of a stored answer, 1.5 MB each, and reads nothing, on thirty connections

    Each client has its own API key, by which the server knows it. With --no-keys all are one client to it,
    for which nothing waits.
    """
    found: dict[str, list[Times]] = {}
    options = [*OPTIONS, "--response-store", "64M", "--max-tokens-cap", str(n_predict)]
    own, other = ("own-key", "other-key") if keys else ("", "")
    with template_file("Qwen-Qwen3-0.6B") as file, tempfile.NamedTemporaryFile("w") as known:
        known.write(f"own: {own}\nother: {other}\n")
        known.flush()
        options += file
        options += ["--api-key-file", known.name] if keys else []
        with Server(fmt, 2, n_predict + 512, options=options) as server:
            work = lambda: times_of(with_key(server, own), n_predict)
            theirs = with_key(server, other)
            others: dict[str, tuple[int, Callable[[], object]]] = {
                "usual": (1, lambda: times_of(theirs, 64)),
                "hostile": (1, hostile(server, itertools.count(seed), other)),
                **{
                    name: (n, functools.partial(post, server.port, made, other))
                    for name, (n, made) in KINDS.items()
                },
                "items": (30, unread(theirs)),
            }
            before = [work() for _ in range(3)][-1]
            for name, _ in itertools.product(kind or others, range(rounds)):
                connections, ask = others[name]
                with_it = beside(ask, connections, work)
                after = work()
                alone = [statistics.fmean(pair) for pair in zip(before, after)]
                found.setdefault(name, []).append((with_it[0] / alone[0], with_it[1] / alone[1]))
                before = after
    table = Table("beside", "time to the first token, of alone", "time per token, of alone")
    for name, ratios in found.items():
        said = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in zip(*ratios)]
        table.add_row(name, *said)
    Console(highlight=False).print(table)
