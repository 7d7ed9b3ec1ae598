"""The state that EagleLlama.save_state() returns and load_state() takes: that of target and head."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..runtime.binding import LlamaState, llama_cpp


class EagleState(LlamaState):
    """A saved state. eagle_state is the head's, None if there was no head."""

    eagle_state: bytes | None = None

    @property
    def llama_state_size(self) -> int:
        """Bytes of the whole state. llama-cpp-python's caches limit their size by it."""
        arrays = self.input_ids.nbytes + self.scores.nbytes
        return len(self.llama_state) + len(self.eagle_state or b"") + arrays

    @llama_state_size.setter
    def llama_state_size(self, _: int) -> None:
        """Ignored: LlamaState is given the size of the target's state alone."""


def save(llm: Any) -> EagleState:
    """The state of an EagleLlama. Changes nothing, so a running generation can continue.

    Tokens that were accepted but not yielded yet are saved too.
    """
    if llm._engine.n_past() < llm.n_tokens:
        llm._settle()
    head = llm._engine.state() if llm._engine.has_head else None  # raises during a round
    scores = llm._scores.copy() if llm._logits_all else np.empty((0, llm._n_vocab), np.float32)
    target = _target_state(llm._ctx.ctx)
    state = EagleState(
        input_ids=llm.input_ids.copy(),
        scores=scores,
        n_tokens=llm.n_tokens,
        seed=llm._seed,
        llama_state=target,
        llama_state_size=len(target),
    )
    state.eagle_state = head
    return state


def _target_state(ctx: Any) -> bytes:
    size = llama_cpp.llama_state_get_size(ctx)
    buffer = (ctypes.c_uint8 * size)()
    n = llama_cpp.llama_state_get_data(ctx, buffer, size)
    if n == 0 or n > size:
        raise EagleError(ErrorKind.NATIVE, "the target's state cannot be saved")
    return bytes(memoryview(buffer)[:n])


def load(llm: Any, state: LlamaState) -> None:
    """Loads a state into an EagleLlama.

    Raises EagleError BAD_VALUE if it belongs to another model or context. The context is empty then.
    """
    n = state.n_tokens
    llm.n_tokens, llm._requires_eval, llm._rows = 0, True, None
    try:
        if n > len(llm.input_ids):
            room = len(llm.input_ids)
            raise EagleError(
                ErrorKind.BAD_VALUE, f"the state has {n} tokens, the context has room for {room}"
            )
        _load_target(llm._ctx.ctx, state.llama_state)
        _load_head(llm._engine, getattr(state, "eagle_state", None), n)
    except EagleError:
        llama_cpp.llama_memory_clear(llm._ctx.memory, True)
        llm._engine.state_reset(0)
        raise
    llm.input_ids[:n] = state.input_ids[:n]
    llm.n_tokens, llm._seed = n, state.seed
    if llm._logits_all:  # a state without scores leaves them unknown
        llm._scores[:] = state.scores if state.scores.shape == llm._scores.shape else np.nan


def _load_target(ctx: Any, data: bytes) -> None:
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if llama_cpp.llama_state_set_data(ctx, buffer, len(data)) != len(data):
        raise EagleError(ErrorKind.BAD_VALUE, "the state does not fit this model and context")


def _load_head(engine: Any, data: bytes | None, n_tokens: int) -> None:
    if data is not None and engine.has_head:
        engine.set_state(data)
    else:
        engine.state_reset(n_tokens)
    if engine.n_past() >= n_tokens:
        engine.rewind(n_tokens)  # target and head may have more than the text
