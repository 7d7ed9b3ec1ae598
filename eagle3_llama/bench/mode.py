"""A decoding mode of a benchmark: the interface that all kinds have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..common.model_files import missing
from ..errors import EagleError, ErrorKind
from ..runtime.params import EagleParams
from .turns import Run, take_turns


@dataclasses.dataclass(frozen=True)
class Given:
    """The command line's settings for modes. fixed: settings besides params, such as 3 or 60x6x10."""

    heads: Sequence[str]
    draft_model: str | None
    params: EagleParams
    fixed: Sequence[str]

    def options(self) -> list[str]:
        """The fields that were given, by the names of their options."""
        names = ["eagle"] * bool(self.heads) + ["draft_model"] * (self.draft_model is not None)
        return [*names, *self.params.given, *["fixed"] * bool(self.fixed)]


@dataclasses.dataclass(frozen=True)
class Loading:
    """The settings with which every mode loads the model. flash_attn: None is llama.cpp's choice."""

    path: str
    n_threads: int
    n_ctx: int
    flash_attn: bool | None = None

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of FlashLlama and EagleLlama."""
        threads = {"n_threads": self.n_threads, "n_threads_batch": self.n_threads}
        return {**threads, "n_ctx": self.n_ctx, "flash_attn": self.flash_attn, "verbose": False}


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
            raise EagleError(ErrorKind.BAD_FILE, missing(self.head))

    def prepare(self) -> None:
        """Builds what the mode needs. Called before anything is loaded. Raises EagleError."""

    def load(self, loading: Loading) -> Any:
        raise NotImplementedError

    def settle(self, llm: Any, prompts: list[list[int]]) -> None:
        """Finds the mode's best setting, by trying them on a few prompts."""

    def used(self, llm: Any) -> dict[str, int]:
        """The settings that settle() found, for the report."""
        return {}

    def found(self, llm: Any) -> dict[str, Any]:
        """The findings of settle(), for use(): everything that it set."""
        return self.used(llm)

    def use(self, llm: Any, found: dict[str, Any]) -> None:
        """Sets what settle() found before."""

    def run(self, llm: Any, plain: Any, prompt: list[int], n_predict: int, sampling: dict[str, Any]) -> Run:
        """Generates one answer. llm: what load() returned. plain: mode plain's, which takes turns with it."""
        return take_turns(llm, plain, prompt, n_predict, sampling)


def per_head(cls: type[Mode], argument: str, given: Given) -> Iterator[Any]:
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
