"""The package's exception. It has a kind, for code to react to, and a one-line message for the user."""

from __future__ import annotations

import enum
from typing import Any


class ErrorKind(str, enum.Enum):
    """The kind of an error. These values are stable, so that code can depend on them."""

    BAD_ARGUMENT = "bad_argument"  # a parameter is out of range, or calls came in the wrong order
    BAD_CONFIG = "bad_config"  # a key of a configuration is missing or has an invalid value
    BAD_FILE = "bad_file"  # a file cannot be opened, read or written, or has the wrong format
    BAD_VALUE = "bad_value"  # a file contains an invalid value
    BUSY = "busy"  # another thread, or the caller of this callback, is using the context
    CONTEXT_TAKEN = "context_taken"  # another generation or call has used the context since
    DECODE = "decode"  # llama_decode of the target failed
    HEAD_MISMATCH = "head_mismatch"  # the head was trained for another target, or the file is no head
    LIBRARY = "library"  # the native library is missing, is another one, or has another version
    MEMORY = "memory"  # out of memory
    MISSING_TENSOR = "missing_tensor"
    NATIVE = "native"  # a failure inside the native library
    NO_SPACE = "no_space"  # the disk is full
    TRUNCATED = "truncated"  # a file ends too early
    UNSUPPORTED = "unsupported"  # this project cannot draft for, or convert, such a model
    VOCAB_MISMATCH = "vocab_mismatch"
    WRONG_SHAPE = "wrong_shape"


def _is_shown(c: str) -> bool:
    """True if a character may reach a terminal: names from files have others. Paths have lone surrogates."""
    return c.isprintable() or c == "\n" or "\ud800" <= c <= "\udfff"


class Portable(Exception):
    """An exception that can be pickled and copied, whatever its constructor takes.

    Python would call the constructor with `args`. A pool of processes breaks then, or waits for ever.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, dict(vars(self)))


def _restored(cls: type[Portable], args: tuple[Any, ...], state: dict[str, Any]) -> Portable:
    error = cls.__new__(cls, *args)
    vars(error).update(state)
    return error


class EagleError(Portable):
    """Raised for every error that a user can fix. str() is one line: what is wrong and how to fix it."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__("".join(c if _is_shown(c) else "?" for c in message))
        self.kind = kind


class TargetError(EagleError, ValueError):
    """The target's file or context is at fault. llama_cpp.Llama raises ValueError there."""
