"""`eagle3-llama bench`: plain, eagle and prompt_lookup side by side, alternating per prompt in one process."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from .chat import chat_tokens, generate
from .errors import EagleError, ErrorKind
from .params import EagleParams

MODES = ("plain", "eagle", "prompt_lookup")
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclasses.dataclass
class Run:
    """One answer in one mode: tokens, seconds from the first token to the last, and its rounds.

    rounds holds (index of the round's first token, tokens sampled, tokens drafted); the first token of an
    answer comes from the prompt and belongs to none. shares are seconds by part, eagle only.
    """

    tokens: list[int]
    seconds: float
    rounds: list[tuple[int, int, int]]
    shares: dict[str, float]


@dataclasses.dataclass
class Answer:
    """All runs of one prompt, by mode."""

    category: str
    runs: dict[str, list[Run]]
    gap: float | None = None  # top-2 logit gap where eagle first differs from plain

    def seconds(self, mode: str) -> float:
        return statistics.median(r.seconds for r in self.runs[mode])

    def tokens(self, mode: str) -> list[int]:
        return self.runs[mode][0].tokens


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
            raise EagleError(ErrorKind.BAD_VALUE, f"{path}, line {n}: expected a JSON string or an object with \"prompt\" ({e})") from e
    if not out:
        raise EagleError(ErrorKind.BAD_VALUE, f"{path} has no prompts" + (f" of category {category!r}" if category else ""))
    return out


class Target:
    """One model file, loaded once for each mode; weights are shared through mmap where the format allows."""

    def __init__(self, path: str, heads: Mapping[str, str], modes: Sequence[str], n_threads: int | None, n_ctx: int, n_max: int) -> None:
        """heads: file of each mode that drafts with one."""
        from .llama import EagleLlama
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        common = {"n_ctx": n_ctx, "n_threads": n_threads, "n_threads_batch": n_threads, "verbose": False}
        self.path, self.llms = str(path), {}
        for mode in dict.fromkeys(["plain", *modes]):
            if mode == "plain":
                self.llms[mode] = Llama(self.path, **common)
            elif mode in heads:
                self.llms[mode] = EagleLlama(self.path, eagle_path=heads[mode], n_max=n_max, **common)
            elif mode == "prompt_lookup":
                # logits_all: without it llama-cpp-python keeps too few rows for a prompt of several batches
                self.llms[mode] = Llama(self.path, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2), logits_all=True, **common)
            else:
                raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown mode {mode!r}; known are {', '.join(MODES)}")
        self.format = file_format(self.llms["plain"])

    def run(self, mode: str, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        llm = self.llms[mode]
        llm.reset()
        watch = _Watch(llm)
        tokens, start = [], 0.0
        for token in generate(llm, prompt, n_predict, **sampling):
            start = start or time.perf_counter()
            watch.saw(len(tokens))
            tokens.append(token)
        return Run(tokens, time.perf_counter() - start, watch.rounds(len(tokens)), watch.shares())

    def gap(self, prompt: list[int], tokens: list[int], other: list[int]) -> float:
        """Difference of the two best logits where two answers first differ."""
        at = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other)))
        llm = self.llms["plain"]
        llm.reset()
        llm.eval(prompt)
        for token in tokens[:at]:
            llm.eval([token])
        row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
        top = np.partition(row, -2)[-2:]
        return float(top[1] - top[0])

    def close(self) -> None:
        for llm in self.llms.values():
            llm.close()


class _Watch:
    """Sees where rounds begin while an answer is generated."""

    def __init__(self, llm: Any) -> None:
        self.stats = getattr(llm, "stats", None)
        self.draft_model = getattr(llm, "draft_model", None)
        self.starts: list[tuple[int, int]] = []  # (token index, drafted before)
        if self.stats is not None:
            self.stats.reset()
            self.seen = 0
        if self.draft_model is not None:
            self.calls, inner = 0, type(self.draft_model).__call__
            outer = self

            class Counting(type(self.draft_model)):  # type: ignore[misc, name-defined]
                def __call__(self, ids: Any, **kwargs: Any) -> Any:
                    outer.calls += 1
                    return inner(self, ids, **kwargs)

            if not hasattr(llm, "_plain_draft_model"):
                llm._plain_draft_model = self.draft_model
            llm.draft_model = Counting(llm._plain_draft_model.max_ngram_size, llm._plain_draft_model.num_pred_tokens)

    def saw(self, index: int) -> None:
        n = self.stats.rounds if self.stats is not None else getattr(self, "calls", 0)
        if n > len(self.starts):
            self.starts.append((index, self.stats.drafted if self.stats is not None else 0))

    def rounds(self, n_tokens: int) -> list[tuple[int, int, int]]:
        ends = [s for s, _ in self.starts[1:]] + [n_tokens]
        drafted = [d for _, d in self.starts]
        before = [0, *drafted[:-1]]
        return [(s, e - s, d - b) for (s, _), e, d, b in zip(self.starts, ends, drafted, before)]

    def shares(self) -> dict[str, float]:
        if self.stats is None:
            return {}
        return {name: getattr(self.stats, name) for name in ("target", "draft", "verify", "other")}


def file_format(llm: Any) -> str:
    """The weights' format as llama.cpp names it, e.g. BF16 or Q4_K_M."""
    import llama_cpp

    ftype = int(llm.metadata.get("general.file_type", -1))
    for name in dir(llama_cpp):
        if name.startswith("LLAMA_FTYPE_") and getattr(llama_cpp, name) == ftype:
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    return "?"


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


def bench_target(target: Target, prompts: Iterable[tuple[str, str]], modes: Sequence[str], n_predict: int, rounds: int,
                 sampling: Callable[[int], dict[str, Any]], step: Callable[[], None]) -> list[Answer]:
    """Runs every prompt in every mode, modes alternating, `rounds` times; sampling(i) is prompt i's settings."""
    answers = []
    for i, (category, prompt) in enumerate(_tokenized(target.llms["plain"], prompts, n_predict)):
        answer = Answer(category, {mode: [] for mode in target.llms})
        for r in range(rounds):
            for mode in target.llms if r % 2 == 0 else reversed(target.llms):
                for llm in target.llms.values():
                    llm.set_seed(i + 1)
                answer.runs[mode].append(target.run(mode, prompt, n_predict, sampling(i)))
        for mode in modes:
            if mode != "plain" and answer.tokens(mode) != answer.tokens("plain"):
                answer.gap = target.gap(prompt, answer.tokens("plain"), answer.tokens(mode))
        answers.append(answer)
        step()
    return answers


def _tokenized(llm: Any, prompts: Iterable[tuple[str, str]], n_predict: int) -> list[tuple[str, list[int]]]:
    """(category, token ids) of all prompts; one that leaves no room for its answer is refused before any of them runs."""
    out, room = [], llm.n_ctx() - n_predict
    for category, text in prompts:
        prompt = chat_tokens(llm, text)
        if len(prompt) > room:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"prompt {text[:40]!r} has {len(prompt)} tokens, --n-ctx leaves room for {room} beside the answer")
        out.append((category, prompt))
    return out


def capture_cost(llm: Any, blocks: int = 30, rows: int = 8) -> float:
    """How much longer a one-row decode takes with capture on, as a share: the median over blocks, on and off alternating."""
    from .tune import fill_context

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

    fill_context(llm, 200)
    ratios = []
    for b in range(blocks):
        first = block(b % 2 == 0)
        second = block(b % 2 == 1)
        ratios.append(first / second if b % 2 == 0 else second / first)
    llm.eagle_params = llm.eagle_params  # capture as the settings want it
    return statistics.median(ratios) - 1


def cost_curve(llm: Any, rows: Sequence[int] = ROWS) -> dict[str, float]:
    """One target decode of n rows with logits, in units of one row."""
    from .tune import measure_rows

    before = llm.eagle_params
    llm.eagle_params = EagleParams(n_max=0)
    seconds = measure_rows(llm, rows)
    llm.eagle_params = before
    return {str(n): round(t / seconds[1], 3) for n, t in seconds.items()}
