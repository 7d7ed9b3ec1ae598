"""A native session: what it holds, the positions and states of its slots, and how long its parts take."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..common.model_files import is_head
from .library import checked, load
from .memory_use import MemoryUse
from .params import EagleParams
from .text_memory import TextMemory

TEXT_MAGIC = b"E3TEXT"  # a state of any version that begins so has the text alone (text_source.cpp)
HEAD, MODEL = "head", "model"  # drafters that take passes, by the names of their sources
# in the environment, 1: rounds use the context's numbers of threads, also where fewer would be faster
FIXED_THREADS = "EAGLE3_LLAMA_FIXED_THREADS"


class Session:
    """A target context, optionally with a drafter: a head, or a small model.

    ctx and model are addresses of a llama_context and its llama_model; both must outlive the session, which
    therefore closes first. drafter_path: the drafter's file; without it drafts come from the text alone.
    extract_layers: target layers whose inputs a head reads, if not those that its file names.
    n_gpu_layers: of a small model.
    """

    def __init__(
        self,
        ctx: int,
        model: int,
        drafter_path: str | None = None,
        n_slots: int = 1,
        extract_layers: Sequence[int] | None = None,
        n_gpu_layers: int = -1,
    ) -> None:
        self.ffi, self.lib = load()
        self.head_handle = self.drafter_handle = self.ffi.NULL
        self.handle = self.ffi.NULL
        self.drafter: str | None = None  # what takes passes: HEAD or MODEL
        self.drafter_note = ""  # how a small model's vocabulary differs from the target's
        self.can_tree = False
        self.tree_refusal = ""  # why the target cannot check a tree
        self.has_state = False  # whether state() has something to save: the head's state, or the text
        self.drafts_from_text = False  # may be set to False where the target must not take back rows
        of_head = drafter_path is not None and is_head(drafter_path)
        if of_head:
            out = self.ffi.new("eagle3_head **")
            checked(
                self.lib.eagle3_head_open(str(drafter_path).encode(), self.ffi.cast("void *", model), out)
            )
            self.head_handle = out[0]
            self.drafter = HEAD
        out = self.ffi.new("eagle3_session **")
        try:
            if of_head and extract_layers is not None:
                layers = self.ffi.new("int32_t[]", list(extract_layers))
                checked(self.lib.eagle3_head_set_layers(self.head_handle, layers, len(layers)))
            checked(
                self.lib.eagle3_session_open(self.ffi.cast("void *", ctx), self.head_handle, n_slots, out)
            )
            self.handle = out[0]
            if drafter_path is not None and not of_head:
                self._use_model(drafter_path, ctx, n_slots, n_gpu_layers)
            if os.environ.get(FIXED_THREADS, "0") not in ("", "0"):
                checked(self.lib.eagle3_threads_choose(self.handle, 0))
            self.can_tree = bool(checked(self.lib.eagle3_can_tree(self.handle)))
            if not self.can_tree and (why := self.lib.eagle3_tree_refusal(self.handle)) != self.ffi.NULL:
                self.tree_refusal = self.ffi.string(why).decode()
            self.has_state = self.lib.eagle3_state_size(self.handle, 0) >= 0
            self.drafts_from_text = self.has_state
        except BaseException:
            self.close()
            raise

    def _use_model(self, path: str, ctx: int, n_slots: int, n_gpu_layers: int) -> None:
        out = self.ffi.new("eagle3_drafter **")
        target = self.ffi.cast("void *", ctx)
        checked(self.lib.eagle3_drafter_open(str(path).encode(), target, n_slots, n_gpu_layers, out))
        self.drafter_handle = out[0]
        checked(self.lib.eagle3_session_use(self.handle, self.drafter_handle))
        self.drafter = MODEL
        self.drafter_note = self.ffi.string(self.lib.eagle3_drafter_about(self.drafter_handle)).decode()

    @property
    def has_head(self) -> bool:
        """True if the drafter is a head."""
        return self.drafter == HEAD

    def source_names(self) -> list[str]:
        """The session's names of its sources of drafts; a draft token's bit i is for the i-th of them."""
        names: list[str] = []
        while (name := self.lib.eagle3_source_name(self.handle, len(names))) != self.ffi.NULL:
            names.append(self.ffi.string(name).decode())
        return names

    def close(self) -> None:
        """Frees session and drafter; may be called twice."""
        if self.handle != self.ffi.NULL:
            self.lib.eagle3_session_close(self.handle)
            self.handle = self.ffi.NULL
        if self.head_handle != self.ffi.NULL:
            self.lib.eagle3_head_close(self.head_handle)
            self.head_handle = self.ffi.NULL
        if self.drafter_handle != self.ffi.NULL:
            self.lib.eagle3_drafter_close(self.drafter_handle)
            self.drafter_handle = self.ffi.NULL
        self.drafter = None

    def release_threads(self) -> None:
        """Ends this thread's worker threads: call it if the thread will not compute for a while.

        Otherwise decodes of other threads take several times as long.
        """
        self.lib.eagle3_release_threads()

    def trees(self, params: EagleParams) -> bool:
        """True if drafts made with params are trees."""
        return params.fixed_tree or (params.planned and params.tree is not False and self.can_tree)

    def memory(self) -> MemoryUse:
        """The memory of context and drafter now."""
        out = self.ffi.new("struct eagle3_memory *")
        checked(self.lib.eagle3_memory_get(self.handle, out))
        return MemoryUse(
            **{name: getattr(out, name) for name, _ in self.ffi.typeof("struct eagle3_memory").fields}
        )

    # -- positions and states of a slot -------------------------------------------------------------------

    def n_past(self, slot: int = 0) -> int:
        """Positions decoded and kept."""
        return checked(self.lib.eagle3_n_past(self.handle, slot))

    def prefill(self, tokens: Sequence[int], slot: int = 0, all_logits: bool = False) -> None:
        """Decodes at most n_batch prompt tokens. The context then has the logits of the last one, or all."""
        ids = self.ffi.new("int32_t[]", list(tokens))
        checked(self.lib.eagle3_prefill(self.handle, slot, ids, len(tokens), int(all_logits)))

    def sample(self, sampler: int, row: int = -1) -> int:
        """One token from a row of the last decode; a sampler that fails raises."""
        return checked(self.lib.eagle3_sample(self.handle, self.ffi.cast("void *", sampler), row))

    def row(self, i: int, slot: int = 0) -> int:
        """The target's row that the i-th token of the last round was sampled from."""
        return checked(self.lib.eagle3_verified_row(self.handle, slot, i))

    def sampling_seconds(self, slot: int = 0) -> float:
        """Processor time that the slot's sampler took in the last round."""
        return float(self.lib.eagle3_sampling_seconds(self.handle, slot))

    def rewind(self, n_past: int, slot: int = 0) -> None:
        """Forgets positions from n_past on."""
        checked(self.lib.eagle3_rewind(self.handle, slot, n_past))

    def settle(self, slot: int = 0) -> None:
        """Brings the context's memory up to n_past(): call it before the context itself is read or used."""
        checked(self.lib.eagle3_settle(self.handle, slot))

    def state_reset(self, n_past: int, slot: int = 0) -> None:
        """The sequence now holds n_past tokens that the head never saw."""
        checked(self.lib.eagle3_state_reset(self.handle, slot, n_past))

    def set_capture(self, on: bool) -> None:
        """Off: decoding costs what it costs without a drafter, which then drafts nothing."""
        checked(self.lib.eagle3_session_set_capture(self.handle, int(on)))

    def use_memory(self, memory: TextMemory | None, slot: int = 0) -> None:
        """From the next draft on the slot drafts from these texts, too. None: from its own text alone."""
        handle = memory.handle if memory is not None else self.ffi.NULL
        checked(self.lib.eagle3_text_memory_use(self.handle, slot, handle))

    def text_match(self, token: int, slot: int = 0) -> int:
        """How many of its last tokens, and `token`, stand in a slot's text or its memory, and go on there."""
        return checked(self.lib.eagle3_text_match(self.handle, slot, token))

    def forced(self, sampler: Any) -> int:
        """How many tokens a sampler's grammar, or an end of its thoughts, forces next. sampler: a pointer."""
        return checked(self.lib.eagle3_forced(self.handle, sampler))

    def state_size(self, slot: int = 0) -> int:
        """Bytes of state()."""
        return checked(self.lib.eagle3_state_size(self.handle, slot))

    def state(self, slot: int = 0) -> bytes:
        """The material of a slot's drafts, its text and the head's state, to keep beside the target's."""
        size = self.state_size(slot)
        buf = self.ffi.new("uint8_t[]", size)
        return bytes(self.ffi.buffer(buf, checked(self.lib.eagle3_state_get(self.handle, slot, buf, size))))

    def holds_state(self, data: bytes | None) -> bool:
        """True if these bytes are state() of a session that has a head as this one has, or none as this."""
        return self.has_state and bool(data) and self.has_head != (data or b"").startswith(TEXT_MAGIC)

    def set_state(self, data: bytes, slot: int = 0) -> None:
        """Restores state(); damaged or foreign bytes are refused and change nothing."""
        checked(
            self.lib.eagle3_state_set(self.handle, slot, self.ffi.from_buffer("uint8_t[]", data), len(data))
        )

    # -- times, which leave rows of their own in the context ----------------------------------------------

    def measure_target(self, n: int, slot: int = 0) -> float:
        """Seconds of a decode of n rows behind what the slot holds."""
        return self._seconds(lambda out: self.lib.eagle3_measure_target(self.handle, slot, n, out))

    def measure_output(self, n: int) -> float:
        """Seconds of the output matrix for n rows."""
        return self._seconds(lambda out: self.lib.eagle3_measure_output(self.handle, n, out))

    def measure_head(self, n: int, slot: int = 0) -> float:
        """Seconds of a pass of the drafter for n rows."""
        return self._seconds(lambda out: self.lib.eagle3_measure_head(self.handle, slot, n, out))

    def measure_step(self, n: int, slot: int = 0) -> float:
        """Seconds of a further step of a draft, of n rows: less than a pass where the head looks ahead."""
        return self._seconds(lambda out: self.lib.eagle3_measure_step(self.handle, slot, n, out))

    def measure_back(self, slot: int = 0) -> float:
        """Seconds of a checkpoint of what the slot holds; 0 where the memory drops any rows of a draft."""
        return self._seconds(lambda out: self.lib.eagle3_measure_back(self.handle, slot, out))

    def measure_threads(self, slot: int = 0) -> None:
        """Decodes a row with each number of threads that rounds may use. The next begins with the fastest."""
        checked(self.lib.eagle3_measure_threads(self.handle, slot))

    @property
    def threads(self) -> int:
        """The number of threads that the next round uses: the context's, or fewer beside a busy program."""
        return checked(self.lib.eagle3_threads_now(self.handle))

    def _seconds(self, call: Callable[[Any], int]) -> float:
        out = self.ffi.new("float *")
        checked(call(out))
        return float(out[0])
