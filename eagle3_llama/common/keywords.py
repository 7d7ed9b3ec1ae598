"""Names of settings: one name for each setting, its accepted aliases, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import EagleError, ErrorKind

OURS = ("eagle", "n_max", "n_min", "p_min", "tree", "text", "text_memory", "extract_layers")
ALIASES = {"eagle_path": "eagle", "head": "eagle"}
NEAR = 0.75  # difflib ratio of similar names: 0.89 for trees and tree, 0.6 for the old n_gqa and n_max

# Names in other projects (vLLM, SGLang, Transformers, llama.cpp, llama-cpp-python's draft models). A keyword
# that contains one of these words is about drafting. Its other words (_HINTS) tell which setting it means.
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

_told: set[str] = set()  # unknown keywords that this process has already warned about

T = TypeVar("T", bound=type)


def one_of(given: Mapping[str, Any], name: str = "eagle") -> Any:
    """The value that was given for the setting `name`, by that name or by an alias. None if it was not given.

    A path is returned as a string. Raises EagleError BAD_ARGUMENT if two names have different values.
    """
    values = {
        k: os.fspath(v) if isinstance(v, os.PathLike) else v
        for k, v in given.items()
        if v is not None and ALIASES.get(k, k) == name
    }
    if len(set(values.values())) > 1:
        both = " and ".join(f"{k}={v!r}" for k, v in values.items())
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"{both} are the same setting with different values: give only {name}"
        )
    return next(iter(values.values()), None)


def check_ignored(given: Iterable[str], theirs: Sequence[str], later: Iterable[str] = ()) -> None:
    """Checks keywords that llama_cpp.Llama would silently ignore.

    Raises EagleError BAD_ARGUMENT for a keyword that means one of our settings. Warns once about any other.
    theirs: the parameters of Llama. later: the parameters of its methods.
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
            _warn(f"ignoring unknown keyword {name!r}, as llama_cpp.Llama does: {hint}")


def check_unused(eagle: str | None, params: Any, extract_layers: Any, others: Mapping[str, Any]) -> None:
    """Warns about a head that will not be used. others: the arguments for Llama.

    Raises EagleError BAD_ARGUMENT if both a head and a draft_model are given, or drafting settings (params:
    EagleParams) without a head.
    """
    if eagle is not None:
        if others.get("draft_model") is not None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "give eagle or draft_model, not both")
        for mode in ("embedding", "vocab_only"):
            if others.get(mode):
                mend = f"leave {mode} out to generate with the head"
                _warn(f"the head is not used, because a model with {mode}=True cannot generate: {mend}")
        return
    own_drafts = others.get("draft_model") is not None
    why = "the draft_model has its own settings" if own_drafts else "there is no head to draft with"
    params.check_no_head(why)
    if extract_layers is not None:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"extract_layers has no effect, because {why}: give eagle, or leave extract_layers out",
        )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)  # where the model is loaded


def meant(name: str, theirs: Iterable[str] = ()) -> str | None:
    """The name in OURS that an unknown name most likely means.

    None if no name is similar, or if one of `theirs` is more similar.
    """
    word = name.lower()
    words = set(word.split("_"))
    if words & _DRAFTING:
        return next((ours for ours, hints in _HINTS if words & hints), "eagle")
    if word in _MEANT:
        return _MEANT[word]
    near = max((*OURS, *ALIASES), key=lambda n: _similarity(word, n))
    nearest_of_theirs = max((_similarity(word, n) for n in theirs if n not in OURS), default=0.0)
    if _similarity(word, near) >= NEAR and _similarity(word, near) > nearest_of_theirs:
        return ALIASES.get(near, near)
    return None


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def unknown(
    name: str, names: Iterable[str], what: str = "unknown setting", otherwise: str | None = None
) -> EagleError:
    """The error for a setting that is not in `names`. It suggests the most similar name, or `otherwise`."""
    names = tuple(names)
    right, near = meant(name, names), difflib.get_close_matches(name, names, 1)
    right = right if right in names else near[0] if near else None
    hint = f"did you mean {right}?" if right else otherwise or f"the settings are {', '.join(names)}"
    return EagleError(ErrorKind.BAD_ARGUMENT, f"{what} {name!r:.60}: {hint}")


def strict(cls: T) -> T:
    """Class decorator for dataclasses: the constructor accepts aliases, and refuses other unknown names."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]  # a subclass may have another signature
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

    cls.__init__ = __init__  # type: ignore[misc]  # mypy takes methods for constants
    return cls
