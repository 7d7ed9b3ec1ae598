"""EagleLlama: a llama_cpp.Llama with ownership of its context, states, scores, images and chat templates."""

from typing import Any

__all__ = ["EagleLlama"]


def __getattr__(name: str) -> Any:
    if name == "EagleLlama":  # loads the native libraries; ownership, scores and chat do not need them
        from .eagle_llama import EagleLlama

        return EagleLlama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
