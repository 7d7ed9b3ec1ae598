"""What may stand where the path of a model or a head is taken: hf: names, and `auto` for a head.

Everything that takes such a path calls model() or head() here. What they return are paths, or None for a head
that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ..errors import EagleError, TargetError
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
    """Whether it is no path."""
    return name is not None and (os.fspath(name) == AUTO or os.fspath(name).startswith(hub.PREFIX))


def model(name: Name) -> str:
    """The path of a model's GGUF; of an hf: name the file, fetched. Raises TargetError if it cannot be."""
    path = os.fspath(name)
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
    if name is None or not is_name(name):
        return None if name is None else os.fspath(name)
    return _finders[0](os.fspath(name), os.fspath(target))


def several(targets: Iterable[Name], heads: Iterable[Name]) -> tuple[list[str], list[str]]:
    """(paths of models, paths of heads). The heads are made for the first model. Raises EagleError."""
    models = [model(target) for target in targets]
    found = [head(name, models[0]) for name in heads]
    return models, [path for path in found if path is not None]
