"""The decoding modes that a benchmark compares. All have the same interface."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.chat import generate
from ..runtime.params import EagleParams, Tree

TURN = 16  # tokens that each mode generates before it is the other's turn
KINDS = ("plain", "eagle", "prompt_lookup", "upstream", "draft_model")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A decoding mode. name: in the report. head: the head or draft model. params: only of kind eagle."""

    name: str
    kind: str
    head: str | None = None
    params: EagleParams | None = None


@dataclasses.dataclass
class Run:
    """One answer in one mode.

    seconds: from the first token to the last. rounds: (index of the round's first token, sampled tokens,
    draft tokens). The first token of an answer comes from the prompt's decode and belongs to no round.
    shares: seconds by part, only for kind eagle. plain: plain decoding of the same prompt, taking turns with
    this run. None for plain decoding itself, and for modes that cannot pause between tokens.
    """

    tokens: list[int]
    seconds: float
    rounds: list[tuple[int, int, int]]
    shares: dict[str, float]
    plain: Run | None = None


def parse_modes(
    names: Sequence[str],
    heads: Sequence[str],
    draft_model: str | None,
    params: EagleParams,
    fixed: Sequence[str],
) -> list[Mode]:
    """Modes by name, one per head. fixed: further settings to try besides params, such as 3 or 60x6x10.

    Raises EagleError BAD_ARGUMENT, also for what none of the modes uses.
    """
    _check_used(names, heads, draft_model, params, fixed)
    modes = []
    for name in names:
        if name not in KINDS:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown mode {name!r}: choose from {', '.join(KINDS)}")
        if name in ("eagle", "upstream") and not heads:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"mode {name} needs --eagle")
        if name == "draft_model" and draft_model is None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "mode draft_model needs --draft-model")
        if name in ("eagle", "upstream"):
            for head in heads:
                full = name if len(heads) == 1 else f"{name}:{_stem(head, heads)}"
                modes.append(Mode(full, name, head, params))
                if name == "eagle":
                    modes += [Mode(f"{full} {_label(f)}", name, head, _fixed(f)) for f in fixed]
        else:
            modes.append(Mode(name, name, draft_model if name == "draft_model" else None))
    return modes


def _check_used(
    names: Sequence[str],
    heads: Sequence[str],
    draft_model: str | None,
    params: EagleParams,
    fixed: Sequence[str],
) -> None:
    eagle = [*params.given, *(["fixed"] if fixed else [])]
    users = {
        **{name: ("eagle",) for name in eagle},
        **({"eagle": ("eagle", "upstream")} if heads else {}),
        **({"draft_model": ("draft_model",)} if draft_model is not None else {}),
    }
    for name, modes in users.items():
        if not set(modes) & set(names):
            option = "--" + name.replace("_", "-")
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{option} has no effect in the modes {', '.join(names)}: leave it out, or add {modes[0]} to"
                " --modes",
            )


def _stem(head: str, heads: Sequence[str]) -> str:
    """A short unique name of a head's file: its stem, or the whole path if several files have that stem."""
    stem = Path(head).stem
    return stem if [Path(h).stem for h in heads].count(stem) == 1 else head


def _fixed(text: str) -> EagleParams:
    return EagleParams(n_max=int(text)) if text.isdecimal() else EagleParams(tree=Tree.parse(text))


def _label(text: str) -> str:
    return f"n_max={text}" if text.isdecimal() else f"tree={text}"


class Target:
    """A model file, loaded once per kind of mode. The loads share the weights through mmap if possible."""

    def __init__(
        self, path: str, modes: Sequence[Mode], n_threads: int, n_ctx: int, flash_attn: bool | None = None
    ) -> None:
        from ..llama.eagle_llama import EagleLlama
        from ..llama.flash import FlashLlama

        self.path, self.modes = str(path), list(modes)
        if all(m.kind != "plain" for m in modes):
            self.modes.insert(0, Mode("plain", "plain"))
        self._sizes = n_threads, n_ctx, flash_attn
        threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
        self._common: dict[str, Any] = {**threads, "n_ctx": n_ctx, "flash_attn": flash_attn, "verbose": False}
        self.plain = FlashLlama(self.path, **self._common)
        self._llms: dict[tuple[str, str | None], Any] = {("plain", None): self.plain}
        for mode in self.modes:
            key = (mode.kind, mode.head)
            if key not in self._llms and mode.kind == "eagle":
                self._llms[key] = EagleLlama(self.path, eagle=mode.head, **self._common)
            elif key not in self._llms:
                self._llms[key] = self._other(mode)
        self.format = file_format(self.plain)

    def _other(self, mode: Mode) -> Any:
        from ..llama.flash import FlashLlama

        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if mode.kind == "prompt_lookup":
            # without logits_all, llama-cpp-python keeps too few rows for a prompt of several batches
            lookup = LlamaPromptLookupDecoding(num_pred_tokens=2)
            return FlashLlama(self.path, draft_model=lookup, logits_all=True, **self._common)
        from .upstream import Drafter

        return Drafter(self.path, str(mode.head), mode.kind, *self._sizes)

    def llm(self, mode: Mode) -> Any:
        """The EagleLlama, Llama or upstream.Drafter of a mode."""
        return self._llms[mode.kind, mode.head]

    def drafting(self) -> list[Mode]:
        """The modes of kind eagle."""
        return [m for m in self.modes if m.kind == "eagle"]

    def seed(self, seed: int) -> None:
        for llm in self._llms.values():
            llm.set_seed(seed)

    def run(self, mode: Mode, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        """Generates one answer, taking turns with plain decoding of the same prompt.

        A turn takes about a tenth of a second. So changes in the machine's speed affect both alike.
        """
        llm = self.llm(mode)
        if mode.kind in ("upstream", "draft_model"):
            tokens, seconds, rounds = llm.run(prompt, n_predict)
            return Run(tokens, seconds, rounds, {})
        if mode.params is not None:
            llm.eagle_params = mode.params
        both = (llm,) if mode.kind == "plain" else (llm, self.plain)
        answers = [_Answering(x, prompt, n_predict, sampling) for x in both]
        turns = itertools.cycle((answers, answers[::-1]))
        while any([a.go_on(TURN) for a in next(turns)]):  # a list, so that any() skips no answer
            pass
        run, *plain = (a.run() for a in answers)
        return dataclasses.replace(run, plain=plain[0] if plain else None)

    def gap(self, prompt: list[int], tokens: list[int], other: list[int]) -> float:
        """The difference between the two highest logits where two answers first differ."""
        at = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other)))
        llm = self.plain
        llm.reset()
        llm.eval(prompt)
        for token in tokens[:at]:
            llm.eval([token])
        row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
        top = np.partition(row, -2)[-2:]
        return float(top[1] - top[0])

    def close(self) -> None:
        for llm in self._llms.values():
            llm.close()


class _Answering:
    """An answer that is generated piece by piece. The constructor generates the first token, untimed."""

    def __init__(self, llm: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> None:
        llm.reset()
        self._watch = _Watch(llm)
        self._generator = generate(llm, prompt, n_predict, **sampling)
        self._tokens: list[int] = []
        self._seconds = 0.0
        self.go_on(1)
        self._seconds = 0.0

    def go_on(self, n: int) -> bool:
        """Generates up to n more tokens. Returns whether the answer may continue."""
        start, end = time.perf_counter(), len(self._tokens) + n
        for token in itertools.islice(self._generator, n):
            self._watch.saw(len(self._tokens))
            self._tokens.append(token)
        self._seconds += time.perf_counter() - start
        return len(self._tokens) == end

    def run(self) -> Run:
        return Run(self._tokens, self._seconds, self._watch.rounds(len(self._tokens)), self._watch.shares())


class _Watch:
    """Records where rounds begin while an answer is generated."""

    def __init__(self, llm: Any) -> None:
        self.stats = getattr(llm, "stats", None)
        self.draft_model = getattr(llm, "draft_model", None)
        self.starts: list[tuple[int, int]] = []  # (index of the round's first token, draft tokens so far)
        if self.stats is not None:
            self.stats.reset()
        if self.draft_model is not None:
            self.calls, inner = 0, type(self.draft_model).__call__
            outer = self

            class Counting(type(self.draft_model)):  # type: ignore[misc]  # its class varies
                def __call__(self, ids: Any, **kwargs: Any) -> Any:
                    outer.calls += 1
                    return inner(self, ids, **kwargs)

            if not hasattr(llm, "_plain_draft_model"):
                llm._plain_draft_model = self.draft_model
            plain = llm._plain_draft_model
            llm.draft_model = Counting(plain.max_ngram_size, plain.num_pred_tokens)

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
    """The format of the weights as llama.cpp names it, such as BF16 or Q4_K_M."""
    import llama_cpp

    ftype = int(llm.metadata.get("general.file_type", -1))
    for name in dir(llama_cpp):
        if name.startswith("LLAMA_FTYPE_") and getattr(llama_cpp, name) == ftype:
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    return "?"
