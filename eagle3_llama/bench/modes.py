"""The decoding modes that a benchmark compares, by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import EagleError, ErrorKind
from ..runtime.params import EagleParams, Tree
from .child import in_checkout
from .mode import Given, Loading, Mode, per_head
from .others import DraftModel, PromptLookup, Stock, StockPromptLookup, Upstream
from .turns import Run


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
        for mode in per_head(cls, argument, given):
            yield dataclasses.replace(mode, params=given.params)
            for text in given.fixed:
                name, params = _fixed(text)
                yield dataclasses.replace(mode, name=f"{mode.name} {name}", params=params)

    def load(self, loading: Loading) -> Any:
        from ..llama.eagle_llama import EagleLlama

        return EagleLlama(loading.path, eagle=self.head, **loading.settings())

    def run(self, llm: Any, plain: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        llm.eagle_params = self.params
        return super().run(llm, plain, prompt, n_predict, sampling)


class TextMode(Eagle):
    """EagleLlama without a head: drafts from the text alone."""

    kind = "text"
    takes = ()

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        cls.refuse(argument)
        yield cls(cls.kind)

    def load(self, loading: Loading) -> Any:
        llm = super().load(loading)
        if llm.engine.planner.costs is None:  # not in the middle of an answer that is timed
            llm._measure()
        return llm


class HeadMode(Eagle):
    """EagleLlama with a head, without drafts from the text."""

    kind = "head"
    takes = ("eagle",)

    @classmethod
    def parse(cls, argument: str, given: Given) -> Iterator[Mode]:
        for mode in per_head(cls, argument, given):
            yield dataclasses.replace(mode, params=EagleParams(text=False))


KINDS: dict[str, type[Mode]] = {
    cls.kind: cls
    for cls in (
        Plain,
        Eagle,
        TextMode,
        HeadMode,
        PromptLookup,
        Stock,
        StockPromptLookup,
        Upstream,
        DraftModel,
    )
}


def default_modes(heads: Sequence[str]) -> list[str]:
    """Without a head: what drafts from the text bring, in a checkout beside llama-cpp-python as it is."""
    if heads:
        return ["plain", "eagle"]
    return ["plain", "text", *["stock"] * in_checkout()]


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


def _fixed(text: str) -> tuple[str, EagleParams]:
    if text.isdecimal():
        return f"n_max={text}", EagleParams(n_max=int(text))
    return f"tree={text}", EagleParams(tree=Tree.parse(text))
