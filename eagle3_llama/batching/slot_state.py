"""A slot's state, as bytes in memory: tokens, the target's keys and values, the drafters' state."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..runtime.binding import llama_cpp
from ..runtime.engine import Engine
from .model import BatchModel
from .scheduler import BatchSlot

TOKEN_BYTES = 36  # an integer in a list of Python's


@dataclasses.dataclass
class SlotState:
    """A copy of a slot. target: the state of its KV cache in llama.cpp's format, a ctypes array of uint8.

    head: Engine.state(), of the head and of the text that drafts come from.
    """

    tokens: list[int]
    target: Any
    head: bytes

    @property
    def n_bytes(self) -> int:
        """Its bytes in memory."""
        return len(self.target) + len(self.head) + TOKEN_BYTES * len(self.tokens)


class SlotStates:
    """Copies slots to memory and back. For the batcher's thread, between rounds."""

    def __init__(self, base: BatchModel, engine: Engine) -> None:
        self._base = base
        self._engine = engine

    def n_bytes(self, slot: BatchSlot) -> int:
        """Bytes that take() would copy."""
        if not slot.tokens:
            return 0
        head = self._engine.state_size(slot.id) if self._engine.has_state else 0
        return int(llama_cpp.llama_state_seq_get_size(self._base._ctx.ctx, slot.id)) + head

    def take(self, slot: BatchSlot) -> SlotState:
        """A copy of what the slot holds. Raises EagleError or MemoryError; the slot is as it was."""
        ctx = self._base._ctx.ctx
        self._engine.settle(slot.id)
        size = llama_cpp.llama_state_seq_get_size(ctx, slot.id) if slot.tokens else 0
        # np.empty() leaves the bytes as they are: they are written once, and not twice.
        target = (ctypes.c_uint8 * size).from_buffer(np.empty(size, np.uint8).data) if size else b""
        if size and llama_cpp.llama_state_seq_get_data(ctx, target, size, slot.id) != size:
            raise EagleError(ErrorKind.NATIVE, "the target's state cannot be saved")
        head = self._engine.state(slot.id) if self._engine.has_state else b""
        return SlotState(list(slot.tokens), target, head)

    def put(self, slot: BatchSlot, state: SlotState) -> None:
        """Fills the slot. Raises EagleError BAD_VALUE, and empties the slot, if the state does not fit."""
        self.clear(slot)
        ctx = self._base._ctx.ctx
        tokens, target = state.tokens, state.target
        try:
            if tokens:
                memory = llama_cpp.llama_get_memory(ctx)
                if (
                    llama_cpp.llama_state_seq_set_data(ctx, target, len(target), slot.id) != len(target)
                    or llama_cpp.llama_memory_seq_pos_max(memory, slot.id) != len(tokens) - 1
                ):
                    raise EagleError(ErrorKind.BAD_VALUE, "the saved slot does not fit this model's cache")
            if self._engine.has_head or state.head:
                self._engine.set_state(state.head, slot.id)
                if self._engine.n_past(slot.id) != len(tokens):
                    raise EagleError(
                        ErrorKind.BAD_VALUE, "the parts of the saved slot do not belong together"
                    )
            else:
                self._engine.state_reset(len(tokens), slot.id)
        except EagleError:
            self.clear(slot)
            raise
        slot.tokens = list(tokens)

    def clear(self, slot: BatchSlot) -> None:
        """Empties the slot."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._base._ctx.ctx), slot.id, -1, -1)
        self._engine.state_reset(0, slot.id)
        slot.tokens = []
