"""EAGLE-3 speculative decoding for llama.cpp: same seed, same text, only faster.

    from eagle3_llama import EagleLlama
    llm = EagleLlama("target.gguf", eagle="head.gguf")

Importing this loads no native code; it only points a later `import llama_cpp` at the patched libllama that
comes with the package.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .runtime.library import prefer_our_libllama

if TYPE_CHECKING:
    from .errors import EagleError, ErrorKind
    from .llama.eagle_llama import EagleLlama
    from .runtime.params import EagleParams

__version__ = "0.1.0"
__all__ = ["EagleError", "EagleLlama", "EagleParams", "ErrorKind"]

_HOME = {
    "EagleError": "errors",
    "EagleLlama": "llama",
    "EagleParams": "runtime.params",
    "ErrorKind": "errors",
}

prefer_our_libllama()


def __getattr__(name: str) -> Any:
    """Raises NotLoaded, an AttributeError as hasattr() wants one, where the libraries cannot be loaded."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .errors import EagleError, ErrorKind, NotLoaded

    try:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    except EagleError as e:
        if e.kind is not ErrorKind.LIBRARY:
            raise
        raise NotLoaded(e.kind, str(e)) from e


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _WhyNot:
    """`from eagle3_llama import EagleLlama` drops an AttributeError's message and looks for a module of that
    name: it is told here."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        package, _, attribute = name.rpartition(".")
        if package == __name__ and attribute in _HOME:
            __getattr__(attribute)


sys.meta_path.insert(0, _WhyNot)
