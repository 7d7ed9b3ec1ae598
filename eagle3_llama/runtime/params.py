"""Drafting parameters: frozen dataclasses, validated when they are created."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.keywords import strict
from ..common.limits import MAX_DRAFT, MAX_WIDTH
from ..errors import EagleError, ErrorKind

NO_HEAD = "there is no head to draft with"


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
            check_int(f"tree's {name}", getattr(self, name), 1, most)

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
        try:
            choices = tuple(sorted({tuple(c) for c in self.choices}, key=lambda c: (len(c), c)))
        except TypeError:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"tree is {self.choices!r:.80}, expected choices such as [(0,), (1,), (0, 0)]",
            ) from None
        object.__setattr__(self, "choices", choices)
        check_int("number of choices", len(self.choices), 1, MAX_DRAFT)
        for choice in self.choices:
            for rank in choice:
                check_int(f"rank in choice {choice}", rank, 0, MAX_WIDTH - 1)
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


class Kind(enum.Enum):
    """The kinds of draft. The values name the kinds in docs/use.md."""

    PLAIN = "plain decoding"  # nothing
    CHAIN = "chain"  # up to n_max tokens
    TREE = "dynamic tree"  # a Tree
    CHOICES = "fixed tree"  # a StaticTree
    PLANNED = "planned"  # chains or trees, as the planner chooses
    PLANNED_CHAINS = "planned chains"


class Use(enum.Enum):
    """The uses of a setting in a kind of draft. The values stand in the table of docs/use.md."""

    CHOOSES = "chooses it"  # its value makes the draft one of this kind
    USED = "used"
    HOLDS = "holds"  # tree=False and text=False where there are none of these in any case
    REFUSED = "refused"


_CHOOSES = Use.CHOOSES
_USED = Use.USED
_HOLDS = Use.HOLDS
_PLANNER = "needs n_max: without n_max the planner decides where a draft ends"
_SHAPE = (
    "has no effect in a tree of fixed choices, which is always drafted whole: leave it out, or give a Tree"
)
_BOTH = "is for chains, and tree for trees: give n_max or tree, not both"
_NOTHING = "has no effect with n_max=0, which drafts nothing: leave it out, or raise n_max"

# What each setting does in each kind of draft: a Use, or why it is refused and how to mend it.
USES: Mapping[Kind, Mapping[str, Use | str]] = {
    Kind.PLAIN: {"n_max": _CHOOSES, "n_min": _NOTHING, "p_min": _NOTHING, "tree": _HOLDS, "text": _HOLDS},
    Kind.CHAIN: {"n_max": _CHOOSES, "n_min": _USED, "p_min": _USED, "tree": _HOLDS, "text": _HOLDS},
    Kind.TREE: {
        "n_max": _BOTH,
        "n_min": "has no effect in a tree: leave it out, or give n_max instead of tree",
        "p_min": _USED,
        "tree": _CHOOSES,
        "text": _HOLDS,
    },
    Kind.CHOICES: {"n_max": _BOTH, "n_min": _SHAPE, "p_min": _SHAPE, "tree": _CHOOSES, "text": _HOLDS},
    Kind.PLANNED: {
        "n_max": _CHOOSES,
        "n_min": _PLANNER,
        "p_min": _PLANNER + "; or give a Tree",
        "tree": _CHOOSES,
        "text": _USED,
    },
    Kind.PLANNED_CHAINS: {
        "n_max": _CHOOSES,
        "n_min": _PLANNER,
        "p_min": _PLANNER,
        "tree": _CHOOSES,
        "text": _USED,
    },
}


@strict
@dataclasses.dataclass(frozen=True)
class EagleParams:
    """Drafting parameters, named as in llama.cpp. By default the planner chooses drafts by measured cost.

    n_max: fixed number of draft tokens per round, 0..63, as a chain. 0: plain decoding. None: the planner
    chooses.
    n_min: discard chains of fewer tokens. Only with n_max.
    p_min: a probability over the draft vocabulary. A chain ends before a token that is less probable. A Tree
    leaves out a node whose whole path, the product of its tokens' probabilities, is less probable. Only with
    n_max or a Tree.
    tree: a Tree, its text form, or choices for a StaticTree, instead of a chain. None: the planner may draft
    trees if the target can verify them. False: only chains. Trees need flash attention in the target.

    USES says what each of them does in each kind of draft. None is accepted and ignored: raises EagleError
    BAD_ARGUMENT for one that would have no effect.
    """

    n_max: int | None = None
    n_min: int = 0
    p_min: float = 0.0
    tree: Tree | StaticTree | Sequence[Sequence[int]] | str | bool | None = None
    text: bool = True

    def __post_init__(self) -> None:
        if self.n_max is not None:
            check_int("n_max", self.n_max, 0, MAX_DRAFT)
        check_int("n_min", self.n_min, 0, MAX_DRAFT)
        number = isinstance(self.p_min, (int, float)) and not isinstance(self.p_min, bool)
        if not number or not 0 <= self.p_min <= 1:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"p_min is {self.p_min!r}, expected a number 0..1")
        if not isinstance(self.text, bool):
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"text is {self.text!r}, expected True or False")
        self._read_tree()
        for name in self.given:
            use = USES[self.kind][name]
            if isinstance(use, str):
                raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} {use}")
        if self.n_max is not None and self.n_min > self.n_max:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"n_min {self.n_min} exceeds n_max {self.n_max}")

    def _read_tree(self) -> None:
        if isinstance(self.tree, str):
            object.__setattr__(self, "tree", Tree.parse(self.tree))
        elif isinstance(self.tree, Sequence):
            choices: Any = tuple(self.tree)  # StaticTree makes tuples of them
            object.__setattr__(self, "tree", StaticTree(choices))
        if self.tree is True:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                "tree=True names no shape: give one, such as tree='60x6x10', or leave tree out, and the"
                " planner may draft trees",
            )
        if self.tree is not None and self.tree is not False and not isinstance(self.tree, (Tree, StaticTree)):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"tree is {self.tree!r}, expected a Tree, such as 60x6x10, a list of choices, or False;"
                " leave it out for trees that the planner chooses",
            )

    @property
    def given(self) -> list[str]:
        """The settings that differ from their defaults."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]

    @functools.cached_property  # every round reads it
    def kind(self) -> Kind:
        """The kind of draft with these parameters, by a head and a target that can."""
        if self.fixed_tree:
            return Kind.TREE if isinstance(self.tree, Tree) else Kind.CHOICES
        if self.n_max is None:
            return Kind.PLANNED if self.tree is None else Kind.PLANNED_CHAINS
        return Kind.CHAIN if self.n_max else Kind.PLAIN

    @property
    def needs_head(self) -> str | None:
        """The setting that asks for drafts; None if plain decoding is all that is asked for."""
        if self.n_max:
            return "n_max"
        return "tree" if self.fixed_tree else None

    def check_no_head(self, why: str) -> None:
        """Raises EagleError BAD_ARGUMENT if these ask for drafts where there are none. why: the reason."""
        if name := self.needs_head:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{name} has no effect, because {why}: give eagle, or leave {name} out"
                " (drafts from the text are the planner's, and need neither)",
            )

    @functools.cached_property  # every round reads it
    def fixed_tree(self) -> bool:
        return isinstance(self.tree, (Tree, StaticTree))

    @functools.cached_property  # every round reads it
    def from_text(self) -> bool:
        """True if drafts may come from the text."""
        return self.text and self.planned

    @functools.cached_property  # every round reads it
    def planned(self) -> bool:
        """True if the planner chooses the drafts."""
        return self.n_max is None and not self.fixed_tree

    def chain(self) -> EagleParams:
        """The same parameters for chains only: as long as a tree is deep, with no more tokens than it has."""
        if isinstance(self.tree, Tree):
            return EagleParams(min(self.tree.depth, self.tree.nodes), p_min=self.p_min)
        if isinstance(self.tree, StaticTree):
            return EagleParams(max(map(len, self.tree.choices)))
        return dataclasses.replace(self, tree=False)


def check_int(name: str, value: object, least: int, most: int) -> None:
    """Raises EagleError BAD_ARGUMENT unless value is an integer in least..most."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {value!r}, expected an integer {least}..{most}")
