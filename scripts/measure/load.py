#!/usr/bin/env python3
"""Load tests of the server. Each command starts servers on free ports: run it alone on the machine.

    scripts/measure/load.py bench --clients 1,4,8 [--llama-server LLAMA_SERVER] [--kind text|tools|schema]
    scripts/measure/load.py agents [--llama-server LLAMA_SERVER]   # 6 agents, 4 slots, 20 turns
    scripts/measure/load.py equality --requests 200   # texts of 8 clients against plain decoding
    scripts/measure/load.py soak --minutes 30         # the same for half an hour with a small KV cache

LLAMA_SERVER is the path of llama.cpp's own server. This builds it from the sources that this package's
library is made of, without patches:

    mkdir /tmp/llama.cpp && cd /tmp/llama.cpp
    tar xzf "$(python native/fetch.py --sdist)" --strip-components=3 --wildcards '*/vendor/llama.cpp/*'
    cmake -B build -G Ninja -DLLAMA_OPENSSL=OFF && cmake --build build --target llama-server
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import re
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from serving.agents import agents
from serving.client import Files, LlamaServer, LlamaServerPath, Server, texts_of
from serving.report import write
from serving.texts import COMMON, equality, soak

from eagle3_llama import EagleLlama
from eagle3_llama.llama.chat import chat_tokens, generate
from eagle3_llama.models import shipped_head, smollm2

N_CTX = 2048  # tokens of a slot
app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
app.command()(agents)
app.command()(equality)
app.command()(soak)
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
                    last = server.streamed(text, self.n_predict, speculative=speculative, **self.fields)[1]
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
        ask = lambda text: server.streamed(text, SHORT, speculative=speculative, **self.fields)[2]
        new = [f"{secrets.token_hex(4)}: {text}" for text in texts]
        with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
            return statistics.fmean(pool.map(ask, new))


@app.command()
def bench(
    formats: Annotated[str, typer.Option(help="formats of SmolLM2, comma-separated")] = "Q8_0",
    clients: Annotated[str, typer.Option(help="numbers of clients, comma-separated")] = "1,4,8",
    kind: Annotated[str, typer.Option(help=f"what requests ask for: {', '.join(KINDS)}")] = "text",
    template: Annotated[Path | None, typer.Option(help="a chat template for the servers")] = None,
    rounds: int = 3,
    n_predict: int = 96,
    answers: Annotated[int, typer.Option(help="answers that each client waits for in a round")] = 2,
    prompts: Annotated[int, typer.Option(help="number of prompts, in groups of one a client")] = 16,
    files: Files = None,
    head: Annotated[bool, typer.Option(help="with the shipped head, or drafts from the text alone")] = True,
    llama_server: LlamaServerPath = None,
    option: Annotated[
        list[str] | None, typer.Option(help="an option for llama-server; may be given several times")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure tokens a second of clients with drafts, without, and of llama-server.

    Every client sends its prompt again and again, greedily and streamed; prompts are in the servers' caches
    by then. Both servers get the same threads, slots and tokens a slot. They alternate, and one is idle while
    the other is measured. The speed is the sum of the clients' own, in --answers answers, while all of them
    ask: a client that has its answers goes on until the slowest has them too. A ratio is of one group of
    prompts in one round; the table has the median, the lowest and the highest. The time to the first token is
    that of new prompts, which no server has in its cache, and the mean of all clients, who send them at once;
    below 1, ours is shorter. One client's speed is also compared with EagleLlama's in another process.

    --kind tools: beside eight tools, which the model may call. --kind schema: JSON that follows a schema.
    --template: SmolLM2's own knows no tools; models/templates/Qwen-Qwen2.5-7B-Instruct.jinja of llama.cpp
    does.
    """
    texts, counts = texts_of(files, prompts), [int(c) for c in clients.split(",")]
    if len(texts) < max(counts):
        raise typer.BadParameter(f"{max(counts)} clients need as many prompts, --prompts gives {len(texts)}")
    if kind not in KINDS:
        raise typer.BadParameter(f"--kind is {kind}, expected one of {', '.join(KINDS)}")
    names = "format|clients|with drafts, tokens/s|without|with over without|drafted per round"
    theirs = "|llama-server|with over llama-server|without|first token" if llama_server else ""
    table = Table(*f"{names}{theirs}".split("|"))
    load, found, single = Load(n_predict, answers, KINDS[kind]), {}, {}
    for fmt in formats.split(","):
        with contextlib.ExitStack() as stack:
            shared = ["--chat-template-file", str(template)] if template is not None else []
            most = max(counts)
            ours = stack.enter_context(Server(fmt, most, N_CTX, head, shared))
            sides = {"on": (ours, {}), "off": (ours, {"enabled": False})}
            if llama_server is not None:
                options = [*shared, *(["--jinja"] if shared else []), *(option or [])]
                other = LlamaServer(llama_server, fmt, most, N_CTX, options)
                sides["other"] = stack.enter_context(other), {}
            runs = found[fmt] = _runs(fmt, sides, counts, texts, rounds, load)
            if 1 in counts and head and llama_server is None:
                single[fmt] = _single(ours, fmt, texts[:8], rounds, n_predict)
        for c in counts:
            table.add_row(fmt, str(c), *_cells(runs[c], llama_server is not None))
    console.print(table)
    for (fmt, of), name in itertools.product(single.items(), ("streamed", "whole")):
        told = f"{statistics.median(of[name]):.3f} (median of {len(of[name])})"
        console.print(f"{fmt}, one client, {name}, relative to EagleLlama in another process: {told}")
    write(json_file, prompts=prompts, kind=kind, runs=found, one_client=single)


def _runs(
    fmt: str,
    sides: dict[str, tuple[Server, dict[str, Any]]],
    counts: list[int],
    texts: list[str],
    rounds: int,
    load: Load,
) -> dict[int, list[dict[str, float]]]:
    """Of each number of clients, the speeds and times of its groups of prompts in all rounds."""
    groups = {c: [texts[i :: len(texts) // c][:c] for i in range(min(len(texts) // c, 4))] for c in counts}
    runs: dict[int, list[dict[str, float]]] = {c: [] for c in counts}
    todo = [(r, c, group) for c in counts for group in groups[c] for r in range(-1, rounds)]
    for i, (r, c, group) in enumerate(track(todo, fmt, console=console, transient=True)):
        first, run = i % len(sides), dict[str, float]()
        order = list(sides)[first:] + list(sides)[:first]
        for side in order:
            before = _metrics(sides["on"][0])
            run[side] = load.speed(sides[side][0], group, sides[side][1])
            if side == "on":
                n_rounds, drafted = (now - was for now, was in zip(_metrics(sides[side][0]), before))
                run["drafted"] = drafted / max(n_rounds, 1)
        run |= {f"first_{side}": load.first(sides[side][0], group, sides[side][1]) for side in order}
        if r >= 0:  # before that, the prompts come into the caches
            runs[c].append(run)
    return runs


def _cells(runs: list[dict[str, float]], theirs: bool) -> list[str]:
    middle = lambda name: statistics.median(run[name] for run in runs)
    cells = [
        f"{middle('on'):.0f}",
        f"{middle('off'):.0f}",
        _ratio(runs, "on", "off"),
        f"{middle('drafted'):.2f}",
    ]
    if theirs:
        ratios = (
            _ratio(runs, *pair) for pair in (("on", "other"), ("off", "other"), ("first_on", "first_other"))
        )
        cells += [f"{middle('other'):.0f}", *ratios]
    return cells


def _ratio(runs: list[dict[str, float]], side: str, other: str) -> str:
    ratios = sorted(run[side] / run[other] for run in runs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"


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
    llm = EagleLlama(str(smollm2(fmt)), eagle_path=str(shipped_head()), n_ctx=2048, **COMMON)
    prompts = [chat_tokens(llm, t) for t in texts]

    def here(i: int) -> float:
        start, n = 0.0, 0
        for _ in generate(llm, prompts[i], n_predict, temp=0.0):
            start, n = start or time.perf_counter(), n + 1
        return (n - 1) / (time.perf_counter() - start)

    report = {"report": True}  # with the timings
    there: dict[str, Callable[[int], float]] = {
        "streamed": lambda i: _speed(server.streamed(texts[i], n_predict, speculative=report)[1]),
        "whole": lambda i: _speed(json.loads(server.chat(texts[i], n_predict, speculative=report))),
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


if __name__ == "__main__":
    app()
