"""The sources of training text. Task i of a run depends only on the seed and on i."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from .settings import TrainSettings

BLOCK = 100  # in so many tasks, the shares of the sources are exact to a hundredth
# (temperature, top_p, top_k); a third is greedy, because most drafts are verified greedily
SAMPLING = ((0.0, 1.0, 0), (0.7, 0.95, 0), (1.0, 1.0, 100))


@dataclasses.dataclass(frozen=True)
class Task:
    """A conversation to generate.

    kind: `write` (the model writes the prompt too), `answer`, or `read` (a finished conversation).
    tokens, n_prompt: the token ids of a finished conversation, if it is given as such.
    """

    index: int
    kind: str
    messages: tuple[dict[str, str], ...] = ()
    tokens: tuple[int, ...] = ()
    n_prompt: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class Tasks:
    """The tasks of a run by index. Each pass over a source draws each of its items once, in random order."""

    def __init__(self, settings: TrainSettings) -> None:
        self.seed = settings.seed
        weights = np.array(settings.source_weights()) / sum(settings.source_weights())
        self.block = np.repeat(np.arange(3), np.maximum(np.round(weights * BLOCK), weights > 0).astype(int))
        self.prompts = [p for path in settings.prompts for p in read_prompts(path)]
        self.conversations = [c for path in settings.conversations for c in read_conversations(path)]
        self._orders = [
            np.random.default_rng([self.seed, 7, k]).permutation(n)
            for k, n in enumerate((0, len(self.prompts), len(self.conversations)))
        ]

    def task(self, index: int) -> Task:
        """Task `index` of the run."""
        rng = np.random.default_rng([self.seed, index])
        source, nth = self._source(index)
        temperature, top_p, top_k = SAMPLING[int(rng.integers(3))]
        how: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        if source == 0:
            return Task(index, "write", **how)
        order = self._orders[source]
        item = int(order[nth % len(order)])
        if source == 1:
            return Task(index, "answer", messages=tuple(self.prompts[item]), **how)
        c = self.conversations[item]
        messages, tokens = tuple(c.get("messages", ())), tuple(c.get("tokens", ()))
        return Task(index, "read", messages, tokens, c.get("n_prompt", 0))

    def _source(self, index: int) -> tuple[int, int]:
        """(source of a task, number of earlier tasks with this source). Shares are exact in every block."""
        block, at = divmod(index, len(self.block))
        order = np.random.default_rng([self.seed, 3, block]).permutation(self.block)
        source = int(order[at])
        return source, int(block * (self.block == source).sum() + (order[:at] == source).sum())

    def exhausted(self, index: int) -> bool:
        """True if finished conversations are the only source and there are no more of them."""
        return bool((self.block == 2).all()) and index >= len(self.conversations)


def read_prompts(path: str | Path) -> list[list[dict[str, str]]]:
    """The messages of each line, without a last answer.

    A line is a string, {"prompt": ...} or {"messages": [...]}.
    Raises EagleError BAD_VALUE.
    """
    out = []
    for where, item in _lines(path):
        if isinstance(item, dict) and "messages" in item:
            messages = _messages(item["messages"], where)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
        else:
            text = item.get("prompt") if isinstance(item, dict) else item
            messages = _messages([{"role": "user", "content": text}], where)
        if messages:
            out.append(messages)
    return _some(out, path)


def read_conversations(path: str | Path) -> list[dict[str, Any]]:
    """Finished conversations. A line is {"messages": [...]} or {"toks": ids, "prompt": n}.

    n is the number of tokens before the answer. Messages that do not end with the assistant are skipped.
    Raises EagleError BAD_VALUE.
    """
    out = []
    for where, item in _lines(path):
        if isinstance(item, dict) and "toks" in item:
            tokens, n_prompt = item["toks"], item.get("prompt", 0)
            if not _ids(tokens) or not isinstance(n_prompt, int) or not 0 <= n_prompt <= len(tokens):
                raise EagleError(
                    ErrorKind.BAD_VALUE, f"{where}: expected token ids in toks, and prompt in 0..their number"
                )
            out.append({"tokens": tokens, "n_prompt": n_prompt})
        elif isinstance(item, dict) and "messages" in item:
            messages = _messages(item["messages"], where)
            if messages[-1]["role"] == "assistant":
                out.append({"messages": messages})
        else:
            raise EagleError(ErrorKind.BAD_VALUE, f"{where}: expected an object with messages or toks")
    return _some(out, path)


def _ids(tokens: Any) -> bool:
    several = isinstance(tokens, list) and len(tokens) > 1
    return several and all(type(t) is int and t >= 0 for t in tokens)


def _lines(path: str | Path) -> Iterable[tuple[str, Any]]:
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as f:
            for n, line in enumerate(f, 1):
                if line.strip():
                    yield f"{path}, line {n}", json.loads(line)
    except (OSError, EOFError, ValueError, RecursionError) as e:
        raise EagleError(ErrorKind.BAD_VALUE, f"{path} is not a JSON lines file: {e}") from e


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    text = lambda m, key: isinstance(m, dict) and isinstance(m.get(key), str)
    messages = value if isinstance(value, list) else []
    if not messages or not all(text(m, "role") and text(m, "content") for m in messages):
        raise EagleError(
            ErrorKind.BAD_VALUE, f"{where}: expected a string, prompt, or messages with role and content"
        )
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _some(items: list[Any], path: str | Path) -> list[Any]:
    if not items:
        raise EagleError(ErrorKind.BAD_VALUE, f"{path} contains nothing to train on")
    return items
