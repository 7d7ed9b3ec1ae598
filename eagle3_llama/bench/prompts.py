"""Runs prompts in all modes, alternating between the modes for every prompt, in one process."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..common.files import reading
from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens
from ..runtime.costs import Costs, Times, measure_in_use
from ..runtime.token_costs import fill_context
from .target import BenchTarget
from .turns import Run

DEFAULT = Path(__file__).parents[1] / "data" / "bench_prompts.jsonl"  # eight prompts of four categories


@dataclasses.dataclass
class Answer:
    """All runs of one prompt, by the mode's name.

    gaps: the difference of the two highest logits where a mode first differs from plain decoding.
    costs: measured between the runs; None if no mode drafts.
    """

    category: str
    runs: dict[str, list[Run]]
    gaps: dict[str, float] = dataclasses.field(default_factory=dict)
    costs: Costs | None = None

    def seconds(self, mode: str) -> float:
        return statistics.median(r.seconds for r in self.runs[mode])

    def tokens(self, mode: str) -> list[int]:
        return self.runs[mode][0].tokens

    def relative(self, mode: str) -> float:
        """Time per token relative to plain decoding, the median over rounds.

        The plain run is the one that took turns with this run, or else the one of the same round. So other
        programs on the machine slow down both.
        """
        runs = zip(self.runs[mode], self.runs["plain"])
        pairs = [(r, r.plain or p) for r, p in runs if min(len(r.tokens), len(p.tokens)) > 1]
        each = lambda r: r.seconds / len(r.tokens)
        return statistics.median(each(r) / each(p) for r, p in pairs) if pairs else 1.0


Prompt = str | list[dict[str, str]]  # one user message, or a conversation


def read_prompts(
    paths: str | Path | Sequence[str | Path], category: str | None = None, split: str | None = None
) -> list[tuple[str, Prompt]]:
    """(category, prompt) pairs from .jsonl files. A line is a string, or an object.

    An object has `prompt`, a string, or `messages`, a conversation that ends with the user's turn; and
    `category`.
    split: only prompts whose `split` is this. category: only these prompts. The result then has each prompt's
    `topic` as its category, if it has one. Raises EagleError BAD_VALUE.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    out = [pair for path in files for pair in _read(path, category, split)]
    if not out:
        raise EagleError(
            ErrorKind.BAD_VALUE,
            f"{', '.join(map(str, files))} has no prompts"
            + (f" of category {category!r}" if category else "")
            + (f" of split {split!r}" if split else ""),
        )
    return out


def _read(path: str | Path, category: str | None, split: str | None) -> Iterator[tuple[str, Prompt]]:
    for n, line in enumerate(_text(path).split("\n"), 1):  # JSON strings may have other ends of lines
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            item = {"prompt": item} if isinstance(item, str) else item
            if split is not None and item.get("split") != split:
                continue
            if category is None:
                yield str(item.get("category", "all")), _prompt(item)
            elif item.get("category") == category:
                yield str(item.get("topic", category)), _prompt(item)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise EagleError(
                ErrorKind.BAD_VALUE,
                f'{path}, line {n}: expected a JSON string or an object with "prompt" or "messages" ({e})',
            ) from e


def _text(path: str | Path) -> str:
    try:
        with reading(Path(path)):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise EagleError(
            ErrorKind.BAD_VALUE, f"{path} is not UTF-8 at byte {e.start}: save it as UTF-8"
        ) from e


def _prompt(item: dict[str, Any]) -> Prompt:
    if "messages" not in item:
        return str(item["prompt"])
    turns = [{"role": str(m["role"]), "content": str(m["content"])} for m in item["messages"]]
    if not turns or turns[-1]["role"] == "assistant":
        raise ValueError('"messages" ends with the turn that is to be answered')
    return turns


def bench_target(
    target: BenchTarget,
    prompts: Iterable[tuple[str, Prompt]],
    n_predict: int,
    rounds: int,
    sampling: dict[str, Any],
    step: Callable[[], None],
) -> list[Answer]:
    """Runs every prompt in every mode, `rounds` times, with alternating modes. Prompt i has seed i + 1.

    Measures the costs after each round, if a mode drafts. step() is called after each prompt.
    """
    answers = []
    drafting = [target.llm(m) for m in target.drafting()]
    for i, (category, prompt) in enumerate(_tokenized(target.plain, prompts, n_predict)):
        answer, times = Answer(category, {m.name: [] for m in target.modes}), Times()
        for r in range(rounds):
            for mode in target.working()[:: 1 if (i + r) % 2 == 0 else -1]:
                target.seed(i + 1)
                if (run := target.run(mode, prompt, n_predict, sampling)) is not None:
                    answer.runs[mode.name].append(run)
            if drafting:
                from ..llama.model_costs import on_device  # here, as it loads the library

                llm = drafting[0]
                device = on_device(llm.model_params.n_gpu_layers)
                answer.costs = measure_in_use(llm.engine, llm.n_ctx(), times, on_device=device)
        for mode in target.working():
            if answer.tokens(mode.name) != answer.tokens("plain"):
                answer.gaps[mode.name] = target.gap(prompt, answer.tokens("plain"), answer.tokens(mode.name))
        answers.append(answer)
        step()
    return answers


def _tokenized(
    llm: Any, prompts: Iterable[tuple[str, Prompt]], n_predict: int
) -> list[tuple[str, list[int]]]:
    """(category, token ids) of all prompts. Raises EagleError BAD_ARGUMENT if one of them is too long."""
    out, room = [], llm.n_ctx() - n_predict
    for category, text in prompts:
        prompt = chat_tokens(llm, text)
        if len(prompt) > room:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"prompt {str(text)[:40]!r} has {len(prompt)} tokens, but --n-ctx leaves room for {room}"
                " besides the answer: raise --n-ctx",
            )
        out.append((category, prompt))
    return out


def capture_cost(llm: Any, blocks: int = 30, rows: int = 8) -> float:
    """The share of time that capture adds to a decode of one row.

    It is the median over blocks that alternate between capture on and off.
    """

    def block(on: bool) -> float:
        llm.engine.set_capture(on)
        times = []
        for r in range(rows + 1):
            start = time.perf_counter()
            llm.engine.steps.decode(100, [])
            if r:  # the first decode after switching plans its memory again
                times.append(time.perf_counter() - start)
            llm.engine.steps.commit(0)
        return statistics.median(times)

    fill_context(llm.engine, 200)
    ratios = []
    for b in range(blocks):
        first = block(b % 2 == 0)
        second = block(b % 2 == 1)
        ratios.append(first / second if b % 2 == 0 else second / first)
    llm.eagle_params = llm.eagle_params  # sets capture as these parameters need it
    llm.reset()
    return statistics.median(ratios) - 1


def loop_flags(tokens: Sequence[int], n: int = 8) -> list[bool]:
    """For each token, whether it ends an n-gram that occurred earlier in the answer."""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for i in range(len(tokens)):
        gram = tuple(tokens[i - n + 1 : i + 1]) if i >= n - 1 else None
        flags.append(gram is not None and gram in seen)
        if gram is not None:
            seen.add(gram)
    return flags
