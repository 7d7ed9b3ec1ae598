"""Drafting parameters: frozen dataclasses, validated when they are created."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from ..common.keywords import strict
from ..errors import EagleError, ErrorKind

MAX_DRAFT = 63  # native/src/planner.hpp: together with the sampled token, the largest batch-invariant batch
MAX_WIDTH = 16  # native/src/tree.cpp


@dataclasses.dataclass(frozen=True)
class Tree:
    """EAGLE-2's dynamic draft tree (arXiv 2406.16858).

    The tree grows for `depth` levels. On each level, the `width` most likely nodes get children. Of all
    nodes, the `nodes` most likely ones are drafted.
    """

    nodes: int = 60
    depth: int = 6
    width: int = 10

    def __post_init__(self) -> None:
        for name, most in (("nodes", MAX_DRAFT), ("depth", MAX_DRAFT), ("width", MAX_WIDTH)):
            _check_int(f"tree's {name}", getattr(self, name), 1, most)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """A tree from NODES, NODESxDEPTH or NODESxDEPTHxWIDTH, such as 60x6x10. Raises EagleError."""
        parts = text.lower().split("x")
        if not 1 <= len(parts) <= 3 or not all(p.isdecimal() for p in parts):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"tree is {text!r}, expected NODES, NODESxDEPTH or NODESxDEPTHxWIDTH, such as 60x6x10",
            )
        return cls(*map(int, parts))


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A draft tree of fixed shape. Each choice is a path of ranks from the root.

    (0, 2) is the third most likely child of the most likely first token. Every prefix of a choice must be a
    choice too. parents and ranks have one entry per node; parents come before their children.
    """

    choices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "choices", tuple(sorted({tuple(c) for c in self.choices}, key=lambda c: (len(c), c)))
        )
        _check_int("number of choices", len(self.choices), 1, MAX_DRAFT)
        for choice in self.choices:
            for rank in choice:
                _check_int(f"rank in choice {choice}", rank, 0, MAX_WIDTH - 1)
            if not choice or (len(choice) > 1 and choice[:-1] not in self.choices):
                raise EagleError(
                    ErrorKind.BAD_ARGUMENT, f"choice {choice} needs the choice {choice[:-1]}: add it"
                )

    @functools.cached_property  # every round reads it
    def parents(self) -> list[int]:
        at = {choice: i for i, choice in enumerate(self.choices)}
        return [at.get(choice[:-1], -1) for choice in self.choices]

    @functools.cached_property
    def ranks(self) -> list[int]:
        return [choice[-1] for choice in self.choices]


@strict
@dataclasses.dataclass(frozen=True)
class EagleParams:
    """Drafting parameters, named as in llama.cpp. By default the planner chooses drafts by measured cost.

    n_max: fixed number of draft tokens per round, 0..63. 0: plain decoding. None: the planner chooses.
    n_min: discard chains of fewer tokens. Only with n_max.
    p_min: stop a chain before a token whose probability over the draft vocabulary is lower; in a tree, give
    no children to such a node. Only with n_max or a fixed tree. tree: a Tree, its text form, or choices for a
    StaticTree, instead of a chain. None: the planner may draft trees if the target can verify them. False:
    only chains. Trees need flash attention in the target.

    Raises EagleError BAD_ARGUMENT.
    """

    n_max: int | None = None
    n_min: int = 0
    p_min: float = 0.0
    tree: Tree | StaticTree | Sequence[Sequence[int]] | str | bool | None = None

    def __post_init__(self) -> None:
        if self.n_max is not None:
            _check_int("n_max", self.n_max, 0, MAX_DRAFT)
        _check_int("n_min", self.n_min, 0, MAX_DRAFT)
        if self.n_max is not None and self.n_min > self.n_max:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"n_min {self.n_min} exceeds n_max {self.n_max}")
        number = isinstance(self.p_min, (int, float)) and not isinstance(self.p_min, bool)
        if not number or not 0 <= self.p_min <= 1:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"p_min is {self.p_min!r}, expected a number 0..1")
        if isinstance(self.tree, str):
            object.__setattr__(self, "tree", Tree.parse(self.tree))
        elif isinstance(self.tree, Sequence):
            choices: Any = tuple(self.tree)  # StaticTree makes tuples of them
            object.__setattr__(self, "tree", StaticTree(choices))
        if self.tree is not None and not isinstance(self.tree, (Tree, StaticTree, bool)):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"tree is {self.tree!r}, expected a Tree, a list of choices, False or None",
            )
        if self.planned and (self.n_min or self.p_min):
            name = "n_min" if self.n_min else "p_min"
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{name} needs n_max: without n_max the planner decides where a draft ends",
            )
        if self.n_max is not None and self.fixed_tree:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "give n_max, for chains, or tree, not both")

    @property
    def fixed_tree(self) -> bool:
        return isinstance(self.tree, (Tree, StaticTree))

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the drafts."""
        return self.n_max is None and not self.fixed_tree

    def chain(self) -> EagleParams:
        """The same parameters for chains only, for targets that cannot verify trees."""
        if isinstance(self.tree, Tree):
            return EagleParams(self.tree.depth, p_min=self.p_min)
        if isinstance(self.tree, StaticTree):
            return EagleParams(max(map(len, self.tree.choices)), p_min=self.p_min)
        return dataclasses.replace(self, tree=False)


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {value!r}, expected an integer {least}..{most}")
