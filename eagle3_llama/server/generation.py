"""A request's choices, each run by llama-cpp-python in a thread of its own, and the way of what they say to one coroutine."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..runtime.params import EagleParams
from .errors import ApiError, from_exception
from .work import Room

log = logging.getLogger("eagle3_llama.server")

FLUSH = 0.5  # seconds of a grace kept for telling clients that their requests were cut short
MAX_LOGPROBS = 1 << 28  # bytes of logprobs that all answers may have until they are sent
LATE = 2.0  # seconds past its deadline that a generation may take to notice it


class Gate:
    """Counts choices that run or wait, lets in no more than `capacity`, and none once draining."""

    def __init__(self, capacity: int, n_parallel: int) -> None:
        self.capacity, self.n_parallel = capacity, n_parallel
        self.draining = False
        self.logprobs = Room(MAX_LOGPROBS, "ask for logprobs")
        self.jobs: set[Job] = set()
        self._inside, self._seconds = 0, 1.0
        self._lock = threading.Lock()

    @property
    def inside(self) -> int:
        return self._inside

    def enter(self, n: int) -> None:
        """Raises ApiError 503 with Retry-After when there is no room for n more."""
        with self._lock:
            if self.draining:
                raise ApiError(
                    503,
                    "the server is shutting down",
                    code="shutting_down",
                    headers={"Retry-After": "5", "Connection": "close"},
                )
            if self._inside + n > self.capacity:
                wait = self._seconds * (1 + self._inside / self.n_parallel)
                raise ApiError(
                    503,
                    f"{self._inside} requests run or wait, room is for {self.capacity}",
                    code="queue_full",
                    headers={"Retry-After": str(max(1, min(60, round(wait))))},
                )
            self._inside += n

    async def drain(self, grace: float, sending: Callable[[], bool] = lambda: False) -> None:
        """Lets nobody in any more; those inside have `grace` seconds and are told when these are over. sending: whether answers are."""
        self.draining, end = True, time.monotonic() + grace
        while (self.inside or sending()) and time.monotonic() < end - FLUSH:
            await asyncio.sleep(0.02)
        for job in list(self.jobs):
            job.cancel()
        while self.inside and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def leave(self, seconds: float) -> None:
        """One choice is done, after this long."""
        with self._lock:
            self._inside -= 1
            self._seconds += 0.1 * (seconds - self._seconds)


@dataclass(frozen=True)
class Choice:
    """One run of llama-cpp-python. prompt: which of several prompts it answers. size: bytes that its logprobs may have."""

    index: int
    prompt: int
    call: Callable[[Any], Any]  # RequestLlama -> a completion, or an iterator of its chunks
    size: int = 0


@dataclass
class Event:
    """What a choice's thread reports: a chunk (or a whole completion), its end, or its failure."""

    choice: Choice
    chunk: dict[str, Any] | None = None
    sources: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    timings: dict[str, float] | None = None
    error: ApiError | None = None


class Mailbox:
    """From any thread to one coroutine, which takes all that has gathered at once."""

    def __init__(self) -> None:
        self._loop, self._filled, self._items = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            collections.deque(),
        )
        self._told = False

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.wake()

    def put_quietly(self, item: Any) -> None:
        """To be taken with what follows: somebody will wake() the coroutine."""
        self._items.append(item)

    def wake(self) -> None:
        if self._items and not self._told:  # one wake-up for however many follow before the coroutine runs
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:  # the loop is closed: nobody listens any more
                pass

    async def take(self) -> list[Any]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            self._told = False  # before the items are taken, so that none is left without a wake-up
            items = [self._items.popleft() for _ in range(len(self._items))]
            if items:
                return items


class Job:
    """The choices of one HTTP request. Made in the event loop; ends when all have ended, one failed, or cancel()."""

    def __init__(
        self,
        batcher: Any,
        gate: Gate,
        choices: list[Choice],
        params: EagleParams | None,
        timeout: float,
        request_id: str,
        asked: str,
    ) -> None:
        """asked: the field that holds the prompt. Raises ApiError 503 when there is no room."""
        self._size = sum(c.size for c in choices)
        gate.logprobs.take(self._size)
        try:
            gate.enter(len(choices))
        except ApiError:
            gate.logprobs.give_back(self._size)
            raise
        self.batcher, self.gate, self.choices, self.params, self.request_id, self.asked = (
            batcher,
            gate,
            choices,
            params,
            request_id,
            asked,
        )
        self.deadline = time.monotonic() + timeout
        self.usage: dict[int, dict[str, Any]] = {}
        self.timings: dict[int, dict[str, float]] = {}
        self.reasons: dict[int, str] = {}  # why each choice ended
        self.gone = False  # the client left
        self.failed: ApiError | None = None  # after its answer had begun
        self._mail, self._llms, self._lock, self._cancelled = Mailbox(), {}, threading.Lock(), False
        self._left = len(choices)
        late = Event(
            choices[0], error=ApiError(504, "the request took longer than the server allows", code="deadline")
        )
        self._timer = asyncio.get_running_loop().call_later(timeout + LATE, self._mail.put, late)
        gate.jobs.add(self)
        for choice in choices:
            self._start(choice)

    def _start(self, choice: Choice) -> None:
        try:
            threading.Thread(
                target=self._run, args=(choice,), name=f"{self.request_id}-{choice.index}", daemon=True
            ).start()
        except RuntimeError:  # the system has no more threads
            self._mail.put(
                Event(
                    choice,
                    error=ApiError(
                        503, "the server has no thread left", code="busy", headers={"Retry-After": "2"}
                    ),
                )
            )
            self._ended(0.0)

    # -- in the event loop --------------------------------------------------------------------------------

    async def events(self) -> Any:
        """Lists of events as they come, until the last choice has ended. Raises ApiError for the first that failed."""
        left = len(self.choices)
        while left:
            events = await self._mail.take()
            failed = next((i for i, e in enumerate(events) if e.error is not None), len(events))
            for e in events[:failed]:
                if e.chunk is not None and (reason := e.chunk["choices"][0]["finish_reason"]) is not None:
                    self.reasons[e.choice.index] = reason
                if e.usage is not None:
                    left -= 1
                    self.usage[e.choice.index], self.timings[e.choice.index] = e.usage, e.timings
            if failed > 0:
                yield events[:failed]
            if failed < len(events):
                raise events[failed].error
        self._timer.cancel()

    async def watch(self, receive: Callable[[], Any]) -> None:
        """Cancels when the client leaves; runs beside events() once the body is read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.cancel()

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def release(self) -> None:
        """Its answer has been sent, or never will be; harmless once more."""
        size, self._size = self._size, 0
        self.gate.logprobs.give_back(size)

    def waits(self) -> list[dict[str, float]]:
        """RequestLlama.waits() of the choices so far, of those cut short too."""
        with self._lock:
            return [waits for llm in self._llms.values() if (waits := llm.waits()) is not None]

    def spent(self) -> list[dict[str, Any]]:
        """Usage of the choices so far, of those cut short too."""
        with self._lock:
            return [llm.usage() for llm in self._llms.values()]

    def cancel(self) -> None:
        """Ends all choices within a round; harmless once they have ended."""
        self._timer.cancel()
        with self._lock:
            self._cancelled = True
            llms = list(self._llms.values())
        for llm in llms:
            llm.cancel()

    # -- in the choices' threads --------------------------------------------------------------------------

    def _run(self, choice: Choice) -> None:
        started, llm = time.monotonic(), None
        try:
            with self.batcher.request(
                params=self.params, deadline=self.deadline, request_id=self.request_id
            ) as llm:
                self._enlist(choice, llm)
                llm.on_wait = self._mail.wake  # what has gathered goes out together
                for event in self._events(choice, llm):
                    self._mail.put_quietly(event)
                self._mail.wake()
        except BaseException as e:
            self._mail.put(Event(choice, error=self._explain(e, llm)))
        finally:
            self._ended(time.monotonic() - started)

    def _ended(self, seconds: float) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.gate.jobs.discard(self)
        self.gate.leave(seconds)

    def _enlist(self, choice: Choice, llm: Any) -> None:
        with self._lock:
            self._llms[choice.index] = llm
            cancelled = self._cancelled
        if cancelled:
            llm.cancel()

    def _events(self, choice: Choice, llm: Any) -> Iterator[Event]:
        result = choice.call(llm)
        for chunk in [result] if isinstance(result, dict) else result:
            said = chunk["choices"][0]
            opening = "role" in said.get("delta", ()) and not said["delta"].get(
                "content"
            )  # a chat's first chunk holds no token
            yield Event(choice, chunk, [] if opening else llm.take_sources())
        yield Event(choice, usage=llm.usage(), timings=llm.timings())

    def _explain(self, e: BaseException, llm: Any) -> ApiError:
        begun = llm is not None and llm.usage().get("completion_tokens", 0) > 0
        error = from_exception(e, self.batcher.n_ctx, begun, self.asked)
        if self.gate.draining and error.code == "cancelled":
            return ApiError(
                503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
            )
        if error.status == 500:
            log.error("request %s failed", self.request_id, exc_info=e)
        return error


def total_usage(job: Job) -> dict[str, Any]:
    """Usage of all choices; a prompt that several choices answer counts once."""
    prompts = {c.prompt: job.usage[c.index] for c in reversed(job.choices)}
    total = lambda us, *path: sum(_dig(u, path) for u in us)
    prompt, completion = (
        total(prompts.values(), "prompt_tokens"),
        total(job.usage.values(), "completion_tokens"),
    )
    details = {
        f"{name}_prediction_tokens": total(
            job.usage.values(), "completion_tokens_details", f"{name}_prediction_tokens"
        )
        for name in ("accepted", "rejected")
    }
    cached = total(prompts.values(), "prompt_tokens_details", "cached_tokens")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": details,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _dig(usage: dict[str, Any], path: tuple[str, ...]) -> int:
    for name in path:
        usage = usage.get(name) or {}
    return usage or 0


def total_timings(job: Job) -> Any:
    """The timings of a single choice, or a list by choice."""
    out = [job.timings[i] for i in itertools.takewhile(job.timings.__contains__, itertools.count())]
    return out[0] if len(out) == 1 else out
