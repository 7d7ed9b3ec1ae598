#!/usr/bin/env python3
"""Agents that share a server's slots: how much of their prompts is decoded again, and how long they wait.

    scripts/measure/agent_load.py                              # 6 agents, 4 slots, 20 turns, with and without
    scripts/measure/agent_load.py --llama-server LLAMA_SERVER  # and llama.cpp's server, too

All agents have one system prompt, and each has a task of its own. In each turn an agent sends its whole
conversation with one more message, as agents do. They come one after the other; with --together all of a turn
come at once. A token is decoded again if the server has decoded it for this agent before: of the prompt and
the answer of the turn before, those that the next prompt's cached_tokens do not cover. The time to the first
token is the client's. Each server is measured alone. bench_llama_server.py says how to build LLAMA_SERVER.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from bench_llama_server import LlamaServer
from load_client import Files, Format, Server, texts_of
from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
N_CTX = 8192  # tokens of a slot
Messages = list[dict[str, str]]


class Turn(NamedTuple):
    """One answer. prompt, cached, answer: tokens. first: seconds to the first token. again: decoded again."""

    turn: int
    prompt: int
    cached: int
    answer: int
    first: float
    again: int


class Agent:
    """A client with a conversation. texts: its task, and what it says in each turn."""

    def __init__(self, system: str, texts: list[str], n_predict: int) -> None:
        self.messages: Messages = [{"role": "system", "content": system}]
        self.texts = texts
        self.n_predict = n_predict
        self.turns: list[Turn] = []

    def turn(self, server: Server) -> None:
        """Says the next text, and keeps the answer."""
        self.messages.append({"role": "user", "content": self.texts[len(self.turns) % len(self.texts)]})
        text, used, first = answer(server, self.messages, self.n_predict)
        self.messages.append({"role": "assistant", "content": text})
        cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        before = self.turns[-1].prompt + self.turns[-1].answer - 1 if self.turns else 0
        again = max(before - cached, 0)
        done = len(self.turns), used["prompt_tokens"], cached, used["completion_tokens"], first, again
        self.turns.append(Turn(*done))


def answer(server: Server, messages: Messages, n_predict: int) -> tuple[str, dict[str, Any], float]:
    """The text of a streamed greedy answer, its usage, and the seconds until its first token."""
    body = {"messages": messages, "max_tokens": n_predict, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    start, first, text, used = time.perf_counter(), 0.0, "", {}
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            part = "".join(c["delta"].get("content") or "" for c in event["choices"])
            first = first or (time.perf_counter() - start if part else 0.0)
            text += part
            used = event.get("usage") or used
    finally:
        connection.close()
    return text, used, first or time.perf_counter() - start


def talk(server: Server, agents: list[Agent], n_turns: int, together: bool) -> list[Turn]:
    """All turns of all agents."""
    with server:
        for _ in range(n_turns):
            if together:
                with concurrent.futures.ThreadPoolExecutor(len(agents)) as pool:
                    list(pool.map(lambda agent: agent.turn(server), agents))
            else:
                for agent in agents:
                    agent.turn(server)
    return [turn for agent in agents for turn in agent.turns]


def main(
    n_agents: Annotated[int, typer.Option("--agents")] = 6,
    slots: int = 4,
    turns: int = 20,
    fmt: Format = "Q8_0",
    caches: Annotated[str, typer.Option(help="sizes of --prompt-cache, comma-separated")] = "0,1G",
    n_predict: int = 24,
    system: Annotated[int, typer.Option(help="characters of the system prompt")] = 1500,
    together: Annotated[bool, typer.Option(help="all agents of a turn at once")] = False,
    llama_server: Annotated[Path | None, typer.Option(help="path of llama-server")] = None,
    files: Files = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure how much of agents' prompts is decoded again, and the time to the first token."""
    texts = texts_of(files, n_agents * 8)
    rules = ("You are one of several agents. " + " ".join(texts))[:system]
    servers = {f"prompt cache {size}": [*"--prompt-cache".split(), size] for size in caches.split(",")}
    table = Table("server", "decoded again", "prompt tokens", "first token, median", "90%", "first turn")
    found: dict[str, list[Turn]] = {}
    for name in [*servers, *(["llama-server"] if llama_server else [])]:
        agents = [Agent(rules, texts[i::n_agents], n_predict) for i in range(n_agents)]
        if name in servers:
            server = Server(fmt, slots, N_CTX, options=servers[name])
        else:
            server = LlamaServer(llama_server, fmt, slots, [], n_ctx=N_CTX)
        found[name] = talk(server, agents, turns, together)
        later = [turn for turn in found[name] if turn.turn > 0]
        first = sorted(turn.first for turn in later)
        table.add_row(
            name,
            f"{sum(t.again for t in later) / sum(t.prompt for t in later):.1%}",
            str(sum(t.prompt for t in later)),
            f"{statistics.median(first):.3f} s",
            f"{first[int(0.9 * len(first))]:.3f} s",
            f"{statistics.median(t.first for t in found[name] if t.turn == 0):.3f} s",
        )
    console.print(table)
    if json_file is not None:
        report = {
            "command": shlex.join(sys.argv),
            "runs": {k: [t._asdict() for t in v] for k, v in found.items()},
        }
        json_file.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
