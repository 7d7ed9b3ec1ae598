"""llama_cpp with this package's libllama. Import it from here, then the order of imports does not matter.

Importing this module raises EagleError LIBRARY if the native libraries cannot be loaded.
"""

import ctypes
from typing import Any

from . import library

library.load()

_OF_ROUNDS = b"set_n_threads:"  # rounds set them: llama.cpp has a line for each time

# E402: llama_cpp opens a libllama when it is first imported, so ours must be loaded before
import llama_cpp  # noqa: E402
from llama_cpp import Llama, LlamaState  # noqa: E402

__all__ = ["Llama", "LlamaState", "address", "llama_cpp"]


def _fewer_lines() -> None:
    """Leaves out of llama-cpp-python's log, with verbose=True, what a round would write each time."""
    from llama_cpp import _logger

    theirs = _logger.llama_log_callback

    def log(level: int, text: bytes, data: Any) -> None:
        if not text.startswith(_OF_ROUNDS):
            theirs(level, text, data)

    _logger.llama_log_callback = llama_cpp.llama_log_callback(log)
    llama_cpp.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))


_fewer_lines()


def address(pointer: Any) -> int:
    """The address that a ctypes pointer of llama_cpp holds, 0 for a null pointer."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0
