"""Llama.sample() of an EagleLlama: one token behind the present text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama, llama_cpp
from .processors import GuardedProcessors
from .text import ContextText

_SAMPLE = inspect.signature(Llama.sample)


def arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of Llama.sample by their names, with defaults. args: the Llama comes first."""
    bound = _SAMPLE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def sample(
    text: ContextText,
    ctx: Any,
    used: tuple[Any, GuardedProcessors | None],
    new: Callable[[dict[str, Any]], tuple[Any, GuardedProcessors | None]],
    asked: dict[str, Any],
) -> int:
    """asked: the arguments of Llama.sample. used: a generation's sampler (or None) and processors, which are
    used again, whatever is asked. new: makes others of the arguments.

    Raises EagleError BAD_ARGUMENT if the logits of the position are not there, and what a processor raised.
    """
    text.refresh()
    row = -1 if asked["idx"] is None else asked["idx"] - text.n_tokens
    if not llama_cpp.llama_get_logits_ith(ctx, row):
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"idx is {asked['idx']}: the logits of that position are not there"
            " (logits_all=True keeps those of the last batch)",
        )
    if used[0] is not None:
        return text.draw(*used, row)
    sampler, processors = new(asked)
    try:
        return text.draw(sampler, processors, row)
    finally:
        sampler.close()
