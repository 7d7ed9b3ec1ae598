"""EAGLE-3 speculative decoding for llama.cpp: same seed, same text as without drafts.

    from eagle3_llama import EagleLlama
    llm = EagleLlama("target.gguf", eagle="head.gguf", flash_attn=True)

Importing this package loads no native code. It only makes a later `import llama_cpp` use the patched libllama
that this package contains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .common.model_names import find_heads_by
from .runtime.library import prefer_our_libllama

if TYPE_CHECKING:
    from .errors import EagleError, ErrorKind
    from .llama.eagle_llama import EagleLlama
    from .llama.installed import install
    from .runtime.params import EagleParams, Tree

__version__ = "0.1.0"
__all__ = ["EagleError", "EagleLlama", "EagleParams", "ErrorKind", "Tree", "install"]

_HOME = {
    "EagleError": "errors",
    "EagleLlama": "llama",
    "EagleParams": "runtime.params",
    "ErrorKind": "errors",
    "Tree": "runtime.params",
    "install": "llama.installed",
}

prefer_our_libllama()


def _find_head(name: str, target: str) -> str | None:
    from .heads.auto import find_head  # above what takes names, which imports run downwards from

    return find_head(name, target)


find_heads_by(_find_head)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use.

    Raises EagleError LIBRARY if the native libraries cannot be loaded. That is no AttributeError: Python
    would drop its message in `from eagle3_llama import EagleLlama`.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
