"""Many requests at once: continuous batching with speculative decoding for every slot.

A thread of its own owns the target's context. In each turn it frees the slots of requests that have ended,
gives free slots to waiting requests, decodes a chunk of one prompt or several short ones, and runs one round:
one pass of the head per level of the drafts, then one batch of the target with the last token and the drafts
of every slot. A slot's text is the same as that of a single request, because its rows do not depend on the
other slots.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any

from ..llama import guards
from ..runtime import at_exit
from ..runtime.memory_use import MemoryUse
from ..runtime.params import NO_HEAD, EagleParams
from . import slot_file
from .inbox import Inbox
from .job import HAS_WORK, Job, RequestCancelled, in_turn
from .memories import Memories
from .model import BatchModel, BatchSettings
from .prefixes import Prefixes
from .request import RequestLlama
from .scheduler import BatchSlot, Scheduler, a_slot_is_free

__all__ = ["BatchSettings", "Batcher", "RequestCancelled", "RequestLlama"]

log = logging.getLogger("eagle3_llama.batching")

DEADLINE_STEP = 0.05  # seconds between looks at the clock while requests wait


class Batcher:
    """Loads a target, optionally with its head, and serves requests over n_parallel slots.

    Raises EagleError or ValueError where EagleLlama would. Close it, or use it as a context manager.
    """

    def __init__(self, settings: BatchSettings) -> None:
        self.base = BatchModel(settings)
        self.settings = self.base.settings
        self.engine = self.base.engine
        self.n_parallel, self.n_ctx = settings.n_parallel, settings.n_ctx
        self.model_name = self.base.metadata.get("general.name") or Path(self.settings.model).stem
        self._identity = slot_file.identity(self.base, self.model_name)  # now: another thread may close it
        self._slots = [BatchSlot(i) for i in range(settings.n_parallel)]
        self.inbox = Inbox()
        self._n_jobs = 0
        self._scheduler = Scheduler(self.base, self.engine, self._free)
        self._memories = Memories(self.engine, int(settings.text_memory), settings.text_memory_prompts)
        self._prefixes = Prefixes(self.base, self.engine, self._scheduler)
        self._thread = self.inbox.thread = at_exit.started(self, self._run, "eagle3-batcher")

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests (any thread) ----------------------------------------------------------------------------

    def request(
        self,
        *,
        params: EagleParams | None = None,
        deadline: float | None = None,
        request_id: str = "",
        client: str = "",
        slot: int | None = None,
    ) -> RequestLlama:
        """A Llama for one request.

        params: drafting parameters; None: the planner chooses, n_max=0: plain decoding. deadline: a value of
        time.monotonic(). client: whose earlier texts it may go on from and be drafted from. slot: the only
        one that it takes. Raises RequestCancelled (shutdown) after close(), EagleError NATIVE if the batcher
        has failed, and as EagleLlama does for params that it cannot use.
        """
        self.inbox.check_open()
        if params is not None and self.settings.eagle is None:
            params.check_no_head(NO_HEAD)
        if params is not None:
            guards.check_trees(self.engine, params)
        return RequestLlama(self.base, self.inbox, params, deadline, request_id, client, slot)

    def close(self, grace: float = 0.0) -> None:
        """Takes no more requests, and frees the model; may be called twice.

        grace: seconds that running and waiting requests have left. Raises EagleError BUSY in a callback.
        """
        self.base.calls.check_outside()
        self.inbox.close(grace)
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._memories.close()
            self._prefixes.cache.clear()
            self.base.close()

    # -- looking inside (any thread) ----------------------------------------------------------------------

    def alive(self) -> bool:
        """True if requests are served."""
        return self.inbox.closing is None and self.inbox.ended is None and self._thread.is_alive()

    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self.inbox.waiting)

    def serves_others(self, client: str) -> bool:
        """True if requests of other clients have slots."""
        return any(job is not None and job.client != client for job in [s.job for s in self._slots])

    def slots(self) -> list[dict[str, Any]]:
        """The state of each slot."""
        return [slot.state() for slot in self._slots]

    def snapshot(self) -> dict[str, Any]:
        """Counters since load.

        tokens: handed to requests, including those that end a text. drafts: rounds of a slot that drafted.
        rows: of the last round. drafted_at: drafts that reached each position (a tree has several tokens
        there). accepted_at: accepted draft tokens by position. drafted_from, accepted_from: by source.
        """
        return {
            **self._scheduler.snapshot(),
            "slots_busy": sum(s.job is not None for s in self._slots),
            "waiting": self.waiting(),
            "kv_used": sum(len(s.tokens) for s in self._slots),
            "kv_size": self.n_ctx * self.n_parallel,
            "prompt_cache_bytes": self._prefixes.cache.n_bytes,
            "prompt_cache_texts": len(self._prefixes.cache),
        }

    def memory(self) -> MemoryUse:
        """The memory of the model, its slots and the prompt cache now."""
        used = self.inbox.run(self.engine.memory)
        return dataclasses.replace(used, prompt_cache=self._prefixes.cache.n_bytes)

    # -- slot files ---------------------------------------------------------------------------------------

    def save_slot(self, slot: int, client: str = "") -> bytes:
        """The text of a free slot with the states of target and head, and the client's text memory.

        Raises EagleError BAD_ARGUMENT if the slot is busy or does not exist.
        """

        def take() -> slot_file.Contents:
            state = self._prefixes.states.take(slot_file.free_slot(self._slots, slot))
            return slot_file.Contents(state.tokens, state.target, state.head, self._memories.tokens(client))

        contents = self.inbox.run(take)
        return slot_file.pack(self._identity, contents)  # meanwhile other requests continue

    def load_slot(self, slot: int, data: bytes, client: str = "") -> int:
        """Restores save_slot() and returns the number of tokens. Texts go into the client's text memory.

        Raises EagleError BAD_VALUE for damaged bytes or those of another model. The slot is empty then.
        """
        contents = slot_file.unpack(self._identity, self.n_ctx, data)

        def put() -> int:
            free = slot_file.free_slot(self._slots, slot)
            self._prefixes.states.put(free, contents)
            free.client, free.n_prompt = client, len(contents.tokens)
            self._memories.restore(client, contents.texts)
            return len(contents.tokens)

        return self.inbox.run(put)

    def erase_slot(self, slot: int) -> int:
        """Empties a free slot, and returns the number of its tokens.

        Raises EagleError BAD_ARGUMENT if the slot is busy or does not exist.
        """

        def clear() -> int:
            free = slot_file.free_slot(self._slots, slot)
            n = len(free.tokens)
            self._prefixes.states.clear(free)
            return n

        return self.inbox.run(clear)

    # -- the batcher's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException as e:
            log.exception("the batcher has ended")
            self._end_all(e)

    def _work(self) -> bool:
        """Waits for work and does some. Returns False when the batcher is closed."""
        with self.inbox.wake:
            while not self._has_work():
                if idle := not self.inbox.waiting and all(s.job is None for s in self._slots):
                    self.engine.release_threads()
                self.inbox.wake.wait(None if idle else DEADLINE_STEP)
        try:
            self._answer_calls()
            if self.inbox.closing is not None and not self._busy():
                return False
            self._step()
        except Exception as e:
            self._fail_all(e)
        return True

    def _answer_calls(self) -> None:
        """Runs the calls from outside, after freeing the slots of requests that have ended."""
        if self.inbox.calls:
            try:
                self._drop()
            except Exception as e:  # a call is answered all the same
                self._fail_all(e)
        self.inbox.answer_calls()

    def _end_all(self, error: BaseException) -> None:
        """Serves no request any more, and tells everybody who waits."""
        self.inbox.end(error)
        self._fail_all(self.inbox.failed())

    def _has_work(self) -> bool:
        now = time.monotonic()
        waiting = self.inbox.waiting
        return bool(
            self.inbox.calls
            or self.inbox.closing is not None
            or any(job.end_reason(now) for job in waiting)
            or a_slot_is_free(self._slots, waiting)
            or any(job.end_reason(now) or job.state in HAS_WORK for s in self._slots if (job := s.job))
        )

    def _busy(self) -> bool:
        if time.monotonic() >= (self.inbox.closing or 0.0):
            self._fail_all(RequestCancelled("shutdown"))
        return bool(self.inbox.waiting or self.inbox.calls) or any(s.job for s in self._slots)

    def _fail_all(self, error: Exception) -> None:
        for job in self.inbox.take_all():
            self._end(job, error)
        for slot in self._slots:
            if slot.job is not None:
                self._free(slot, error)

    def _step(self) -> None:
        self._drop()
        self._admit()
        self._scheduler.turn(self._slots)  # chooses, decodes, delivers

    def _drop(self) -> None:
        """Ends requests that were cancelled or whose time is up."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.job is not None and (reason := slot.job.end_reason(now)):
                self._free(slot, RequestCancelled(reason))
        for job, reason in self.inbox.take_late(now):
            self._end(job, RequestCancelled(reason))

    def _admit(self) -> None:
        """Gives waiting requests free slots, in turn. One that awaits a prefix keeps a slot free."""
        with self.inbox.wake:
            waiting = in_turn(self.inbox.waiting, [s.job for s in self._slots if s.job is not None])
        held_back = 0
        for job in waiting:
            if sum(s.job is None for s in self._slots) == held_back:
                return
            free = a_slot_is_free(self._slots, [job])
            if free and self._prefixes.awaits(job, self._slots):
                held_back += 1
            elif free:
                self.inbox.take(job)
                self._start(job)

    def _start(self, job: Job) -> None:
        try:
            slot = self._prefixes.place(job, self._slots)
            self._memories.use(slot.id, job.client)
        except Exception as e:
            self._end(job, e)
            return
        self._n_jobs += 1
        slot.job, job.slot, slot.used = job, slot.id, self._n_jobs
        job.times.started = time.monotonic()

    def _free(self, slot: BatchSlot, error: BaseException | None) -> None:
        """Ends the slot's request. The text stays, for the next request that shares a prefix with it."""
        job, slot.job = slot.job, None
        tokens: list[int] = []
        try:
            slot.tokens = tokens = slot.tokens[: self.engine.n_past(slot.id)]
            self._prefixes.keep(slot, len(tokens))
        except Exception:
            slot.tokens = []
            log.exception("slot %d could not be cleared", slot.id)
        if job is not None:
            if error is None or isinstance(error, RequestCancelled):  # also what a stop string has ended
                self._memories.add(job, tokens)
            self._end(job, error)

    def _end(self, job: Job, error: BaseException | None) -> None:
        """Ends a job. The reader is told of the end, whatever fails here. Raises nothing: others wait too."""
        if error is not None and not isinstance(error, RequestCancelled):
            self._scheduler.count["failures"] += 1
        job.times.ended = time.monotonic()
        job.free_sampler()
        job.outputs.put(error)
        job.ready.set()
