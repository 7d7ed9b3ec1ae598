"""Agents that share a server's slots: scripts/measure/load.py agents."""

from __future__ import annotations

import concurrent.futures
import statistics
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from .client import Files, Format, LlamaServer, LlamaServerPath, Messages, Server, texts_of
from .report import write

N_CTX = 8192  # tokens of a slot


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
        text, last, first = server.streamed(self.messages, self.n_predict)
        self.messages.append({"role": "assistant", "content": text})
        used = last["usage"]
        cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        before = self.turns[-1].prompt + self.turns[-1].answer - 1 if self.turns else 0
        again = max(before - cached, 0)
        done = len(self.turns), used["prompt_tokens"], cached, used["completion_tokens"], first, again
        self.turns.append(Turn(*done))


def talk(server: Server, agents: list[Agent], n_turns: int, together: bool) -> list[Turn]:
    """All turns of all agents."""
    with server, concurrent.futures.ThreadPoolExecutor(len(agents) if together else 1) as pool:
        for _ in range(n_turns):
            list(pool.map(lambda agent: agent.turn(server), agents))
    return [turn for agent in agents for turn in agent.turns]


def agents(
    n_agents: Annotated[int, typer.Option("--agents")] = 6,
    slots: int = 4,
    turns: int = 20,
    fmt: Format = "Q8_0",
    caches: Annotated[str, typer.Option(help="sizes of --prompt-cache, comma-separated")] = "0,1G",
    n_predict: int = 24,
    system: Annotated[int, typer.Option(help="characters of the system prompt")] = 1500,
    together: Annotated[bool, typer.Option(help="all agents of a turn at once")] = False,
    llama_server: LlamaServerPath = None,
    files: Files = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure how much of agents' prompts is decoded again, and the time to the first token.

    All agents have one system prompt, and each has a task of its own. In each turn an agent sends its whole
    conversation with one more message, as agents do, one after the other. A token is decoded again if the
    server has decoded it for this agent before: of the prompt and the answer of the turn before, those that
    the next prompt's cached_tokens do not cover. Each server is measured alone.
    """
    texts = texts_of(files, n_agents * 8)
    rules = ("You are one of several agents. " + " ".join(texts))[:system]
    servers = {f"prompt cache {size}": ["--prompt-cache", size] for size in caches.split(",")}
    table = Table("server", "decoded again", "prompt tokens", "first token, median", "90%", "first turn")
    found: dict[str, list[Turn]] = {}
    for name in [*servers, *(["llama-server"] if llama_server else [])]:
        talking = [Agent(rules, texts[i::n_agents], n_predict) for i in range(n_agents)]
        if name in servers:
            server = Server(fmt, slots, N_CTX, options=servers[name])
        else:
            server = LlamaServer(llama_server, fmt, slots, N_CTX)
        found[name] = talk(server, talking, turns, together)
        table.add_row(name, *_figures(found[name]))
    Console(highlight=False).print(table)
    write(json_file, turns={k: [t._asdict() for t in v] for k, v in found.items()})


def _figures(turns: list[Turn]) -> list[str]:
    later = [turn for turn in turns if turn.turn > 0]
    first = sorted(turn.first for turn in later)
    return [
        f"{sum(t.again for t in later) / sum(t.prompt for t in later):.1%}",
        str(sum(t.prompt for t in later)),
        f"{statistics.median(first):.3f} s",
        f"{first[int(0.9 * len(first))]:.3f} s",
        f"{statistics.median(t.first for t in turns if t.turn == 0):.3f} s",
    ]
