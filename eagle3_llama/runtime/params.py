"""What a draft may be: frozen dataclasses, validated once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from ..common.keywords import strict
from ..errors import EagleError, ErrorKind

MAX_DRAFT = 63  # native/src/planner.hpp: with the token itself, the rows that are computed alike
MAX_WIDTH = 16  # native/src/tree.cpp


@dataclasses.dataclass(frozen=True)
class Tree:
    """EAGLE-2's dynamic tree (arXiv 2406.16858): of each of `depth` levels the `width` likeliest nodes are gone on from,
    and of all nodes the `nodes` likeliest are drafted."""

    nodes: int = 60
    depth: int = 6
    width: int = 10

    def __post_init__(self) -> None:
        for name, most in (("nodes", MAX_DRAFT), ("depth", MAX_DRAFT), ("width", MAX_WIDTH)):
            _check_int(f"tree's {name}", getattr(self, name), 1, most)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """From NODES, NODESxDEPTH or NODESxDEPTHxWIDTH, e.g. 60x6x10."""
        parts = text.lower().split("x")
        if not 1 <= len(parts) <= 3 or not all(p.isdecimal() for p in parts):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"tree is {text!r}, expected NODES, NODESxDEPTH or NODESxDEPTHxWIDTH, e.g. 60x6x10",
            )
        return cls(*map(int, parts))


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape: each choice is a path of ranks, (0, 2) the third likeliest child of the likeliest one.

    Paths that a choice goes through must be choices too. parents and ranks: of each node, parents before children.
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
                    ErrorKind.BAD_ARGUMENT, f"choice {choice} goes through {choice[:-1]}, which is no choice"
                )

    @functools.cached_property  # read every round
    def parents(self) -> list[int]:
        at = {choice: i for i, choice in enumerate(self.choices)}
        return [at.get(choice[:-1], -1) for choice in self.choices]

    @functools.cached_property
    def ranks(self) -> list[int]:
        return [choice[-1] for choice in self.choices]


@strict
@dataclasses.dataclass(frozen=True)
class EagleParams:
    """How drafts are made, named as in llama.cpp. As they stand, the planner chooses each by measured cost.

    n_max: exactly this chain length is tried, 0..63; 0 decodes plainly; None leaves it to the planner.
    n_min: chains shorter than this are dropped. p_min: a chain ends before the first token whose probability (over the draft
    vocabulary) is below this, a tree does not grow from nodes less probable. Both are for a fixed n_max or tree.
    tree: a Tree, or choices for a StaticTree, instead of a chain; None lets the planner grow trees where the target can
    check them, False keeps it to chains. Trees need the target's flash attention.
    """

    n_max: int | None = None
    n_min: int = 0
    p_min: float = 0.0
    tree: Tree | StaticTree | bool | None = None

    def __post_init__(self) -> None:
        if self.n_max is not None:
            _check_int("n_max", self.n_max, 0, MAX_DRAFT)
        _check_int("n_min", self.n_min, 0, MAX_DRAFT)
        if self.n_max is not None and self.n_min > self.n_max:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"n_min {self.n_min} exceeds n_max {self.n_max}")
        if (
            isinstance(self.p_min, bool)
            or not isinstance(self.p_min, (int, float))
            or not 0 <= self.p_min <= 1
            or not math.isfinite(self.p_min)
        ):
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"p_min is {self.p_min!r}, expected a number 0..1")
        if isinstance(self.tree, str):
            object.__setattr__(self, "tree", Tree.parse(self.tree))
        elif isinstance(self.tree, Sequence):
            object.__setattr__(self, "tree", StaticTree(tuple(self.tree)))
        if self.tree is not None and not isinstance(self.tree, (Tree, StaticTree, bool)):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"tree is {self.tree!r}, expected a Tree, a list of choices, False or None",
            )
        if self.planned and (self.n_min or self.p_min):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{'n_min' if self.n_min else 'p_min'} needs n_max: without it the planner stops where drafting does not pay",
            )
        if self.n_max is not None and self.fixed_tree:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "give n_max, for chains, or tree, not both")

    @property
    def fixed_tree(self) -> bool:
        return isinstance(self.tree, (Tree, StaticTree))

    @property
    def planned(self) -> bool:
        """Whether the planner chooses."""
        return self.n_max is None and not self.fixed_tree

    def chain(self) -> EagleParams:
        """The same without trees: where only a single line of text can be checked."""
        if isinstance(self.tree, Tree):
            return EagleParams(self.tree.depth, p_min=self.p_min)
        if isinstance(self.tree, StaticTree):
            return EagleParams(max(map(len, self.tree.choices)), p_min=self.p_min)
        return dataclasses.replace(self, tree=False)

    @classmethod
    def of(cls, **settings: object) -> EagleParams:
        """From keyword arguments; an unknown name is refused with the nearest right one."""
        return cls(**settings)  # type: ignore[arg-type]


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {value!r}, expected an integer {least}..{most}")
