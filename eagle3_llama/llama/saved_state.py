"""The state that EagleLlama.save_state() returns and load_state() takes: that of target and head."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.loaded_files import LoadedFile, LoadedFiles, check_same
from ..common.model_reader import fingerprint
from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama, LlamaState, llama_cpp
from . import cache_settings
from .text import ContextText

if TYPE_CHECKING:
    from ..runtime.engine import Engine


class EagleState(LlamaState):
    """A saved state. eagle_state is what drafts are made from, None if nothing can be drafted.

    eagle_of: the identity() of what saved it; None for a state that a Llama saved.
    """

    eagle_state: bytes | None = None
    eagle_of: dict[str, Any] | None = None

    @property
    def llama_state_size(self) -> int:
        """Bytes of the whole state. llama-cpp-python's caches limit their size by it."""
        arrays = self.input_ids.nbytes + self.scores.nbytes
        return len(self.llama_state) + len(self.eagle_state or b"") + arrays

    @llama_state_size.setter
    def llama_state_size(self, _: int) -> None:
        """Ignored: LlamaState is given the size of the target's state alone."""


def identity(llm: Llama, files: LoadedFiles) -> dict[str, Any]:
    """The identity of this Llama's states: its settings, and the content of its files, which are read.

    llama.cpp checks shapes alone: the keys and values of another model of this size would pass.
    """
    adapter = f"{_content(files.lora)} {llm.lora_scale}"
    return {
        "model": f"{_content(*files.model)} {adapter} {llm.kv_overrides}",
        "head": _content(files.head),
        "settings": cache_settings.settings(llm),
    }


def _content(*files: LoadedFile | None) -> str:
    """The fingerprint of files that were loaded; of one that is gone or another since then, what it was."""
    there = [file for file in files if file is not None]
    try:
        check_same(there)
        return fingerprint(there[0].path) if there else ""
    except (EagleError, OSError):
        return str(tuple(there[0]))


def save(text: ContextText, seed: int, of: dict[str, Any]) -> EagleState:
    """The state of a text with its context. Changes nothing, so a running generation can continue.

    of: identity(). Tokens that were accepted but not yielded yet are saved too.
    """
    engine = text.engine
    if engine.n_past() < text.n_tokens:
        text.hold()
    engine.settle()  # raises during a round
    drafting = engine.state() if engine.has_state else None
    scores = text.kept().copy() if text.logits_all else np.empty((0, text.n_vocab), np.float32)
    target = _target_state(text.ctx.ctx)
    state = EagleState(
        input_ids=text.input_ids.copy(),
        scores=scores,
        n_tokens=text.n_tokens,
        seed=seed,
        llama_state=target,
        llama_state_size=len(target),
    )
    state.eagle_state, state.eagle_of = drafting, of
    return state


def _target_state(ctx: Any) -> bytes:
    size = llama_cpp.llama_state_get_size(ctx)
    buffer = (ctypes.c_uint8 * size)()
    n = llama_cpp.llama_state_get_data(ctx, buffer, size)
    if n == 0 or n > size:
        raise EagleError(ErrorKind.NATIVE, "the target's state cannot be saved")
    return bytes(memoryview(buffer)[:n])


def load(text: ContextText, state: LlamaState, of: dict[str, Any]) -> None:
    """Loads a state into a text with its context. of: identity(). Another head's part is left out.

    Raises EagleError BAD_VALUE if it belongs to another model or context. The context is empty then. A state
    of an earlier version says nothing of settings, and counts as one that was made with the defaults.
    """
    n, room = state.n_tokens, len(text.input_ids)
    text.n_tokens, text.stale, text.rows = 0, True, None
    made = getattr(state, "eagle_of", None) or of
    try:
        if made["model"] != of["model"]:
            raise EagleError(
                ErrorKind.BAD_VALUE, "the state belongs to another model: load the one that saved it"
            )
        if other := cache_settings.difference(made.get("settings", {}), of["settings"]):
            raise EagleError(
                ErrorKind.BAD_VALUE, f"the state is of other settings, {other}: load the model as it was then"
            )
        if n > room:
            raise EagleError(
                ErrorKind.BAD_VALUE, f"the state has {n} tokens, the context has room for {room}"
            )
        _load_target(text.ctx.ctx, state.llama_state)
        drafting = getattr(state, "eagle_state", None) if made["head"] == of["head"] else None
        _load_drafting(text.engine, drafting, n)
        text.input_ids[:n] = state.input_ids[:n]
        text.n_tokens = n
        if text.engine.n_past() >= n and not text.go_back(n):  # target and head may have more than the text
            text.hold()
    except EagleError:
        text.clear()
        raise
    if text.logits_all:  # a state without scores leaves them unknown
        known = text.kept()
        known[:] = state.scores if state.scores.shape == known.shape else np.nan


def _load_target(ctx: Any, data: bytes) -> None:
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if llama_cpp.llama_state_set_data(ctx, buffer, len(data)) != len(data):
        raise EagleError(ErrorKind.BAD_VALUE, "the state does not fit this model and context")


def _load_drafting(engine: Engine, data: bytes | None, n_tokens: int) -> None:
    if data is not None and engine.holds_state(data):
        engine.set_state(data)
    else:
        engine.state_reset(n_tokens)
