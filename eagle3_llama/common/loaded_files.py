"""The files that a model was loaded from, as they were then.

A path may name another file later, or none: the process changes its folder, the file is moved, or a newer
one is put in its place. What is read after the load asks here first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import EagleError, ErrorKind
from .model_reader import Name, files_of


class LoadedFile(NamedTuple):
    """path: absolute. size: bytes. time: of the last change, in seconds."""

    path: str
    size: int
    time: float


class LoadedFiles(NamedTuple):
    """model: of all parts of a split one. head, lora: None without one."""

    model: tuple[LoadedFile, ...]
    head: LoadedFile | None = None
    lora: LoadedFile | None = None


def loaded(model: Name, head: Name | None = None, lora: Name | None = None) -> LoadedFiles:
    """Looks at the files now. Raises OSError for one that is not there."""
    return LoadedFiles(
        tuple(map(stamp, files_of(model))), stamp(head) if head else None, stamp(lora) if lora else None
    )


def stamp(path: Name) -> LoadedFile:
    """Raises OSError."""
    absolute = os.path.abspath(path)
    about = os.stat(absolute)
    return LoadedFile(absolute, about.st_size, about.st_mtime)


def check_same(files: Iterable[Sequence[object]]) -> None:
    """Raises EagleError BAD_FILE for a file that is gone, or is another one than that which was loaded."""
    for path, *then in files:
        try:
            now = stamp(str(path))
        except OSError as e:
            raise EagleError(
                ErrorKind.BAD_FILE,
                f"{path}, from which the model was loaded, cannot be read any more ({e.strerror}): put it"
                " back, or load the model again",
            ) from e
        if list(now[1:]) != then:
            raise EagleError(
                ErrorKind.BAD_FILE,
                f"{path} is another file than the one that the model was loaded from: load the model again",
            )


def are_same(files: Iterable[LoadedFile]) -> bool:
    """True if the files are those that were loaded."""
    try:
        check_same(files)
    except EagleError:
        return False
    return True
