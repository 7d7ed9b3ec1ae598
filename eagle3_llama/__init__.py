"""EAGLE-3 speculative decoding for llama.cpp: same seed, same text, only faster.

    from eagle3_llama import EagleLlama
    llm = EagleLlama("target.gguf", eagle_path="head.gguf")

Importing this loads no native code; it only points a later `import llama_cpp` at the patched libllama that
comes with the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._library import prefer_our_libllama

if TYPE_CHECKING:
    from .errors import EagleError, ErrorKind
    from .llama import EagleLlama
    from .params import EagleParams

__version__ = "0.1.0"
__all__ = ["EagleError", "EagleLlama", "EagleParams", "ErrorKind"]

_HOME = {"EagleError": "errors", "EagleLlama": "llama", "EagleParams": "params", "ErrorKind": "errors"}

prefer_our_libllama()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
