"""EagleLlama, and what makes it a llama_cpp.Llama: ownership of the context, states, scores, images, chat templates."""

from typing import Any

__all__ = ["EagleLlama"]


def __getattr__(name: str) -> Any:
    if name == "EagleLlama":  # loads the native libraries, which ownership, scores and chat do without
        from .eagle_llama import EagleLlama

        return EagleLlama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
