#!/usr/bin/env python3
"""Load tests of the server.

    scripts/measure/server_load.py bench --clients 1,4,8    # throughput with speculation relative to without
    scripts/measure/server_load.py equality --requests 200  # texts of 8 clients against plain decoding
    scripts/measure/server_load.py soak --minutes 30        # the same for half an hour with a small KV cache
    scripts/measure/server_load.py hostile                  # expensive requests: memory, latency of /health

Each command starts `python -m eagle3_llama.server` on a free port. Run it alone on the machine.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import itertools
import json
import os
import random
import re
import shlex
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from hostile_load import hostile_load, tokenize
from load_client import PROMPTS, Files, Format, Server, chunks, texts_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp, so that llama_cpp opens our libllama
from eagle3_llama.bench.prompts import read_prompts
from eagle3_llama.llama.chat import chat_tokens, generate
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.machine import cores

# Two texts may differ where the two highest logits are closer than this: the server processes prompts in
# chunks, which changes the order of float sums.
NEAR_TIE = 0.05
app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False)
_CORES = cores()
_COMMON: dict[str, Any] = {
    "n_threads": _CORES,
    "n_threads_batch": _CORES,
    "flash_attn": True,
    "verbose": False,
}


def _all(n_clients: int, work: Any, jobs: list[Any]) -> list[Any]:
    """The results of work(job) for all jobs, by n_clients threads. A result may be a raised exception."""
    results, todo, lock = [None] * len(jobs), iter(range(len(jobs))), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                i = next(todo, None)
            if i is None:
                return
            try:
                results[i] = work(jobs[i])
            except Exception as e:
                results[i] = e

    threads = [threading.Thread(target=client) for _ in range(n_clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


@app.command()
def bench(
    fmt: Format = "BF16",
    clients: Annotated[str, typer.Option(help="numbers of clients, comma-separated")] = "1,4,8",
    rounds: int = 2,
    n_predict: int = 96,
    seconds: Annotated[float, typer.Option(help="duration of each measurement")] = 4.0,
    prompts: Annotated[
        int, typer.Option(help="number of prompts; each number of clients uses at most eight groups of them")
    ] = 32,
    files: Files = None,
    head: Annotated[bool, typer.Option(help="with the shipped head, or drafts from the text alone")] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure the throughput with speculation relative to without.

    All clients are busy: each repeats its prompt, which is in the server's cache. Measurements with and
    without speculation alternate. For each group of prompts, the median over rounds counts. With one client,
    the speed is also compared with EagleLlama's in another process.
    """
    counts = [int(c) for c in clients.split(",")]
    texts = texts_of(files, prompts)
    if len(texts) < max(counts):
        raise typer.BadParameter(f"{max(counts)} clients need as many prompts, --prompts gives {len(texts)}")
    # groups of prompts by number of clients, with one prompt per client
    few = {c: [texts[i :: len(texts) // c][:c] for i in range(min(len(texts) // c, 8))] for c in counts}
    # (with, without) speculation, by number of clients and group
    runs: dict[int, list[list[tuple[_Load, _Load]]]] = {c: [[] for _ in few[c]] for c in counts}
    with Server(fmt, max(counts), 2048, head) as server:
        todo = [(r, c, i) for r in range(rounds) for c in counts for i in range(len(few[c]))]
        for r, c, i in track(todo, description="measuring", console=console, transient=True):
            order = (True, False) if (r + i) % 2 == 0 else (False, True)
            done = {on: _load(server, few[c][i], n_predict, on, seconds) for on in order}
            runs[c][i].append((done[True], done[False]))
        single = _single(server, fmt, texts[:8], rounds, n_predict) if 1 in counts and head else {}
    columns = ("clients", "tokens/s", "without", "ratio", "quartiles", "drafted per round")
    table = Table(*columns, title=f"SmolLM2 {fmt}, {rounds} rounds")
    ratios = {c: _over(runs[c]) for c in counts}
    pairs = {c: [[b.each() / a.each() for a, b in of_few] for of_few in runs[c]] for c in counts}
    for c in counts:
        on, off = ([pair[k] for of_few in runs[c] for pair in of_few] for k in (0, 1))
        each = [ratio for of_few in pairs[c] for ratio in of_few]
        quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else []
        table.add_row(
            str(c),
            *(f"{sum(x.tokens for x in side) / sum(x.seconds for x in side):.1f}" for side in (on, off)),
            f"{ratios[c]:.3f}",
            " ".join(f"{q:.2f}" for q in quartiles[::2]),
            f"{sum(x.drafted for x in on) / max(sum(x.rounds for x in on), 1):.2f}",
        )
    console.print(table)
    for name, of in single.items():
        console.print(
            f"one client, {name}, relative to EagleLlama in another process: {statistics.median(of):.3f} "
            f"(median of {len(of)})"
        )
    if json_file is not None:
        report = {"command": shlex.join(sys.argv), "prompts": prompts, "format": fmt, "ratios": ratios}
        report |= {"pairs": pairs, "one_client": single}
        json_file.write_text(json.dumps(report) + "\n", encoding="utf-8")


class _Load(NamedTuple):
    """The tokens that clients received during a measurement, and its rounds and draft tokens."""

    seconds: float
    tokens: int
    rounds: float
    drafted: float

    def each(self) -> float:
        """Seconds per token."""
        return self.seconds / self.tokens


def _load(server: Server, texts: list[str], n_predict: int, on: bool, seconds: float) -> _Load:
    """One client per prompt repeats its prompt. Counts only while all clients receive tokens."""
    over, began = threading.Event(), [threading.Event() for _ in texts]
    heard: list[tuple[list[tuple[int, float]], bytearray]] = []  # (bytes so far, when), all bytes

    def client(text: str, has_begun: threading.Event) -> None:
        while not over.is_set():
            marks: list[tuple[int, float]] = []

            def leaves(data: bytearray) -> bool:
                marks.append((len(data), time.perf_counter()))  # noqa: B023 - called in this turn
                has_begun.set()
                return over.is_set()

            try:
                speculative = {} if on else {"enabled": False}
                heard.append((marks, server.stream(text, n_predict, speculative, leaves)))
            finally:
                has_begun.set()

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        asking = [pool.submit(client, *x) for x in zip(texts, began)]
        for event in began:
            event.wait()
        before, start = _metrics(server), time.perf_counter()
        concurrent.futures.wait(asking, seconds, concurrent.futures.FIRST_EXCEPTION)
        end, after = time.perf_counter(), _metrics(server)
        over.set()
        for a in asking:
            a.result()
    tokens = sum(_received(*h, start, end) for h in heard)
    return _Load(end - start, tokens, after[0] - before[0], after[1] - before[1])


def _received(marks: list[tuple[int, float]], data: bytearray, start: float, end: float) -> int:
    """The number of an answer's tokens that arrived between start and end."""
    came = lambda n_bytes: marks[bisect.bisect_left(marks, (n_bytes, 0.0))][1]
    counted = (c for n_bytes, c in chunks(data) if start < came(n_bytes) <= end)
    return sum(len(c.get("eagle", {}).get("positions", ())) for c in counted)


def _over(runs: list[list[tuple[_Load, _Load]]]) -> float:
    """Throughput with speculation relative to without: medians over rounds, slower groups counting more."""
    without = [statistics.median(b.each() for _, b in pairs) for pairs in runs]
    ratios = [statistics.median(a.each() / b.each() for a, b in pairs) for pairs in runs]
    return sum(without) / sum(w * ratio for w, ratio in zip(without, ratios))


def _metrics(server: Server) -> tuple[float, float]:
    """(rounds, draft tokens) so far."""
    text = server.get("/metrics")
    values = lambda name: re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    total = lambda name: sum(map(float, values(name)))
    return total(r"eagle3_rounds_total"), total(r"eagle3_drafted_total")


def _single(
    server: Server, fmt: str, texts: list[str], rounds: int, n_predict: int
) -> dict[str, list[float]]:
    """The generation speed of a single client relative to EagleLlama's, one ratio per prompt and round.

    It measures streamed answers and whole ones.
    """
    llm = EagleLlama(str(smollm2(fmt)), eagle_path=str(shipped_head()), n_ctx=2048, **_COMMON)
    prompts = [chat_tokens(llm, t) for t in texts]

    def here(i: int) -> float:
        start, n = 0.0, 0
        for _ in generate(llm, prompts[i], n_predict, temp=0.0):
            start, n = start or time.perf_counter(), n + 1
        return (n - 1) / (time.perf_counter() - start)

    there = {
        "streamed": lambda i: _speed(server.ask(texts[i], n_predict, {})[1]),
        "whole": lambda i: _speed(server.ask_whole(texts[i], n_predict)),
    }
    sides = [("here", here), *there.items()]
    for i in range(len(texts)):  # so that both planners have seen the prompts
        here(i)
        there["streamed"](i)
    out: dict[str, list[float]] = {name: [] for name in there}
    for r, i in itertools.product(range(rounds), range(len(texts))):
        first = (r + i) % 3
        speed = {name: side(i) for name, side in sides[first:] + sides[:first]}
        for name in there:
            out[name].append(speed[name] / speed["here"])
    llm.close()
    return out


def _speed(answer: dict[str, Any]) -> float:
    return (answer["timings"]["tokens"] - 1) / answer["timings"]["generation"]


# -- texts ------------------------------------------------------------------------------------------------


@app.command()
def equality(fmt: Format = "Q8_0", requests: int = 200, n_parallel: int = 8, seed: int = 1) -> None:
    """Compare greedy texts of 8 clients with plain decoding of one prompt at a time.

    The answers have various lengths. A random quarter of the clients disconnects early.
    """
    with Server(fmt, n_parallel, 2048) as server:
        jobs = _jobs(random.Random(seed), requests)
        answers = _all(8, lambda j: server.ask(*j[:2], {}, j[2]), jobs)
    different, ties = _compare(fmt, list(zip(jobs, answers)), 2048)
    left = sum(j[2] is not None for j in jobs)
    counts = f"{different} different, {ties} of them at near ties (gap under {NEAR_TIE})"
    console.print(f"{requests} requests, {left} disconnected early: {counts}")
    raise typer.Exit(1 if different > ties else 0)


def _jobs(rng: random.Random, n: int) -> list[tuple[str, int, int | None]]:
    """(prompt, max_tokens, chunks after which the client disconnects or None) for n requests."""
    texts = [str(text) for _, text in read_prompts(PROMPTS)]
    leave_after = lambda: rng.randrange(1, 12) if rng.random() < 0.25 else None
    return [(rng.choice(texts), rng.choice([4, 16, 32, 64]), leave_after()) for _ in range(n)]


def _compare(fmt: str, pairs: list[tuple[Any, Any]], n_ctx: int) -> tuple[int, int]:
    """(texts that differ from plain decoding's, those of them that first differ at a near tie).

    n_ctx: the server's context size, at which some texts end.
    """
    llm = EagleLlama(str(smollm2(fmt)), n_ctx=n_ctx, **_COMMON)
    llm.eagle_params = EagleParams(0)
    plain: dict[tuple[str, int], str] = {}
    different = ties = 0
    for (text, n, leaves), answer in pairs:
        if isinstance(answer, Exception):
            raise SystemExit(f"a request failed: {answer}")
        if (text, n) not in plain:
            llm.reset()  # so that nothing of an earlier prompt is reused
            plain[text, n] = _alone(llm, text, n)
        expected, got = plain[text, n], answer[0]
        if got != (expected[: len(got)] if leaves is not None else expected):
            different += 1
            gap = _gap(llm, text, expected, got)
            ties += gap < NEAR_TIE
            same = len(os.path.commonprefix([expected, got]))
            console.print(f"differs after {same} of {len(expected)} characters, logits {gap:.4f} apart")
    llm.close()
    return different, ties


def _alone(llm: Any, text: str, n: int) -> str:
    answer = llm.create_chat_completion(
        messages=[{"role": "user", "content": text}], max_tokens=n, temperature=0.0
    )
    return answer["choices"][0]["message"]["content"]


def _gap(llm: Any, text: str, expected: str, got: str) -> float:
    """The difference of the two highest logits where the texts first differ."""
    import numpy as np

    import llama_cpp

    a, b = (llm.tokenize(x.encode(), add_bos=False) for x in (expected, got))
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    llm.reset()
    llm.eval([*chat_tokens(llm, text), *a[:n]])
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))
    top = np.sort(logits)[-2:]
    return float(top[1] - top[0])


@app.command()
def soak(
    fmt: Format = "Q8_0", minutes: float = 30.0, n_parallel: int = 4, n_ctx: int = 512, seed: int = 1
) -> None:
    """Check for hangs, memory leaks and wrong texts: 8 clients, a quarter disconnecting, a small KV cache."""
    rng, results, memory = random.Random(seed), [], []
    with Server(fmt, n_parallel, n_ctx) as server:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            jobs = _jobs(rng, 40)
            start = time.monotonic()
            results += list(zip(jobs, _all(8, lambda j: _or_too_long(server, j), jobs)))
            memory.append(server.memory())
            rate = 40 / (time.monotonic() - start)
            console.print(f"{len(results)} requests, {rate:.1f} per second, {memory[-1] / 1e6:.1f} MB")
        slots = json.loads(server.get("/slots"))
    if any(s["busy"] for s in (slots["slots"] if isinstance(slots, dict) else slots)):
        raise SystemExit("a slot is still busy")
    quarter = len(memory) // 4
    second, last = memory[quarter : 2 * quarter] or memory[:1], memory[-max(quarter, 1) :]
    growth = statistics.median(last) / statistics.median(second) - 1
    different, ties = _compare(fmt, [r for r in results if r[1] is not None], n_ctx)
    console.print(
        f"{len(results)} requests in {minutes:g} minutes: memory {growth:+.2%} from the second quarter to "
        f"the last, {different} texts different, {ties} of them at near ties"
    )
    raise typer.Exit(1 if growth > 0.01 or different > ties else 0)


def _or_too_long(server: Server, job: tuple[str, int, int | None]) -> tuple[str, dict[str, Any]] | None:
    """The answer, or None if the server refuses a prompt that is too long for a slot, with status 400."""
    try:
        return server.ask(job[0], job[1], {}, job[2])
    except RuntimeError as e:
        if str(e).startswith("400"):
            return None
        raise


@app.command()
def hostile(
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
        server.ask("Name three rivers.", 8, {})
        tokenize(server.port)  # the first requests allocate memory that the server keeps
        seen = hostile_load(server.port, server.memory, clients, tokens, texts, 60 * minutes, lag=60.0)
    grown = seen.most_memory / 1e6
    wrong = seen.wrong(clients, tokens) + ([f"memory grew by {grown:.0f} MB"] if grown >= 300 else [])
    wrong += [f"/health took {seen.slowest_health:.2f} s"] if seen.slowest_health >= 1 else []
    console.print(
        f"answered: {seen.answered}; tokens with logprobs {seen.rows}; memory {grown:+.1f} MB at most; "
        f"/health {1000 * seen.slowest_health:.0f} ms at most"
    )
    console.print("\n".join(wrong) or "nothing wrong")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    app()
