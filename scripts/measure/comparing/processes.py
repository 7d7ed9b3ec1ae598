"""Modes in processes of their own, which alternate by answer: compare.py --lib and --beside.

--lib compares two builds of this package's library: a side for each build and mode, in units of the base's
side with the same mode. The first answer of each warms up and does not count.

--beside measures short and long answers beside another program that keeps one core busy, and on a quiet
machine. `none` is plain decoding that chooses the number of threads by what rounds take, `threads:N` with a
fixed number, `eagle` has drafts that the planner chooses. Each is loaded anew for each length of answers:
cold, which measures the costs while the other program runs, and warm, with the costs that the cold load has
kept. Ratios are in units of `none`. A prompt's first token never counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tables import table

from eagle3_llama.bench.child import Child

from .modes import modes_of

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
THREADS = "threads:"
COLUMNS = "target|beside|tokens|costs|side|tokens/s|ratio|least|of the best fixed threads|other texts"
Row = dict[str, Any]


class Side(NamedTuple):
    """A process. reference: the side whose speed is 1."""

    name: str
    mode: str
    reference: str
    env: dict[str, str]


def run(given: argparse.Namespace, target: Any) -> list[Row]:
    """A row for each side in each cell, and their table."""
    beside = given.beside.split(",") if given.beside else ["nothing"]
    if unknown := set(beside) - set(BESIDE):
        raise ValueError(f"--beside knows {', '.join(BESIDE)}, not {', '.join(sorted(unknown))}")
    made, rows = sides(given), list[Row]()
    for name in beside:
        with other_program(BESIDE[name]):
            for n in (given.tokens or str(given.n)).split(","):
                rows += [
                    {"beside": name if given.beside else "", **row}
                    for row in cells(given, target, made, int(n))
                ]
    names = COLUMNS.split("|")
    print(table(names, [[str(row.get(name, "")) for name in names] for row in rows]), flush=True)
    return rows


def sides(given: argparse.Namespace) -> list[Side]:
    if given.lib:
        from eagle3_llama.runtime.library import find_lib_dir

        modes = (given.modes or "plain,eagle").split(",")
        folders = {"base": given.base or find_lib_dir(), "lib": given.lib}
        for folder in folders.values():
            if folder is None or not (folder / "eagle3.h").is_file():
                raise ValueError(f"{folder}: name a folder with libeagle3 and eagle3.h")
        own = {name: {"EAGLE3_LLAMA_LIB_DIR": str(folder.absolute())} for name, folder in folders.items()}
        return [Side(f"{name} {m}", m, f"base {m}", env) for name, env in own.items() for m in modes]
    fixed = [f"{THREADS}{n}" for n in sorted({1, given.t - 1, given.t} - {0})]
    # Drafts first: plain decoding takes the costs that they have kept.
    modes = given.modes.split(",") if given.modes else ["eagle", "none", *fixed]
    if "none" not in modes:
        raise ValueError("--beside needs the mode none, which the others are compared with")
    return [Side(m, m, "none", {"EAGLE3_LLAMA_FIXED_THREADS": "1"} if m in fixed else {}) for m in modes]


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


def cells(given: argparse.Namespace, target: Any, made: list[Side], n: int) -> Iterator[Row]:
    """The figures of answers of n tokens; with --beside cold, and with the costs that were kept then."""
    from serving.client import texts_of

    warm_up = given.lib is not None
    prompts = texts_of(None, given.prompts) * given.rounds
    prompts = prompts[:1] * warm_up + prompts
    with tempfile.TemporaryDirectory() as costs:
        for kept in ("cold", "warm") if given.beside else ("",):
            env = {"EAGLE3_LLAMA_COSTS": costs} if kept else {}
            with contextlib.ExitStack() as stack:
                # one after the other: two loads at once would disturb what each measures
                children = {s.name: stack.enter_context(child(given, target, s, n, env)) for s in made}
                answers = [turn(children, prompt, i) for i, prompt in enumerate(prompts)][warm_up:]
            for row in figures(made, answers):
                yield {"target": Path(target.path).stem, "tokens": n, "costs": kept, **row}


def turn(children: dict[str, Child], prompt: str, i: int) -> dict[str, Row]:
    """Each process's answer to this prompt. Who begins changes from prompt to prompt."""
    names = list(children)
    names = names[i % len(names) :] + names[: i % len(names)]
    return {name: ask(children[name], prompt) for name in names}


def ask(process: Child, prompt: str) -> Row:
    line = process.ask(json.dumps(prompt))
    if not line:
        raise SystemExit(f"a measuring process ended: {process.last_words()}")
    row: Row = json.loads(line)
    return row


def figures(made: list[Side], answers: list[dict[str, Row]]) -> Iterator[Row]:
    mean = {s.name: statistics.mean(a[s.name]["rate"] for a in answers) for s in made}
    fixed = [mean[s.name] for s in made if s.name.startswith(THREADS)]
    for s in made:
        ratios = [a[s.name]["rate"] / a[s.reference]["rate"] for a in answers]
        row = {"side": s.name, "tokens/s": round(mean[s.name], 1)}
        row |= {"ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3)}
        if fixed:
            row["of the best fixed threads"] = round(mean[s.name] / max(fixed), 3)
        yield row | {"other texts": sum(a[s.name]["text"] != a[s.reference]["text"] for a in answers)}


@contextlib.contextmanager
def child(
    given: argparse.Namespace, target: Any, side: Side, n: int, more: dict[str, str]
) -> Iterator[Child]:
    """The process of this side, loaded."""
    env = {**os.environ, **more, **side.env}
    env.pop("OMP_WAIT_POLICY", None)
    fixed = side.mode.startswith(THREADS)
    settings = {
        "path": target.path,
        "mode": "none" if fixed else side.mode,
        "head": target.head if side.mode in ("eagle", "head") else None,
        "threads": int(side.mode.removeprefix(THREADS)) if fixed else given.t,
        "n": n,
        "n_ctx": given.n_ctx,
    }
    script = Path(__file__).resolve().parents[1] / "compare.py"
    process = Child([sys.executable, script, "--serve", json.dumps(settings)], env)
    try:
        if not process.read():
            raise SystemExit(f"{side.name}: {process.last_words()}")
        yield process
    finally:
        process.close()


def serve(settings: Row) -> None:
    """Answers each line, a prompt as JSON, with its tokens and tokens a second behind the first one."""
    from eagle3_llama.bench.mode import Loading
    from eagle3_llama.llama.chat import chat_tokens

    [mode] = modes_of([settings["mode"]], settings["head"])
    llm = mode.load(Loading(settings["path"], settings["threads"], settings["n_ctx"], True))
    print("loaded", flush=True)
    for line in sys.stdin:
        run = mode.run(llm, llm, chat_tokens(llm, json.loads(line)), settings["n"], {"temp": 0.0})
        rate = (len(run.tokens) - 1) / max(run.seconds, 1e-9)
        print(json.dumps({"rate": rate, "text": run.tokens}), flush=True)
