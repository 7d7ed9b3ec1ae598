"""The decoding modes that a benchmark compares: a class for each kind, all with the same interface."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import EagleError, ErrorKind
from ..runtime.params import EagleParams, Tree
from .turns import Run, take_turns

if TYPE_CHECKING:
    from .target import BenchTarget, Loading


@dataclasses.dataclass(frozen=True)
class Given:
    """What the command line gives for modes to use. fixed: settings besides params, such as 3 or 60x6x10."""

    heads: Sequence[str]
    draft_model: str | None
    params: EagleParams
    fixed: Sequence[str]

    def options(self) -> list[str]:
        """The fields that were given, by the names of their options."""
        names = ["eagle"] * bool(self.heads) + ["draft_model"] * (self.draft_model is not None)
        return [*names, *self.params.given, *["fixed"] * bool(self.fixed)]


@dataclasses.dataclass(frozen=True)
class Mode:
    """A decoding mode. name: in the report. head: the head or draft model, a file.

    Modes with the same `key` share what load() returns. Those that run in this process load a Llama; the
    others load the parent of a process with run(), set_seed() and close().
    """

    name: str
    head: str | None = None

    kind: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ()  # the options that have an effect in this mode
    greedy_only: ClassVar[bool] = False
    drafts: ClassVar[bool] = True
    limited: ClassVar[bool] = True  # by the costs of rows that are measured in this process

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        """The modes that this kind's name stands for. argument: what follows its name and a colon."""
        cls.refuse(argument)
        yield cls(cls.kind)

    @classmethod
    def refuse(cls, argument: str) -> None:
        if argument:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"mode {cls.kind} takes no {argument!r}: leave it out")

    @property
    def key(self) -> tuple[str, str | None]:
        return self.kind, self.head

    def check_files(self, targets: Sequence[str]) -> None:
        """Raises EagleError if a file of the mode is not there."""
        if self.head is not None and not Path(self.head).is_file():
            raise EagleError(ErrorKind.BAD_FILE, f"no such file: {self.head}")

    def prepare(self) -> None:
        """Builds what the mode needs. Called before anything is loaded. Raises EagleError."""

    def load(self, loading: Loading) -> Any:
        raise NotImplementedError

    def settle(self, llm: Any, prompts: list[list[int]]) -> None:
        """Finds the mode's best setting, by trying them on a few prompts."""

    def used(self, llm: Any) -> dict[str, int]:
        """The settings that settle() found, for the report."""
        return {}

    def run(self, target: BenchTarget, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        """Generates one answer."""
        return take_turns(target.llm(self), target.plain, prompt, n_predict, sampling)


class Plain(Mode):
    """llama-cpp-python's own loop on this package's library."""

    kind, drafts = "plain", False

    def load(self, loading: Loading) -> Any:
        from ..llama.flash import FlashLlama

        return FlashLlama(loading.path, **loading.settings())


@dataclasses.dataclass(frozen=True)
class Eagle(Mode):
    """EagleLlama with a head."""

    params: EagleParams = dataclasses.field(default_factory=EagleParams)

    kind = "eagle"
    takes = ("eagle", "fixed", *(f.name for f in dataclasses.fields(EagleParams)))

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        for mode in _per_head(cls, argument, given):
            yield dataclasses.replace(mode, params=given.params)
            for text in given.fixed:
                name, params = _fixed(text)
                yield dataclasses.replace(mode, name=f"{mode.name} {name}", params=params)

    def load(self, loading: Loading) -> Any:
        from ..llama.eagle_llama import EagleLlama

        return EagleLlama(loading.path, eagle=self.head, **loading.settings())

    def run(self, target: BenchTarget, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        target.llm(self).eagle_params = self.params
        return super().run(target, prompt, n_predict, sampling)


class Text(Eagle):
    """EagleLlama without a head: drafts from the text alone."""

    kind = "text"
    takes = ()

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        cls.refuse(argument)
        yield cls(cls.kind)

    def load(self, loading: Loading) -> Any:
        llm = super().load(loading)
        if llm.native.costs is None:  # not in the middle of an answer that is timed
            llm._measure()
        return llm


class HeadAlone(Eagle):
    """EagleLlama with a head, without drafts from the text."""

    kind = "head"
    takes = ("eagle",)

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        for mode in _per_head(cls, argument, given):
            yield dataclasses.replace(mode, params=EagleParams(text=False))


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
        from .stock import LENGTHS

        seconds = dict.fromkeys(LENGTHS, 0.0)
        for prompt in prompts:
            for llm.draft_model.num_pred_tokens in LENGTHS:
                llm.reset()
                steps = llm.generate(prompt, temp=0.0)
                next(steps)
                start = time.perf_counter()
                n = sum(1 for _ in itertools.islice(steps, n_predict))
                seconds[llm.draft_model.num_pred_tokens] += (time.perf_counter() - start) / max(n, 1)
        llm.draft_model.num_pred_tokens = min(LENGTHS, key=lambda n: seconds[n])

    def used(self, llm: Any) -> dict[str, int]:
        return {"num_pred_tokens": llm.draft_model.num_pred_tokens}


@dataclasses.dataclass(frozen=True)
class Upstream(Mode):
    """llama.cpp's own drafters, on an unpatched library, in a process of its own, at their best setting.

    spec: names of --spec-type with + between them, such as ngram-mod or draft-eagle3+ngram-mod.
    """

    spec: str = "draft-eagle3"

    kind, takes, greedy_only = "upstream", ("eagle",), True

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        from .upstream import SPECS

        specs = (argument or cls.spec).split("+")
        if unknown := [s for s in specs if s not in SPECS]:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"mode {cls.kind}:{argument}: there is no {unknown[0]!r}; choose from {', '.join(SPECS)},"
                " with + between several",
            )
        spec = ",".join(specs)
        if "draft-eagle3" in specs:
            for mode in _per_head(cls, "", given):
                name = mode.name if not argument else mode.name.replace(cls.kind, f"{cls.kind}:{argument}", 1)
                yield dataclasses.replace(mode, name=name, spec=spec)
        else:
            yield cls(f"{cls.kind}:{argument}", spec=spec)

    @property
    def key(self) -> tuple[str, str | None]:
        return f"{self.kind}:{self.spec}", self.head

    def prepare(self) -> None:
        from .upstream import build

        build()

    def load(self, loading: Loading) -> Any:
        from .upstream import Drafter

        sizes = loading.n_threads, loading.n_ctx, loading.flash_attn
        return Drafter(loading.path, self.head, self.spec, *sizes)

    def settle(self, llm: Any, prompts: list[list[int]]) -> None:
        llm.settle(prompts)

    def used(self, llm: Any) -> dict[str, int]:
        used: dict[str, int] = llm.setting.used()
        return used

    def run(self, target: BenchTarget, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        tokens, seconds, rounds = target.llm(self).run(prompt, n_predict)
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
        from .stock import libraries

        libraries()

    def load(self, loading: Loading) -> Any:
        from .stock import StockProcess

        sizes = loading.n_threads, loading.n_ctx, loading.flash_attn
        return StockProcess(loading.path, *sizes, lookup=self.lookup)

    def run(self, target: BenchTarget, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        run: Run = target.llm(self).run(prompt, n_predict, sampling)
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

    def run(self, target: BenchTarget, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        run: Run = target.llm(self).run(prompt, n_predict, sampling, self.n_draft)
        return run


KINDS: dict[str, type[Mode]] = {
    cls.kind: cls
    for cls in (Plain, Eagle, Text, HeadAlone, PromptLookup, Stock, StockPromptLookup, Upstream, DraftModel)
}


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
    given, modes = Given(heads, draft_model, params, fixed), list[Mode]()
    wanted = [name.lower().partition(":") for name in names]
    _check_used([kind for kind, _, _ in wanted], given)
    for kind, _, argument in wanted:
        if kind not in KINDS:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown mode {kind!r}: choose from {', '.join(KINDS)}")
        modes += KINDS[kind].parse(argument, given)
    return modes


def _check_used(names: Sequence[str], given: Given) -> None:
    for option in given.options():
        users = [kind for kind, cls in KINDS.items() if option in cls.takes]
        if not set(users) & set(names):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"--{option.replace('_', '-')} has no effect in the modes {', '.join(names)}: leave it out,"
                f" or add {users[0]} to --modes",
            )


def _per_head(cls: type[Mode], argument: str, given: Given) -> Iterator[Any]:
    """One mode per head, named after the head's file if there are several."""
    if not given.heads:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"mode {cls.kind} needs --eagle")
    cls.refuse(argument)
    for head in given.heads:
        name = cls.kind if len(given.heads) == 1 else f"{cls.kind}:{_stem(head, given.heads)}"
        yield cls(name, head)


def _stem(head: str, heads: Sequence[str]) -> str:
    """A short unique name of a head's file: its stem, or the whole path if several files have that stem."""
    stem = Path(head).stem
    return stem if [Path(h).stem for h in heads].count(stem) == 1 else head


def _fixed(text: str) -> tuple[str, EagleParams]:
    if text.isdecimal():
        return f"n_max={text}", EagleParams(n_max=int(text))
    return f"tree={text}", EagleParams(tree=Tree.parse(text))
