"""Names of settings: one for each thing, aliases that stay, the right one for whoever gives a wrong one."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import EagleError, ErrorKind

OURS = ("eagle", "n_max", "n_min", "p_min", "tree", "extract_layers")
ALIASES = {"eagle_path": "eagle", "head": "eagle"}
NEAR = 0.75  # of difflib: trees and tree have 0.89, the old n_gqa and n_max 0.6

# What other projects call it (vLLM, SGLang, Transformers, llama.cpp, llama-cpp-python's draft models): a name
# with one of these words between its underscores is about drafting; its other words hint at what.
_DRAFTING = set(
    "eagle eagle2 eagle3 draft drafts drafter spec speculative speculation speculator assistant".split()
)
_HINTS = (
    ("tree", {"tree", "trees", "choices"}),
    ("extract_layers", {"layer", "layers"}),
    ("p_min", {"p", "prob", "threshold"}),
    ("n_min", {"min"}),
    ("n_max", {"n", "k", "max", "num", "len", "length", "tokens", "steps"}),
)
_MEANT = {
    "head_path": "eagle",
    "head_file": "eagle",
    "head_model": "eagle",
    "num_pred_tokens": "n_max",
    "capture_layers": "extract_layers",
}

_told: set[str] = set()  # unknown keywords that a warning was given for in this process

T = TypeVar("T", bound=type)


def one_of(given: Mapping[str, Any], name: str = "eagle") -> Any:
    """The value of a setting that was given by its name or an alias, None if it was not; a path as text.

    Raises EagleError (BAD_ARGUMENT) if two of them were given that differ.
    """
    values = {
        k: os.fspath(v) if isinstance(v, os.PathLike) else v
        for k, v in given.items()
        if v is not None and ALIASES.get(k, k) == name
    }
    if len(set(values.values())) > 1:
        both = " and ".join(f"{k}={v!r}" for k, v in values.items())
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{both} name one thing differently: give {name} alone")
    return next(iter(values.values()), None)


def check_ignored(given: Iterable[str], theirs: Sequence[str], later: Iterable[str] = ()) -> None:
    """Of keywords that llama_cpp.Llama ignores, refuses what means one of ours and warns of others, once.

    theirs: the names that Llama takes; later: those that its methods take. Raises EagleError (BAD_ARGUMENT).
    """
    for name in given:
        if right := meant(name, theirs):
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown keyword {name!r}: did you mean {right}?")
    for name in given:
        if name not in _told:
            _told.add(name)
            near = difflib.get_close_matches(name, theirs, 1, NEAR)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            hint = "give it to the method that generates" if name in later else hint
            _warn(f"unknown keyword {name!r} is ignored, as llama_cpp.Llama does: {hint}")


def check_unused(eagle: str | None, params: Any, extract_layers: Any, others: Mapping[str, Any]) -> None:
    """Says what would be dropped in silence: a head, or what was set for one. others: Llama's arguments.

    Raises EagleError (BAD_ARGUMENT) for a head beside a draft_model.
    """
    if eagle is not None:
        if others.get("draft_model") is not None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "give eagle or draft_model, not both")
        for mode in ("embedding", "vocab_only"):
            if others.get(mode):
                mend = "load the model without it to generate with the head"
                _warn(f"EagleLlama leaves the head out, for {mode}=True generates nothing: {mend}")
        return
    why = (
        "a draft_model has its own"
        if others.get("draft_model") is not None
        else "without a head nothing is drafted"
    )
    given = {"n_max": params.n_max, "tree": params.fixed_tree, "extract_layers": extract_layers is not None}
    for name in (name for name, value in given.items() if value):
        _warn(f"{name} has no effect, for {why}: give eagle, or leave it out")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)  # where the model is loaded


def meant(name: str, theirs: Iterable[str] = ()) -> str | None:
    """The one of OURS that a wrong name stands for; None if it is nearer to one of theirs or far from all."""
    word = name.lower()
    words = set(word.split("_"))
    if words & _DRAFTING:
        return next((ours for ours, hints in _HINTS if words & hints), "eagle")
    if word in _MEANT:
        return _MEANT[word]
    near = max((*OURS, *ALIASES), key=lambda n: _likeness(word, n))
    if _likeness(word, near) >= NEAR and _likeness(word, near) > max(
        (_likeness(word, n) for n in theirs if n not in OURS), default=0.0
    ):
        return ALIASES.get(near, near)
    return None


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def unknown(name: str, names: Iterable[str]) -> EagleError:
    """The error for a setting that is none of `names`, with the nearest right one."""
    names = tuple(names)
    right, near = meant(name, names), difflib.get_close_matches(name, names, 1)
    right = right if right in names else near[0] if near else None
    hint = f", did you mean {right}?" if right else f"; known are {', '.join(names)}"
    return EagleError(ErrorKind.BAD_ARGUMENT, f"unknown setting {name!r}{hint}")


def strict(cls: T) -> T:
    """A dataclass whose constructor refuses unknown names, as unknown() says, and takes its aliases."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(init)
    names = [p for p in signature.parameters if p != "self"]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        aliased = {k: v for k, v in given.items() if k not in names and ALIASES.get(k) in names}
        for name in given.keys() - aliased.keys():
            if name not in names:
                raise unknown(name, names)
        bound = signature.bind_partial(self, *args, **{k: v for k, v in given.items() if k in names})
        for right in {ALIASES[k] for k in aliased}:
            bound.arguments[right] = one_of({right: bound.arguments.get(right), **aliased}, right)
        init(*bound.args, **bound.kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
