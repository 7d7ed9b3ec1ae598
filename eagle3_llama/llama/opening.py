"""Opens the engine of a loaded model, with its head where that can draft for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..common import tokenizers
from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama, address
from ..runtime.engine import Engine


def open_engine(
    llm: Llama, eagle_path: str | None, n_slots: int, extract_layers: Sequence[int] | None, auto: bool
) -> Engine:
    """The engine over a model's context. Where its head cannot draft, it warns, and drafts from text alone.

    auto: nobody named the head. Raises EagleError HEAD_MISMATCH if the head belongs to another target.
    """
    ctx = address(llm._ctx.ctx)
    model = address(llm._model.model)
    try:
        engine = Engine(ctx, model, eagle_path, n_slots, extract_layers)
        if eagle_path is not None and (message := tokenizers.warning(llm.model_path, eagle_path)):
            _warn(message)
        return engine
    except EagleError as e:
        if eagle_path is None or e.kind is not ErrorKind.UNSUPPORTED and not auto:
            raise
        engine = Engine(ctx, model, None, n_slots)
        _warn(f"EagleLlama {'drafts from the text alone' if engine.has_state else 'decodes plainly'}: {e}")
        return engine


def _warn(message: str) -> None:
    """Shown for the line that made the EagleLlama: open_engine(), _begin() and __init__() are in between."""
    warnings.warn(message, RuntimeWarning, stacklevel=5)
