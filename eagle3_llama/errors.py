"""One exception class with a kind: what went wrong, and one line for the user."""

from __future__ import annotations

import enum


class ErrorKind(str, enum.Enum):
    """What sort of thing is wrong; stable, for code that reacts to it."""

    BAD_ARGUMENT = "bad_argument"  # a parameter out of range, or a call out of order
    BAD_CONFIG = "bad_config"  # a key of a configuration that is missing or nonsense
    BAD_FILE = "bad_file"  # cannot be opened or read
    BAD_VALUE = "bad_value"  # a value in a file that cannot be right
    BUSY = "busy"  # the context is in the middle of a step, another thread's or that of a callback
    CONTEXT_TAKEN = "context_taken"  # another generation, or a call, uses the context since
    DECODE = "decode"  # the target's decode failed
    HEAD_MISMATCH = "head_mismatch"  # the head belongs to another target
    LIBRARY = "library"  # the native library is missing, foreign or of another version
    MEMORY = "memory"
    MISSING_TENSOR = "missing_tensor"
    NATIVE = "native"  # a failure inside the native library
    NO_SPACE = "no_space"
    TRUNCATED = "truncated"
    UNSUPPORTED = "unsupported"  # cannot be drafted for
    VOCAB_MISMATCH = "vocab_mismatch"
    WRONG_SHAPE = "wrong_shape"


class EagleError(Exception):
    """Raised for everything a user can mend; str() is one line that says what is wrong and how."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotLoaded(EagleError, AttributeError):
    """eagle3_llama has no EagleLlama in this process, for its libraries cannot be loaded. Of kind LIBRARY."""
