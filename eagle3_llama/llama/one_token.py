"""Llama.sample() of an EagleLlama: one token behind the present text."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama, llama_cpp

if TYPE_CHECKING:
    from .eagle_llama import EagleLlama

_SAMPLE = inspect.signature(Llama.sample)


def sample(llm: EagleLlama, *args: Any, **kwargs: Any) -> int:
    """args, kwargs: those of Llama.sample. A generation's sampler is used again, whatever is asked.

    Raises EagleError BAD_ARGUMENT if the logits of the position are not there, and what a processor raised.
    """
    bound = _SAMPLE.bind(llm, *args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    text = llm._context
    text.refresh()
    row = -1 if a["idx"] is None else a["idx"] - text.n_tokens
    if not llama_cpp.llama_get_logits_ith(llm._ctx.ctx, row):
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"idx is {a['idx']}: the logits of that position are not there"
            " (logits_all=True keeps those of the last batch)",
        )
    if llm._sampler is not None:
        return text.draw(llm._sampler, llm._processors, row)
    processors = llm._guarded(a["logits_processor"])
    sampler = llm._new_sampler(a, processors)
    try:
        return text.draw(sampler, processors, row)
    finally:
        sampler.close()
