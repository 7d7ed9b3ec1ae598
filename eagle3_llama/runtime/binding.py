"""llama_cpp with this package's libllama. Import it from here, then the order of imports does not matter.

Importing this module raises EagleError LIBRARY if the native libraries cannot be loaded.
"""

import ctypes
from typing import Any

from . import library

library.load()

# E402: llama_cpp opens a libllama when it is first imported, so ours must be loaded before
import llama_cpp  # noqa: E402
from llama_cpp import Llama, LlamaState  # noqa: E402

__all__ = ["Llama", "LlamaState", "address", "llama_cpp"]


def address(pointer: Any) -> int:
    """The address that a ctypes pointer of llama_cpp holds, 0 for a null pointer."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0
