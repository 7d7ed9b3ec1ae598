"""Runs the choices of a request in threads and passes their events to the request's coroutine."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ...llama.usage import TokenUsage
from ...runtime.params import EagleParams
from ..errors import ApiError, deadline_passed, from_exception, shutting_down
from ..sandbox.cpu_time import working_for
from .gate import Gate
from .timings import timings_of

log = logging.getLogger("eagle3_llama.server")

LATE = 2.0  # seconds past its deadline after which a generation that has not ended is reported as failed


@dataclass(frozen=True)
class Choice:
    """One answer to a request. prompt: the index of the prompt. size: most bytes of its logprobs.

    timed: each chunk has its `timings`; the last one always has. slot: that it asks for, None: any.
    """

    index: int
    prompt: int
    call: Callable[[Any], Any]  # RequestLlama -> a completion, or an iterator of its chunks
    size: int = 0
    timed: bool = False
    slot: int | None = None


@dataclass
class Event:
    """The report of a choice's thread: a chunk (or a whole completion), its end, or its failure."""

    choice: Choice
    chunk: dict[str, Any] = field(default_factory=dict)  # empty at the end and for a failure
    positions: list[int] = field(default_factory=list)  # draft_position of each token
    sources: list[str] = field(default_factory=list)  # draft_source of each token
    used: TokenUsage | None = None
    timings: dict[str, float] | None = None
    error: ApiError | None = None


class Mailbox:
    """A queue from any thread to one coroutine, which takes all waiting items at once."""

    def __init__(self) -> None:
        self._loop, self._filled, self._told = asyncio.get_running_loop(), asyncio.Event(), False
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.wake()

    def put_quietly(self, item: Any) -> None:
        """Adds an item without waking the coroutine. A later wake() is needed."""
        self._items.append(item)

    def wake(self) -> None:
        if self._items and not self._told:  # one wake-up for all items that arrive before the coroutine runs
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:  # the event loop is closed: nobody waits for items
                pass

    async def take(self) -> list[Any]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            self._told = False  # before the items are taken, so that none is left without a wake-up
            items = [self._items.popleft() for _ in range(len(self._items))]
            if items:
                return items


class RequestJob:
    """The choices of one HTTP request. Ends when all have ended, when one has failed, or by cancel().

    The choices of one prompt run at once. Of a list of prompts as many do as there are slots, so that the
    requests of other clients come between them. Create it in the event loop.
    """

    def __init__(
        self,
        *,
        batcher: Any,
        gate: Gate,
        choices: list[Choice],
        params: EagleParams | None,
        timeout: float,
        request_id: str,
        client: str,
        prompt_field: str,
    ) -> None:
        """client: whose text memory it uses. prompt_field: its name in the body.

        Raises ApiError 503 if there is no room.
        """
        self.batcher = batcher
        self.gate = gate
        self.choices = choices
        self.params = params
        self.request_id = request_id
        self.client = client
        self.prompt_field = prompt_field
        self.deadline = time.monotonic() + timeout
        self.used: dict[int, TokenUsage] = {}
        self.timings: dict[int, dict[str, float]] = {}
        self.reasons: dict[int, str] = {}  # finish_reason of each choice
        self.gone = False  # whether the client has disconnected
        self.failed: ApiError | None = None  # an error after the answer had begun
        self._mail, self._lock, self._cancelled = Mailbox(), threading.Lock(), False
        self._llms: dict[int, Any] = {}
        many = len({choice.prompt for choice in choices}) > 1
        self._n_workers = min(len(choices), gate.n_parallel) if many else len(choices)
        first = choices[: self._n_workers]
        self._waiting = collections.deque(choices[self._n_workers :])
        self._enter()  # after all that may fail, because only the choices' threads leave
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout + LATE, self.fail, deadline_passed())
        gate.jobs.add(self)
        for choice in first:
            self._start(choice)

    def _enter(self) -> None:
        self._size = sum(c.size for c in self.choices)
        self.gate.logprobs.take(self._size)
        try:
            self.gate.enter(self._n_workers, self.client)
        except BaseException:
            self.release()
            raise

    def _start(self, choice: Choice) -> None:
        name = f"{self.request_id}-{choice.index}"
        try:
            threading.Thread(target=self._work, args=(choice,), name=name, daemon=True).start()
        except RuntimeError:  # the system has no more threads
            headers = {"Retry-After": "2"}
            error = ApiError(503, "the server cannot start another thread", code="busy", headers=headers)
            self._mail.put(Event(choice, error=error))
            self._ended()

    # -- in the event loop --------------------------------------------------------------------------------

    async def events(self) -> Any:
        """Yields lists of events until all choices have ended. Raises the ApiError of the first failure."""
        left = len(self.choices)
        while left:
            events = await self._mail.take()
            failed = next((i for i, e in enumerate(events) if e.error is not None), len(events))
            for e in events[:failed]:
                if e.chunk and (reason := e.chunk["choices"][0]["finish_reason"]) is not None:
                    self.reasons[e.choice.index] = reason
                if e.used is not None and e.timings is not None:
                    left -= 1
                    self.used[e.choice.index], self.timings[e.choice.index] = e.used, e.timings
            if failed > 0:
                yield events[:failed]
            for error in (e.error for e in events[failed:] if e.error is not None):
                raise error
        self._timer.cancel()

    async def watch(self, receive: Callable[[], Any]) -> None:
        """Cancels the job when the client disconnects. Runs beside events() after the body has been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.cancel()

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def release(self) -> None:
        """Gives back the room for logprobs when the answer has been sent or given up. May be called again."""
        size, self._size = self._size, 0
        self.gate.logprobs.give_back(size)

    def waits(self) -> list[dict[str, float]]:
        """RequestLlama.waits() of all choices that have started, including cancelled ones."""
        with self._lock:
            return [waits for llm in self._llms.values() if (waits := llm.waits()) is not None]

    def spent(self) -> list[TokenUsage]:
        """Tokens of all choices that have started, including cancelled ones."""
        with self._lock:
            return [llm.used() for llm in self._llms.values()]

    def prompt_tokens(self) -> int:
        """Tokens of the prompts whose choices have started. A prompt that several answer counts once."""
        of: dict[int, int] = {}
        with self._lock:
            for choice in (c for c in self.choices if c.index in self._llms):
                of[choice.prompt] = max(of.get(choice.prompt, 0), self._llms[choice.index].used().prompt)
        return sum(of.values())

    def fail(self, error: ApiError) -> None:
        """Ends the answer with this error, whatever the choices' threads are at."""
        self._mail.put(Event(self.choices[0], error=error))

    def cancel(self) -> None:
        """Ends all choices after the current round. Does nothing for choices that have ended."""
        self._timer.cancel()
        with self._lock:
            self._cancelled = True
            llms = list(self._llms.values())
        for llm in llms:
            llm.cancel()

    # -- in the choices' threads --------------------------------------------------------------------------

    def _work(self, choice: Choice | None) -> None:
        while choice is not None:
            started = time.monotonic()
            with working_for(self.gate.quota.asker(self.client)):
                good = self._run(choice)
            self.gate.took(time.monotonic() - started)
            choice = self._next() if good else None
        self._ended()

    def _next(self) -> Choice | None:
        with self._lock:  # behind cancel(), too: then it fails, and says why
            return self._waiting.popleft() if self._waiting else None

    def _run(self, choice: Choice) -> bool:
        """Returns whether it ended well."""
        llm = None
        try:
            who: dict[str, Any] = {"request_id": self.request_id, "client": self.client}
            who |= {"params": self.params, "deadline": self.deadline, "slot": choice.slot}
            with self.batcher.request(**who) as llm:
                self._enlist(choice, llm)
                llm.on_wait = self._mail.wake  # sends all collected tokens together
                for event in self._events(choice, llm):
                    self._mail.put_quietly(event)
                self._mail.wake()
            return True
        except BaseException as e:
            self._mail.put(Event(choice, error=self._explain(e, llm)))
            return False
        finally:
            if llm is not None and (waits := llm.waits()) is not None:
                self.gate.quota.charge(self.client, waits["alone"])

    def _ended(self) -> None:
        with self._lock:
            self._n_workers -= 1
            if self._n_workers == 0:
                self.gate.jobs.discard(self)
        self.gate.leave(self.client)

    def _enlist(self, choice: Choice, llm: Any) -> None:
        with self._lock:
            self._llms[choice.index] = llm
            cancelled = self._cancelled
        if cancelled:
            llm.cancel()

    def _events(self, choice: Choice, llm: Any) -> Iterator[Event]:
        result = choice.call(llm)
        for chunk in [result] if isinstance(result, dict) else result:
            first = chunk["choices"][0]
            delta = first.get("delta", {})
            opening = "role" in delta and not delta.get("content")  # a chat's first chunk holds no token
            positions, sources = ([], []) if opening else llm.take_report()
            if (choice.timed and not opening) or first["finish_reason"] is not None:
                chunk = {**chunk, "timings": timings_of(llm)}
            yield Event(choice, chunk, positions, sources)
        yield Event(choice, used=llm.used(), timings=timings_of(llm))

    def _explain(self, e: BaseException, llm: Any) -> ApiError:
        begun = llm is not None and llm.used().completion > 0
        error = from_exception(e, self.batcher.n_ctx, begun, self.prompt_field)
        if self.gate.draining and error.code == "cancelled":
            return shutting_down()
        if error.status == 500:
            log.error("request %s failed", self.request_id, exc_info=e)
        return error


def total_usage(job: RequestJob) -> TokenUsage:
    """The tokens of all choices together. A prompt that several choices answer counts once."""
    total, counted = TokenUsage(), set[int]()
    for choice in job.choices:
        used = job.used[choice.index]
        again = choice.prompt in counted
        counted.add(choice.prompt)
        total += replace(used, prompt=0, reused=0) if again else used
    return total


def total_timings(job: RequestJob) -> Any:
    """The timings of a single choice, or a list with those of each choice."""
    out = [job.timings[i] for i in itertools.takewhile(job.timings.__contains__, itertools.count())]
    return out[0] if len(out) == 1 else out
