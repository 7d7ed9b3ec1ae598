#!/usr/bin/env python3
"""Measures short and long answers beside another program that keeps one core busy, and on a quiet machine.

    scripts/measure/busy_cores.py [--beside nothing,spin,compile] [--format BF16,Q8_0,Q4_0]
                                  [--tokens 16,24,64,256] [-t 2] [--prompts 8]

Four processes answer the same prompts in turns: plain decoding with each fixed number of threads, plain
decoding that chooses the number by what rounds take, and drafts that the planner chooses, with the shipped
head. Each is loaded anew for each length of answers: cold, which measures the costs while the other program
runs, and warm, with the costs that the cold load has kept.

The table has, for each cell, the mean of the prompts' ratios: "planner" is the planner's speed in units of
plain decoding's, both with chosen threads; "threads" is that plain decoding's speed in units of the best
fixed number's. "worst" is the least of the planner's ratios. A prompt's first token does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_llama.bench.child import Child

# Each ends when this process does, however that ends: its standard input is closed then.
GUARD = r"""
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
"""
SPIN = "while True: pass"
# Its includes alone keep a compiler busy for seconds.
COMPILE = r"""
import pathlib, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder, "a.cpp")
    source.write_text("#include <regex>\n#include <map>\n#include <iostream>\n"
                      "int main(int, char ** v) { return std::regex_match(v[0], std::regex(v[0])); }\n")
    while subprocess.call(["c++", "-O2", "-c", source, "-o", pathlib.Path(folder, "a.o")]) == 0:
        pass
sys.exit("the compiler c++ failed")
"""
BESIDE = {"nothing": None, "spin": SPIN, "compile": COMPILE}
PLANNER, CHOSEN = "planner", "chosen"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--beside", default="nothing,spin,compile", metavar="NAME,...", help=", ".join(BESIDE)
    )
    parser.add_argument("--format", default="BF16,Q8_0,Q4_0", metavar="FORMAT,...", help="of SmolLM2")
    parser.add_argument("--tokens", default="16,24,64,256", metavar="N,...", help="of an answer")
    parser.add_argument("-t", type=int, default=2, metavar="THREADS")
    parser.add_argument("--prompts", type=int, default=8, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve, threads=given.t)
        return 0
    beside = given.beside.split(",")
    if unknown := set(beside) - set(BESIDE):
        parser.error(f"--beside knows {', '.join(BESIDE)}, not {', '.join(sorted(unknown))}")
    prompts = questions(given.prompts)
    data = []
    print(
        f"{'beside':8} {'format':6} {'tokens':>6} {'costs':5} {'planner':>8} {'worst':>6} {'threads':>8}",
        flush=True,
    )
    for name in beside:
        with other_program(BESIDE[name]):
            for fmt in given.format.split(","):
                for n in given.tokens.split(","):
                    data += [{"beside": name, **row} for row in cells(fmt, int(n), prompts, given.t)]
                    for row in data[-2:]:
                        print(
                            f"{row['beside']:8} {row['format']:6} {row['tokens']:6} {row['costs']:5}"
                            f" {row['planner']:8.2f} {row['worst']:6.2f} {row['threads']:8.2f}",
                            flush=True,
                        )
    if given.json is not None:
        report = {
            "measurement": "busy",
            "conditions": f"{len(prompts)} prompts",
            "command": shlex.join(["scripts/measure/busy_cores.py", *sys.argv[1:]]),
            "n_threads": given.t,
            "data": data,
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def questions(n: int) -> list[str]:
    from load_client import texts_of

    return texts_of(None, n)


@contextlib.contextmanager
def other_program(code: str | None) -> Iterator[None]:
    """Runs Python code beside what is measured, or nothing. It ends with the block."""
    if code is None:
        yield
        return
    command = [sys.executable, "-c", GUARD + code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            time.sleep(2.0)  # the system has given it a core by then
            yield
            if process.poll() is not None:
                raise SystemExit("the program beside ended: install a compiler, or leave out `compile`")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def cells(fmt: str, n: int, prompts: list[str], threads: int) -> Iterator[dict[str, Any]]:
    """The figures of answers of n tokens with costs that are measured now, and with costs that were kept."""
    with tempfile.TemporaryDirectory() as costs:
        for kept in ("cold", "warm"):
            numbers = {str(k) for k in (1, threads - 1, threads) if k >= 1}
            with contextlib.ExitStack() as stack:
                # The planner first: plain decoding takes the costs that it has kept.
                names = [PLANNER, CHOSEN, *sorted(numbers)]
                children = {name: stack.enter_context(child(name, fmt, n, threads, costs)) for name in names}
                speeds = [turn(children, prompt, i) for i, prompt in enumerate(prompts)]
            ratios = [s[PLANNER] / s[CHOSEN] for s in speeds]
            mean = {name: statistics.mean(s[name] for s in speeds) for name in names}
            yield {
                "format": fmt,
                "tokens": n,
                "costs": kept,
                "planner": round(statistics.mean(ratios), 3),
                "worst": round(min(ratios), 3),
                "threads": round(mean[CHOSEN] / max(mean[k] for k in numbers), 3),
                "tokens_per_second": {name: round(x, 1) for name, x in mean.items()},
            }


def turn(children: dict[str, Child], prompt: str, i: int) -> dict[str, float]:
    """Tokens per second of each process for this prompt. Who begins changes from prompt to prompt."""
    names = list(children)
    names = names[i % len(names) :] + names[: i % len(names)]
    return {name: float(children[name].ask(json.dumps(prompt))) for name in names}


@contextlib.contextmanager
def child(name: str, fmt: str, n: int, threads: int, costs: str) -> Iterator[Child]:
    """The process of this name, loaded."""
    from eagle3_llama.bench.child import Child

    env = {**os.environ, "EAGLE3_LLAMA_COSTS": costs}
    if name not in (PLANNER, CHOSEN):
        env["EAGLE3_LLAMA_FIXED_THREADS"] = "1"
        threads = int(name)
    process = Child([sys.executable, __file__, "-t", threads, "--serve", name, fmt, n], env)
    try:
        if not process.read():
            raise SystemExit(f"{name}: {process.last_words()}")
        yield process
    finally:
        process.close()


def serve(name: str, fmt: str, n: str, threads: int) -> None:
    """Answers each line, a prompt as JSON, with the tokens per second after the first one."""
    from eagle3_llama import EagleLlama, EagleParams
    from eagle3_llama.llama.chat import chat_tokens, generate
    from eagle3_llama.models import shipped_head, smollm2

    head = str(shipped_head()) if name == PLANNER else None
    common: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "flash_attn": True}
    llm = EagleLlama(str(smollm2(fmt)), eagle=head, n_ctx=2048, verbose=False, **common)
    if name != PLANNER:
        llm.eagle_params = EagleParams(n_max=0)
    print("loaded", flush=True)
    for line in sys.stdin:
        llm.reset()
        tokens = generate(llm, chat_tokens(llm, json.loads(line)), int(n), temp=0.0)
        next(tokens, None)
        start = time.perf_counter()
        count = sum(1 for _ in tokens)
        print(count / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    sys.exit(main())
