"""Opens the engine of a loaded model, with its drafter where that can draft for it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from ..common import tokenizers
from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama, address
from ..runtime.engine import Engine


def open_engine(
    llm: Llama, eagle_path: str | None, n_slots: int, extract_layers: Sequence[int] | None, auto: bool
) -> Engine:
    """The engine over a model's context. Where its drafter cannot draft, it warns: text alone drafts.

    eagle_path: the drafter's file, a head or a small model. auto: nobody named it. Raises EagleError
    HEAD_MISMATCH if it belongs to another target.
    """
    ctx = address(llm._ctx.ctx)
    model = address(llm._model.model)
    try:
        engine = Engine(ctx, model, eagle_path, n_slots, extract_layers, llm.model_params.n_gpu_layers)
        if engine.drafter_note and llm.verbose:
            print(f"EagleLlama: {eagle_path}: {engine.drafter_note}", file=sys.stderr)
        if eagle_path and engine.has_head and (message := tokenizers.warning(llm.model_path, eagle_path)):
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
