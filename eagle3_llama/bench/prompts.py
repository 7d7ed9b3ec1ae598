"""`eagle3-llama bench`: ways to decode side by side, alternating per prompt in one process."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens
from ..runtime.costs import Costs, Times, fill_context, measure_in_use
from .modes import Run, Target


@dataclasses.dataclass
class Answer:
    """All runs of one prompt, by mode's name."""

    category: str
    runs: dict[str, list[Run]]
    gaps: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # top-2 logit gap where a mode first differs from plain
    costs: Costs | None = None  # between its runs; None if nothing drafts

    def seconds(self, mode: str) -> float:
        return statistics.median(r.seconds for r in self.runs[mode])

    def tokens(self, mode: str) -> list[int]:
        return self.runs[mode][0].tokens

    def relative(self, mode: str) -> float:
        """Seconds a token in units of plain decoding's by turns with it, or in the same round, the median over rounds: what the
        machine loses to others, both have lost."""
        pairs = [
            (r, r.plain or p)
            for r, p in zip(self.runs[mode], self.runs["plain"])
            if min(len(r.tokens), len(p.tokens)) > 1
        ]
        each = lambda r: r.seconds / len(r.tokens)
        return statistics.median(each(r) / each(p) for r, p in pairs) if pairs else 1.0


def read_prompts(path: str | Path, category: str | None = None) -> list[tuple[str, str]]:
    """(category, prompt) of a .jsonl file: strings, or objects with `prompt` and perhaps `category`.

    category: only these prompts, told apart by their `topic` where they have one.
    """
    out = []
    for n, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            item = {"prompt": item} if isinstance(item, str) else item
            if category is None:
                out.append((str(item.get("category", "all")), str(item["prompt"])))
            elif item.get("category") == category:
                out.append((str(item.get("topic", category)), str(item["prompt"])))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise EagleError(
                ErrorKind.BAD_VALUE,
                f'{path}, line {n}: expected a JSON string or an object with "prompt" ({e})',
            ) from e
    if not out:
        raise EagleError(
            ErrorKind.BAD_VALUE, f"{path} has no prompts" + (f" of category {category!r}" if category else "")
        )
    return out


def bench_target(
    target: Target,
    prompts: Iterable[tuple[str, str]],
    n_predict: int,
    rounds: int,
    sampling: dict[str, Any],
    step: Callable[[], None],
) -> list[Answer]:
    """Runs every prompt in every mode, modes alternating, `rounds` times; prompt i has seed i + 1. After each time costs are measured."""
    answers = []
    drafting = [target.llm(m) for m in target.drafting()]
    for i, (category, prompt) in enumerate(_tokenized(target.plain, prompts, n_predict)):
        answer, times = Answer(category, {m.name: [] for m in target.modes}), Times()
        for r in range(rounds):
            for mode in target.modes if (i + r) % 2 == 0 else reversed(target.modes):
                target.seed(i + 1)
                answer.runs[mode.name].append(target.run(mode, prompt, n_predict, sampling))
            if drafting:
                answer.costs = measure_in_use(drafting[0]._engine, drafting[0].n_ctx(), times)
        for mode in target.modes:
            if answer.tokens(mode.name) != answer.tokens("plain"):
                answer.gaps[mode.name] = target.gap(prompt, answer.tokens("plain"), answer.tokens(mode.name))
        answers.append(answer)
        step()
    return answers


def _tokenized(llm: Any, prompts: Iterable[tuple[str, str]], n_predict: int) -> list[tuple[str, list[int]]]:
    """(category, token ids) of all prompts; one that leaves no room for its answer is refused before any of them runs."""
    out, room = [], llm.n_ctx() - n_predict
    for category, text in prompts:
        prompt = chat_tokens(llm, text)
        if len(prompt) > room:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"prompt {text[:40]!r} has {len(prompt)} tokens, --n-ctx leaves room for {room} beside the answer",
            )
        out.append((category, prompt))
    return out


def capture_cost(llm: Any, blocks: int = 30, rows: int = 8) -> float:
    """How much longer a one-row decode takes with capture on, as a share: the median over blocks, on and off alternating."""

    def block(on: bool) -> float:
        llm._engine.set_capture(on)
        times = []
        for r in range(rows + 1):
            start = time.perf_counter()
            llm._engine.decode(100, [])
            if r:  # switching makes the next decode plan its memory again
                times.append(time.perf_counter() - start)
            llm._engine.commit(0)
        return statistics.median(times)

    fill_context(llm._engine, 200)
    ratios = []
    for b in range(blocks):
        first = block(b % 2 == 0)
        second = block(b % 2 == 1)
        ratios.append(first / second if b % 2 == 0 else second / first)
    llm.eagle_params = llm.eagle_params  # capture as the settings want it
    llm.reset()
    return statistics.median(ratios) - 1


def loop_flags(tokens: Sequence[int], n: int = 8) -> list[bool]:
    """For each token, whether it ends an n-gram that the answer already had."""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for i in range(len(tokens)):
        gram = tuple(tokens[i - n + 1 : i + 1]) if i >= n - 1 else None
        flags.append(gram is not None and gram in seen)
        if gram is not None:
            seen.add(gram)
    return flags
