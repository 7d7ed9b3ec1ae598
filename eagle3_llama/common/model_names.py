"""Names that may stand in place of the path of a model or a head: hf: names, and `auto` for a head.

Everything that takes such a path calls model() or head() here. What they return are paths, or None for a head
that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ..errors import EagleError, ErrorKind, TargetError
from . import hub

AUTO = "auto"
Name = str | os.PathLike[str]
FindHead = Callable[[str, str], str | None]

_finders: list[FindHead] = []


def find_heads_by(find: FindHead) -> None:
    """Sets what finds the head of an hf: name, or of `auto`, for a target's file.

    It converts and tries heads, and so needs modules that are above this one.
    """
    _finders[:] = [find]


def is_name(name: Name | None) -> bool:
    """True if it is no path."""
    return name is not None and (os.fspath(name) == AUTO or os.fspath(name).startswith(hub.PREFIX))


def model(name: Name) -> str:
    """The path of a model's GGUF; of an hf: name the file, fetched. Raises TargetError if it cannot be."""
    path = _text(name, "the model", "a GGUF file or an hf: name")
    if not path.startswith(hub.PREFIX):
        return path
    try:
        wanted = hub.HubName.parse(path)
        return str(hub.Repository(wanted.repo).fetch_model(wanted.file, wanted.format))
    except EagleError as e:
        raise TargetError(e.kind, str(e)) from e


def file(name: Name) -> str:
    """The path of a file, of an hf: name too, whatever it is: a model's or a head's. Raises EagleError."""
    path = os.fspath(name)
    if path.startswith(hub.PREFIX) and (wanted := hub.HubName.parse(path)).file is not None:
        return str(hub.Repository(wanted.repo).fetch(wanted.file))
    return model(path)


def head(name: Name | None, target: Name) -> str | None:
    """The path of a head's GGUF for the target; of an hf: name, fetched and converted.

    None for None, and for `auto` if there is none. Raises EagleError if it cannot be fetched, is no head or
    does not fit the target; `auto` raises nothing.
    """
    if name is not None:
        name = _text(name, "eagle", 'a GGUF file, an hf: name, or "auto"; None, or nothing, for no head')
    if name is None or not is_name(name):
        return name
    return _finders[0](os.fspath(name), os.fspath(target))


def _text(name: object, what: str, expected: str) -> str:
    """The name of a file. Raises EagleError BAD_ARGUMENT for what is none, such as True."""
    path = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(path, str) or not path:
        error = EagleError if what == "eagle" else TargetError
        raise error(ErrorKind.BAD_ARGUMENT, f"{what} is {path!r:.80}, expected {expected}")
    return path


def several(targets: Iterable[Name], heads: Iterable[Name]) -> tuple[list[str], list[str]]:
    """(paths of models, paths of heads). The heads are made for the first model. Raises EagleError."""
    models = [model(target) for target in targets]
    found = [head(name, models[0]) for name in heads]
    return models, [path for path in found if path is not None]
