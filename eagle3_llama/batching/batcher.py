"""Many requests at once: continuous batching with speculation for every slot.

A thread of its own owns the target's context. Each turn it frees slots whose requests have gone, gives free slots to those that
wait, decodes a piece of one prompt or several short ones, and runs one round: one pass of the head a level, one batch of the
target with every slot's row and drafts. A slot's text is what it would be alone: its rows do not depend on who else is there.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.eagle_llama import EagleLlama
from ..runtime.binding import address
from ..runtime.engine import MAX_DRAFT, Ask, Engine, Round
from ..runtime.params import EagleParams, StaticTree
from . import slot_file
from .job import BatchPiece, Job, RequestCancelled
from .logprobs import TopRow, top_row
from .model import BatchModel, BatchSettings
from .request import RequestLlama

__all__ = ["BatchSettings", "Batcher", "RequestCancelled", "RequestLlama"]

log = logging.getLogger("eagle3_llama.batching")

INVARIANT_ROWS = 64  # native: up to here a row's bits do not depend on the number of rows, above it another order of summation is taken
DEADLINE_STEP = 0.05  # seconds between looks at the clock while requests wait
STALL = 0.25  # seconds that a turn's prompts should take, while others wait for their next token


@dataclasses.dataclass(eq=False)
class Slot:
    """A sequence of the context. tokens: what target and head hold of it."""

    id: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    job: Job | None = None
    used: int = 0  # when it was last taken, in requests


class Batcher:
    """Loads a target, optionally with its head, and serves requests over n_parallel slots.

    Raises EagleError or ValueError where EagleLlama would. Close it when done, or use it as a context manager.
    """

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self.base = BatchModel(settings)
        self._engine: Engine = self.base._engine
        self.n_parallel = settings.n_parallel
        self.n_ctx = settings.n_ctx
        self.model_name = self.base.metadata.get("general.name") or Path(settings.model).stem
        self._slots = [Slot(i) for i in range(settings.n_parallel)]
        self._waiting: collections.deque[Job] = collections.deque()
        self._calls: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = (
            collections.deque()
        )
        self._wake = threading.Condition()
        self._closing: float | None = None  # time.monotonic() at which the last requests end
        self._prompt_rate = 0.0  # tokens a second
        self._n_jobs = self._turn = 0
        self._count = dict.fromkeys(("prompt_tokens", "reused_tokens", "failures", "rows", "drafts"), 0)
        self._drafted_at = [0] * MAX_DRAFT
        self._plan: dict[str, float] = {}  # what the planner said after the last round
        self._told: set[str] = set()  # warnings
        self._ended: BaseException | None = None  # why requests are no longer served
        self._thread = threading.Thread(target=self._run, name="eagle3-batcher", daemon=True)
        self._thread.start()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests (any thread) ----------------------------------------------------------------------------

    def request(
        self, *, params: EagleParams | None = None, deadline: float | None = None, request_id: str = ""
    ) -> RequestLlama:
        """A Llama for one request. params: how it drafts, None leaves it to the planner, n_max=0 decodes plainly; a StaticTree is
        drafted as a chain of its depth, and n_min has no effect, which is said once. deadline: of time.monotonic(). Raises
        RequestCancelled (shutdown) once closing, EagleError NATIVE if no request can be served any more."""
        self._check_open()
        if params is not None and params.fixed_tree and self._engine.has_head and not self._engine.can_tree:
            raise EagleError(
                ErrorKind.UNSUPPORTED, "this context cannot check a tree: serve with flash attention"
            )
        return RequestLlama(self, self._batched(params), deadline, request_id)

    def _batched(self, params: EagleParams | None) -> EagleParams | None:
        """What a batch can do of params."""
        if params is None:
            return None
        if params.n_min > 0:
            self._say_once("n_min has no effect in a batch: drafts shorter than it are verified, too")
        if isinstance(params.tree, StaticTree):
            self._say_once(
                "a batch drafts a tree of fixed choices as a chain of its depth; a Tree, e.g. '60x6x10', stays a tree"
            )
            return params.chain()
        return params

    def _say_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(what, RuntimeWarning, stacklevel=4)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise EagleError(ErrorKind.NATIVE, f"no request can be served any more: {self._ended!r:.200}")
        if self._closing is not None:
            raise RequestCancelled("shutdown")

    def _submit(self, job: Job) -> None:
        with self._wake:
            self._check_open()
            self._waiting.append(job)
            self._wake.notify()

    def _want(self, job: Job, n: int) -> None:
        with self._wake:
            job.due.clear()
            job.wanted = n
            self._wake.notify()

    def _cancel(self, job: Job, reason: str) -> None:
        with self._wake:
            if job.ended_at is None:
                job.cancelled = job.cancelled or reason
                self._wake.notify()

    def _on_thread(self, call: Callable[[], Any]) -> Any:
        """Runs call between rounds, in the batcher's thread."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._wake:
            self._check_open()
            self._calls.append((call, future))
            self._wake.notify()
        return future.result()

    def close(self, grace: float = 0.0) -> None:
        """Takes no more requests; running and waiting ones have `grace` seconds. Frees the model; may be called twice."""
        with self._wake:
            self._closing = min(self._closing or float("inf"), time.monotonic() + grace)
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
            self.base.close()

    # -- looking inside (any thread) ----------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether requests are served."""
        return self._closing is None and self._ended is None and self._thread.is_alive()

    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def slots(self) -> list[dict[str, Any]]:
        """What each slot does."""
        return [
            {
                "id": s.id,
                "busy": s.job is not None,
                "n_past": len(s.tokens),
                "request_id": s.job.request_id if s.job else None,
            }
            for s in self._slots
        ]

    def snapshot(self) -> dict[str, Any]:
        """Counters since load. tokens: handed to requests, those that end a text too; drafts: rounds of a slot that drafted; rows: of
        the last round; accepted_at, drafted_at: by position in the draft."""
        st = self._engine.stats
        return {
            **self._count,
            "rounds": st.rounds,
            "tokens": st.tokens,
            "drafted": st.drafted,
            "accepted": st.accepted,
            "accepted_at": list(st.accepted_at),
            "drafted_at": self._drafted_at[: len(st.accepted_at)],
            "slots_busy": sum(s.job is not None for s in self._slots),
            "waiting": self.waiting(),
            "planner": self._plan,
            "kv_used": sum(len(s.tokens) for s in self._slots),
            "kv_size": self.n_ctx * self.n_parallel,
        }

    # -- slot files ---------------------------------------------------------------------------------------

    def save_slot(self, slot: int) -> bytes:
        """A free slot's text with the states of target and head. Raises EagleError BAD_ARGUMENT if it is busy or there is none such."""
        return slot_file.pack(
            slot_file.identity(self), self._on_thread(lambda: slot_file.take(self, self._free_slot(slot)))
        )  # others go on while it is packed

    def load_slot(self, slot: int, data: bytes) -> int:
        """Restores save_slot() and returns its number of tokens. Bytes that are damaged or another model's: EagleError BAD_VALUE, and
        the slot is empty."""
        contents = slot_file.unpack(self, data)
        return self._on_thread(lambda: slot_file.put(self, self._free_slot(slot), contents))

    def _free_slot(self, i: int) -> Slot:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.n_parallel:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"there is no slot {i}, only 0..{self.n_parallel - 1}")
        if self._slots[i].job is not None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"slot {i} is busy")
        return self._slots[i]

    # -- the batcher's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException as e:
            log.exception("the batcher has ended")
            self._end_all(e)

    def _work(self) -> bool:
        """Waits for work and does some; whether there is more to come."""
        with self._wake:
            while not self._has_work():
                idle = not self._waiting and all(s.job is None for s in self._slots)
                if idle:
                    self._engine.release_threads()
                self._wake.wait(None if idle else DEADLINE_STEP)
            calls = list(self._calls)
            self._calls.clear()
        if calls:
            self._drop()  # a slot whose request has gone is free
        for call, future in calls:
            try:
                future.set_result(call())
            except BaseException as e:
                future.set_exception(e)
        if self._closing is not None and not self._busy():
            return False
        try:
            self._step()
        except Exception as e:
            self._fail_all(e)
        return True

    def _end_all(self, error: BaseException) -> None:
        """No request is served any more, and nobody waits for one."""
        with self._wake:
            self._ended = error
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            future.set_exception(error)
        self._fail_all(EagleError(ErrorKind.NATIVE, f"no request can be served any more: {error!r:.200}"))

    def _has_work(self) -> bool:
        now = time.monotonic()
        return bool(
            self._calls
            or self._closing is not None
            or any(_over(j, now) for j in self._waiting)
            or (self._waiting and any(s.job is None for s in self._slots))
            or any(s.job is not None and (_over(s.job, now) or s.job.wants_more()) for s in self._slots)
        )

    def _busy(self) -> bool:
        if time.monotonic() >= (self._closing or 0.0):
            self._fail_all(RequestCancelled("shutdown"))
        return bool(self._waiting) or any(s.job for s in self._slots)

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            waiting, self._waiting = list(self._waiting), collections.deque()
        for job in waiting:
            self._end(job, error)
        for slot in self._slots:
            if slot.job is not None:
                self._free(slot, error)

    def _step(self) -> None:
        self._drop()
        self._admit()
        slots = [s for s in self._slots if s.job is not None]
        if prompts := [s for s in slots if s.job.prompt_at < len(s.job.prompt)]:
            self._prompt_pieces(prompts)
        if active := [
            s
            for s in slots
            if s.job is not None and s.job.prompt_at == len(s.job.prompt) and s.job.wants_more()
        ]:
            self._round(active)

    def _drop(self) -> None:
        """Requests that were cancelled or whose time is up."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.job is not None and (reason := _over(slot.job, now)):
                self._free(slot, RequestCancelled(reason))
        with self._wake:
            gone = [(job, reason) for job in self._waiting if (reason := _over(job, now))]
            for job, _ in gone:
                self._waiting.remove(job)
        for job, reason in gone:
            self._end(job, RequestCancelled(reason))

    def _admit(self) -> None:
        """Gives each waiting request the free slot that shares most of its text, the one unused longest among equals."""
        while self._waiting and (free := [s for s in self._slots if s.job is None]):
            with self._wake:
                job = self._waiting.popleft()
            shared = {s: EagleLlama.longest_token_prefix(s.tokens, job.prompt) for s in free}
            slot = max(free, key=lambda s: (shared[s], -s.used))
            n = min(shared[slot], len(job.prompt) - 1) if not job.echo else 0  # every row is wanted
            try:
                n = self._keep(slot, n)
            except Exception as e:
                self._end(job, e)
                continue
            self._n_jobs += 1
            slot.job, slot.used = job, self._n_jobs
            job.prompt_at = job.reused = n
            job.started_at = time.monotonic()
            self._count["reused_tokens"] += n

    def _keep(self, slot: Slot, n: int) -> int:
        """Forgets all but n tokens of a slot, or all where its memory cannot drop a part; how many it has then."""
        try:
            self._engine.rewind(n, slot.id)
        except EagleError:
            slot.tokens = []  # whatever it holds, nobody may go on from it
            self._engine.rewind(n := 0, slot.id)
        del slot.tokens[n:]
        return n

    def _prompt_pieces(self, slots: list[Slot]) -> None:
        """A piece of the next slot's prompt, and one of each other's that fits into the time beside it: those that come together start together."""
        self._turn += 1
        first = self._turn % len(slots)
        end, room = time.monotonic() + STALL, self._least_piece()
        for i, slot in enumerate(slots[first:] + slots[:first]):
            n = self._piece_size(slot.job)
            if i == 0 or (n <= room and time.monotonic() < end):
                room -= n
                self._prompt_piece(slot, n)

    def _prompt_piece(self, slot: Slot, n: int) -> None:
        job = slot.job
        piece = job.prompt[job.prompt_at : job.prompt_at + n]
        start = time.perf_counter()
        before: list[TopRow] = []
        try:
            self._capture([job])
            self._engine.prefill(piece, slot.id, all_logits=job.echo)
            slot.tokens += piece
            job.prompt_at += n
            done = job.prompt_at == len(job.prompt)
            if job.echo:
                followed = job.prompt[job.prompt_at - n + 1 : job.prompt_at + 1]
                before = [top_row(self.base._logits(i), token, job.top) for i, token in enumerate(followed)]
            if done:
                job.token = self._engine.sample(address(job.sampler.sampler))
                job.raise_processors()
        except Exception as e:
            self._free(slot, e)
            return
        self._count["prompt_tokens"] += n
        if n > INVARIANT_ROWS:
            self._prompt_rate = n / max(time.perf_counter() - start, 1e-6)
        if done:
            job.first_at = time.monotonic()
            self._deliver(
                slot, BatchPiece([job.token], [0], 0, None, *self._kept(job, [(-1, job.token)]), before)
            )
        elif before:
            job.pieces.put(BatchPiece([], [], before=before))

    def _piece_size(self, job: Job) -> int:
        """Tokens of the next piece. Batches of n_batch, as one request alone decodes them, are cut into equal pieces that stay on
        the same side of INVARIANT_ROWS as the whole: so the prompt's bits are the same."""
        rest = len(job.prompt) - job.prompt_at
        done = (job.prompt_at - job.reused) % self.settings.n_batch
        block = min(self.settings.n_batch - done, rest)
        return block // max(block // self._least_piece(), 1)

    def _least_piece(self) -> int:
        """Tokens of a prompt that take STALL; a piece may have up to twice as many."""
        return min(max(int(self._prompt_rate * STALL), INVARIANT_ROWS + 1), self.settings.n_batch)

    def _capture(self, jobs: list[Job]) -> None:
        """Hidden states are kept while anybody drafts."""
        if self._engine.has_head:
            self._engine.set_capture(any(job.params.n_max != 0 for job in jobs))

    def _kept(self, job: Job, sampled: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[TopRow]]:
        """What a request keeps of rows, each with the token sampled from it; the next decode overwrites them."""
        rows = [self.base._logits(row).copy() for row, _ in sampled] if job.rows else []
        tops = (
            [top_row(self.base._logits(row), token, job.top) for row, token in sampled]
            if job.top is not None
            else []
        )
        return rows, tops

    def _round(self, slots: list[Slot]) -> None:
        jobs = [s.job for s in slots]
        self._capture(jobs)
        asks = [Ask(s.id, j.token, j.params, max(j.wanted - j.n_tokens - 1, 0)) for s, j in zip(slots, jobs)]

        def on_draft() -> None:
            for i, job in enumerate(jobs):
                if job.processors is not None:
                    job.processors.begin([job.token, *self._engine.round_drafts(i)])

        try:
            rounds = self._engine.round(asks, [address(j.sampler.sampler) for j in jobs], on_draft)
        except EagleError as e:
            if len(slots) == 1:
                self._free(slots[0], e)
            else:  # one by one: the slot that it fails of fails alone
                for slot in slots:
                    self._round([slot])
            return
        self._plan = self._engine.plan_info() if self._engine.costs is not None else {}
        self._count["rows"] = sum(1 + getattr(r, "drafted", 0) for r in rounds)
        for slot, job, out in zip(slots, jobs, rounds):
            try:
                if isinstance(out, EagleError):
                    raise out
                job.raise_processors()
                self._take_round(slot, job, out)
            except Exception as e:
                self._free(slot, e)

    def _take_round(self, slot: Slot, job: Job, out: Round) -> None:
        self._count["drafts"] += out.drafted > 0
        for k in range(out.drafted):
            self._drafted_at[k] += 1
        slot.tokens += [job.token, *out[:-1]]
        if job.processors is not None:
            job.processors.ids += [job.token, *out[:-1]]
        sampled = (
            [(self._engine.row(i, slot.id), token) for i, token in enumerate(out)]
            if job.rows or job.top is not None
            else []
        )
        job.token = out[-1]
        self._deliver(
            slot,
            BatchPiece(list(out), [*range(1, len(out)), 0], out.drafted, None, *self._kept(job, sampled)),
        )

    def _deliver(self, slot: Slot, piece: BatchPiece) -> None:
        """Hands over what a round brought, as far as the request wants it, and ends it there."""
        job = slot.job
        end = next((i + 1 for i, t in enumerate(piece.tokens) if self.base.is_end(t)), len(piece.tokens))
        n = min(end, job.limit - job.n_tokens)
        over = (
            n < len(piece.tokens)
            or job.n_tokens + n >= job.limit
            or (n == end and self.base.is_end(piece.tokens[end - 1]))
        )
        job.n_tokens += n
        self._engine.stats.tokens += n
        job.pieces.put(dataclasses.replace(piece, tokens=piece.tokens[:n], sources=piece.sources[:n]))
        if not job.wants_more():
            job.due.set()
        if over:
            self._free(slot, None)

    def _free(self, slot: Slot, error: Exception | None) -> None:
        """The slot is free; its text stays for the next request that shares it."""
        job, slot.job = slot.job, None
        try:
            slot.tokens = slot.tokens[: self._engine.n_past(slot.id)]
            self._keep(slot, len(slot.tokens))
        except Exception:
            slot.tokens = []
            log.exception("slot %d could not be cleared", slot.id)
        self._end(job, error)

    def _end(self, job: Job, error: Exception | None) -> None:
        """Tells the reader; whatever fails here, it hears of the end."""
        if error is not None and not isinstance(error, RequestCancelled):
            self._count["failures"] += 1
        job.ended_at = time.monotonic()
        try:
            if job.sampler is not None:
                job.sampler.close()  # here, where no round uses it; it holds itself, and would wait with its 600 KB for the collector of cycles
            job.sampler = job.processors = None
        finally:
            job.pieces.put(error)
            job.due.set()


def _over(job: Job, now: float) -> str | None:
    return job.cancelled or ("deadline" if job.deadline is not None and now >= job.deadline else None)
