"""Modes of what else there is: llama-cpp-python's own, and llama.cpp's drafters."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from ..errors import EagleError, ErrorKind
from .child import of_checkout
from .mode import Given, Loading, Mode, per_head
from .turns import Run

LENGTHS = (2, 3, 5, 10)  # values of num_pred_tokens that are tried; 10 is llama-cpp-python's default


class PromptLookup(Mode):
    """llama-cpp-python's prompt lookup on this package's library, with the fastest of four lengths."""

    kind = "prompt_lookup"

    def load(self, loading: Loading) -> Any:
        from ..llama.flash import FlashLlama

        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        # without logits_all, llama-cpp-python keeps too few rows for a prompt of several batches
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=2)
        return FlashLlama(loading.path, draft_model=lookup, logits_all=True, **loading.settings())

    def settle(self, llm: Any, prompts: list[list[int]], n_predict: int = 32) -> None:
        lookup = _lookup(llm)
        seconds = dict.fromkeys(LENGTHS, 0.0)
        for prompt in prompts:
            for lookup.num_pred_tokens in LENGTHS:
                llm.reset()
                steps = llm.generate(prompt, temp=0.0)
                next(steps)
                start = time.perf_counter()
                n = sum(1 for _ in itertools.islice(steps, n_predict))
                seconds[lookup.num_pred_tokens] += (time.perf_counter() - start) / max(n, 1)
        lookup.num_pred_tokens = min(LENGTHS, key=lambda n: seconds[n])

    def used(self, llm: Any) -> dict[str, int]:
        return {"num_pred_tokens": _lookup(llm).num_pred_tokens}

    def use(self, llm: Any, found: dict[str, Any]) -> None:
        _lookup(llm).num_pred_tokens = found["num_pred_tokens"]


def _lookup(llm: Any) -> Any:
    """The draft model itself. A run of a benchmark wraps it in what counts its rounds."""
    return getattr(llm.draft_model, "inner", llm.draft_model)


@dataclasses.dataclass(frozen=True)
class Upstream(Mode):
    """llama.cpp's own drafters, on an unpatched library, in a process of its own, at their best setting.

    spec: names of --spec-type with + between them, such as ngram-mod or draft-eagle3+ngram-mod.
    """

    spec: str = "draft-eagle3"

    kind, takes, greedy_only = "upstream", ("eagle",), True

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        upstream = of_checkout("upstream")
        specs = (argument or cls.spec).split("+")
        if unknown := [s for s in specs if s not in upstream.SPECS]:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"mode {cls.kind}:{argument}: there is no {unknown[0]!r}; choose from"
                f" {', '.join(upstream.SPECS)}, with + between several",
            )
        spec = ",".join(specs)
        if set(specs) & set(upstream.FROM_FILE):
            for mode in per_head(cls, "", given):
                name = mode.name if not argument else mode.name.replace(cls.kind, f"{cls.kind}:{argument}", 1)
                yield dataclasses.replace(mode, name=name, spec=spec)
        else:
            yield cls(f"{cls.kind}:{argument}", spec=spec)

    @property
    def key(self) -> tuple[str, str | None]:
        return f"{self.kind}:{self.spec}", self.head

    def prepare(self) -> None:
        of_checkout("upstream").build()

    def load(self, loading: Loading) -> Any:
        sizes = loading.n_threads, loading.n_ctx, loading.flash_attn
        return of_checkout("upstream").Drafter(loading.path, self.head, self.spec, *sizes)

    def settle(self, llm: Any, prompts: list[list[int]]) -> None:
        llm.settle(prompts)

    def used(self, llm: Any) -> dict[str, int]:
        used: dict[str, int] = llm.setting.used()
        return used

    def found(self, llm: Any) -> dict[str, Any]:
        return dataclasses.asdict(llm.setting)

    def use(self, llm: Any, found: dict[str, Any]) -> None:
        llm.setting = of_checkout("upstream").Setting(**found)

    def run(self, llm: Any, plain: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        tokens, seconds, rounds = llm.run(prompt, n_predict)
        return Run(tokens, seconds, rounds, {})


@dataclasses.dataclass(frozen=True)
class DraftModel(Upstream):
    """llama.cpp's own drafter with a small model."""

    spec: str = "draft-simple"

    kind, takes = "draft_model", ("draft_model",)

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        if given.draft_model is None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "mode draft_model needs --draft-model")
        cls.refuse(argument)
        yield cls(cls.kind, given.draft_model)


class Stock(Mode):
    """llama-cpp-python's own loop on an unpatched library, in a process of its own."""

    kind, drafts, limited = "stock", False, False
    lookup: ClassVar[bool] = False

    def prepare(self) -> None:
        of_checkout("stock").libraries()

    def load(self, loading: Loading) -> Any:
        sizes = loading.n_threads, loading.n_ctx, loading.flash_attn
        return of_checkout("stock").StockProcess(loading.path, *sizes, lookup=self.lookup)

    def run(self, llm: Any, plain: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        run: Run = llm.run(prompt, n_predict, sampling)
        return run


@dataclasses.dataclass(frozen=True)
class StockPromptLookup(Stock):
    """Stock with llama-cpp-python's prompt lookup. n_draft: num_pred_tokens; None: the fastest of four."""

    n_draft: int | None = None

    kind, drafts = "stock_prompt_lookup", True
    lookup = True

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        if argument and not (argument.isdecimal() and int(argument)):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"mode {cls.kind}:{argument}: write a number of draft tokens behind the colon, such as 3",
            )
        yield cls(f"{cls.kind}:{argument}" if argument else cls.kind, n_draft=int(argument or 0) or None)

    def settle(self, llm: Any, prompts: list[list[int]]) -> None:
        if self.n_draft is None:
            llm.settle(prompts)

    def used(self, llm: Any) -> dict[str, int]:
        return {"num_pred_tokens": self.n_draft or llm.n_draft}

    def use(self, llm: Any, found: dict[str, Any]) -> None:
        llm.n_draft = found["num_pred_tokens"]

    def run(self, llm: Any, plain: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        run: Run = llm.run(prompt, n_predict, sampling, self.n_draft)
        return run
