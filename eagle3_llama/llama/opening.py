"""Opens the engine of a loaded model, with its head where that can draft for it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..common import tokenizers
from ..errors import EagleError, ErrorKind
from ..runtime.at_exit import close_at_exit
from ..runtime.binding import address
from ..runtime.engine import Engine

if TYPE_CHECKING:
    from .eagle_llama import EagleLlama


def open_engine(llm: EagleLlama, eagle_path: str | None) -> Engine:
    """The engine over a model's context. Where its head cannot draft, it warns, and drafts from text alone.

    Raises EagleError HEAD_MISMATCH if the head belongs to another target.
    """
    close_at_exit(llm)
    ctx = address(llm._ctx.ctx)
    model = address(llm._model.model)
    try:
        engine = Engine(ctx, model, eagle_path, llm._n_slots, llm._extract_layers)
        if eagle_path is not None and (message := tokenizers.warning(llm.model_path, eagle_path)):
            _warn(message)
        return engine
    except EagleError as e:
        if eagle_path is None or e.kind is not ErrorKind.UNSUPPORTED and not llm._auto:
            raise
        engine = Engine(ctx, model, None, llm._n_slots)
        _warn(f"EagleLlama {'drafts from the text alone' if engine.has_state else 'decodes plainly'}: {e}")
        return engine


def _warn(message: str) -> None:
    """Shown for the line that made the EagleLlama: open_engine(), _begin() and __init__() are in between."""
    warnings.warn(message, RuntimeWarning, stacklevel=5)
