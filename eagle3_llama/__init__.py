"""EAGLE-3 speculative decoding for llama.cpp: same seed, same text, only faster.

    from eagle3_llama import EagleLlama
    llm = EagleLlama("target.gguf", eagle="head.gguf")

Importing this package loads no native code. It only makes a later `import llama_cpp` use the patched libllama
that this package contains.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from .common.model_names import find_heads_by
from .runtime.library import prefer_our_libllama

if TYPE_CHECKING:
    from .errors import EagleError, ErrorKind
    from .llama.eagle_llama import EagleLlama
    from .runtime.params import EagleParams, Tree

__version__ = "0.1.0"
__all__ = ["EagleError", "EagleLlama", "EagleParams", "ErrorKind", "Tree"]

_HOME = {
    "EagleError": "errors",
    "EagleLlama": "llama",
    "EagleParams": "runtime.params",
    "ErrorKind": "errors",
    "Tree": "runtime.params",
}

prefer_our_libllama()


def _find_head(name: str, target: str) -> str | None:
    from .heads.auto import find_head  # above what takes names, which imports run downwards from

    return find_head(name, target)


find_heads_by(_find_head)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use.

    Raises NotLoaded if the native libraries cannot be loaded: an AttributeError, so that hasattr() works.
    """
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


class _RaiseNotLoaded(MetaPathFinder):
    """Makes `from eagle3_llama import EagleLlama` raise NotLoaded with its message.

    Python drops the message of an AttributeError there, and then looks for a module of that name.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        package, _, attribute = name.rpartition(".")
        if package == __name__ and attribute in _HOME:
            __getattr__(attribute)


sys.meta_path.insert(0, _RaiseNotLoaded())
