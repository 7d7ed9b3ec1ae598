#!/usr/bin/env python3
"""Clients that hurt the server: each command starts one on a free port.

    scripts/measure/hostile.py soak                          # 5,000 cases, one after the other
    scripts/measure/hostile.py soak --minutes 30 --seed 100000
    scripts/measure/hostile.py soak --seed 4711 --cases 1    # one of them again
    scripts/measure/hostile.py load                          # expensive requests, many at once
    scripts/measure/hostile.py neighbour [--rounds 9] [--n-predict 1500] [--fmt Q8_0] [--no-keys]
    scripts/measure/hostile.py neighbour --kind tools --kind items --rounds 3 --n-predict 200

They print what they found. `soak` and `load` end with status 1 if something is wrong.
"""

from __future__ import annotations

import collections
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from serving.cases import Case, case
from serving.client import Format, Server, resident
from serving.expensive import load
from serving.hurting import OPTIONS, post, template_file
from serving.neighbour import neighbour

FINE = {200, 400, 404, 408, 413, 415, 503, 504}
MOST_GROWTH = 0.05
EVERY = 25  # cases between two usual requests
USUAL = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 12, "temperature": 0}
app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
app.command()(load)
app.command()(neighbour)


class Sample(NamedTuple):
    """Memory in bytes: the server's own, its children's together, and the number of these."""

    own: int
    children: int
    n_children: int


class Soak:
    """What happened so far. wrong: one line for each thing that must not happen."""

    def __init__(self) -> None:
        self.statuses: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.wrong: list[str] = []
        self.samples: list[Sample] = []
        self.slowest = (0.0, 0)  # seconds, number of the case
        self.usual = ""

    def send(self, server: Server, seed: int) -> None:
        """Sends a case and judges the answer."""
        made, start = case(seed), time.monotonic()
        try:
            status, data = post(server.port, made)
        except OSError as e:
            if (status := server.process.poll()) is not None:
                raise SystemExit(f"case {seed}, {made.kind}: the server ended with {status}") from e
            self.wrong.append(f"case {seed}, {made.kind} {made.path}: {e!r}")
            return
        self.slowest = max(self.slowest, (time.monotonic() - start, seed))
        self.statuses[made.kind]["left" if made.leaves is not None else str(status)] += 1
        if status not in FINE or b'"internal_error"' in data or b'"api_error"' in data:
            self.wrong.append(f"case {seed}, {made.kind} {made.path}: {status} {data[-300:]!r}")

    def check(self, server: Server) -> None:
        """A usual request gets its text; the memory is noted."""
        status, data = post(server.port, Case("usual", "/v1/chat/completions", json.dumps(USUAL).encode()))
        text = json.loads(data)["choices"][0]["message"]["content"] if status == 200 else f"status {status}"
        self.usual = self.usual or text
        if text != self.usual:
            self.wrong.append(f"after {self.done} cases the usual text is {text!r}")
        self.samples.append(memory(server.process.pid))

    @property
    def done(self) -> int:
        """The number of cases."""
        return sum(map(sum_of, self.statuses.values()))

    def growth(self) -> float | None:
        """The server's memory in the last third of the samples, relative to the middle third."""
        third = len(self.samples) // 3
        if third < 3:
            return None
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        return statistics.median(s.own for s in last) / statistics.median(s.own for s in middle) - 1


def sum_of(counts: collections.Counter[str]) -> int:
    return sum(counts.values())


def memory(pid: int) -> Sample:
    """Resident bytes without mapped files, of a process and of its children."""
    found = []
    for process in [pid, *children(pid)]:
        try:
            found.append(resident(process))
        except OSError:  # a child that was replaced
            continue
    return Sample(found[0], sum(found[1:]), len(found) - 1)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:  # a thread that has ended
            continue
    return found


def run(server: Server, seeds: Any, end: float) -> Soak:
    """Sends the cases until `end`, a time of time.monotonic()."""
    soak = Soak()
    soak.check(server)
    for n, seed in enumerate(seeds):
        if time.monotonic() > end:
            break
        soak.send(server, seed)
        if n % EVERY == EVERY - 1:
            soak.check(server)
    soak.check(server)
    return soak


@app.command()
def soak(
    cases: int = 5000,
    minutes: Annotated[float, typer.Option(help="the longest duration")] = 1e6,
    seed: Annotated[int, typer.Option(help="number of the first case")] = 0,
    template: Annotated[str, typer.Option(help="one of llama.cpp's, or own")] = "Qwen-Qwen3-0.6B",
    fmt: Format = "Q8_0",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Send hostile requests, and look for what must not happen: a crash, a hang, a 500, memory that grows.

    serving/cases.py makes the cases: templates, what the model writes, tools, schemas, conversations,
    grammars, fields, bytes. Among them a usual request asks for the same text, and must get it. A wrong
    answer is printed with its number. The memory of the server and of its children is read after each usual
    request. It is flat if the median of the last third is at most MOST_GROWTH above that of the middle third:
    the first third fills the caches. It ends with status 1 if anything is wrong.
    """
    start, console = time.monotonic(), Console(highlight=False)
    with template_file(template) as file, Server(fmt, 2, 1024, options=[*OPTIONS, *file]) as server:
        found = run(server, range(seed, seed + cases), start + 60 * minutes)
    table = Table("kind", "cases", "statuses")
    for kind, counts in sorted(found.statuses.items()):
        table.add_row(kind, str(sum_of(counts)), ", ".join(f"{k}: {n}" for k, n in sorted(counts.items())))
    console.print(table)
    growth, last = found.growth(), found.samples[-1]
    if growth is not None and growth > MOST_GROWTH:
        found.wrong.append(f"the server's memory grew by {growth:.1%} in the last third")
    console.print(f"{found.done} cases from {seed} on in {(time.monotonic() - start) / 60:.1f} minutes")
    console.print(f"slowest: {found.slowest[0]:.1f} s, case {found.slowest[1]}")
    shown = "too few samples" if growth is None else f"{growth:+.1%} in the last third"
    of_children = f"{last.n_children} children {last.children >> 20} MiB"
    console.print(f"memory: server {last.own >> 20} MiB, {of_children}; {shown}")
    for line in found.wrong:
        console.print(line, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps({"samples": found.samples, "wrong": found.wrong}) + "\n")
    raise typer.Exit(1 if found.wrong else 0)


if __name__ == "__main__":
    app()
