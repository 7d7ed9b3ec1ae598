"""Texts of many clients against plain decoding: scripts/measure/load.py equality and soak."""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from typing import Any

import typer
from rich.console import Console

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp, so that llama_cpp opens our libllama
from eagle3_llama.bench.prompts import read_prompts
from eagle3_llama.llama.chat import chat_tokens
from eagle3_llama.models import smollm2
from eagle3_llama.runtime.machine import cores

from .client import PROMPTS, Format, Server

# Two texts may differ where the two highest logits are closer than this: the server processes prompts in
# chunks, which changes the order of float sums.
NEAR_TIE = 0.05
console = Console(highlight=False)
COMMON: dict[str, Any] = {
    "n_threads": cores(),
    "n_threads_batch": cores(),
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


def equality(fmt: Format = "Q8_0", requests: int = 200, n_parallel: int = 8, seed: int = 1) -> None:
    """Compare greedy texts of 8 clients with plain decoding of one prompt at a time.

    The answers have various lengths. A random quarter of the clients disconnects early.
    """
    with Server(fmt, n_parallel, 2048) as server:
        jobs = _jobs(random.Random(seed), requests)
        answers = _all(8, lambda j: answer(server, j), jobs)
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


def answer(server: Server, job: tuple[str, int, int | None]) -> str:
    """The text of a streamed greedy answer. The client disconnects after so many chunks."""
    text, n, after = job
    leaves = lambda data: after is not None and data.count(b"\n\n") > after
    return server.streamed(text, n, leaves)[0]


def _compare(fmt: str, pairs: list[tuple[Any, Any]], n_ctx: int) -> tuple[int, int]:
    """(texts that differ from plain decoding's, those of them that first differ at a near tie).

    n_ctx: the server's context size, at which some texts end.
    """
    llm = EagleLlama(str(smollm2(fmt)), n_ctx=n_ctx, **COMMON)
    llm.eagle_params = EagleParams(0)
    plain: dict[tuple[str, int], str] = {}
    different = ties = 0
    for (text, n, leaves), got in pairs:
        if isinstance(got, Exception):
            raise SystemExit(f"a request failed: {got}")
        if (text, n) not in plain:
            llm.reset()  # so that nothing of an earlier prompt is reused
            plain[text, n] = _alone(llm, text, n)
        expected = plain[text, n]
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


def _or_too_long(server: Server, job: tuple[str, int, int | None]) -> str | None:
    """The answer, or None if the server refuses a prompt that is too long for a slot, with status 400."""
    try:
        return answer(server, job)
    except RuntimeError as e:
        if str(e).startswith("400"):
            return None
        raise
