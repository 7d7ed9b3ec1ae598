"""Wishes of other threads for a batcher's thread: requests, more of their tokens, their end, and calls."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import EagleError, ErrorKind
from .job import Job, JobState, RequestCancelled, busy_in_round

T = TypeVar("T")
Call = tuple[Callable[[], Any], concurrent.futures.Future[Any]]


class Inbox:
    """The batcher's thread waits at `wake`, which also guards what is in here.

    waiting: requests without a slot. calls: to be run between two rounds. closing: the time.monotonic() at
    which the last requests end, None while it is open. ended: why requests are no longer served.
    """

    def __init__(self) -> None:
        self.wake = threading.Condition()
        self.waiting: collections.deque[Job] = collections.deque()
        self.calls: collections.deque[Call] = collections.deque()
        self.closing: float | None = None
        self.ended: BaseException | None = None
        self.thread: threading.Thread | None = None

    # -- any thread ---------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises RequestCancelled (shutdown) after close(), EagleError NATIVE if the batcher has failed."""
        if threading.current_thread() is self.thread:  # which would wait for itself
            raise busy_in_round()
        if self.ended is not None:
            raise self.failed()
        if self.closing is not None:
            raise RequestCancelled("shutdown")

    def failed(self) -> EagleError:
        """The error of requests once the batcher has ended."""
        return EagleError(ErrorKind.NATIVE, f"no request can be served any more: {self.ended!r:.200}")

    def submit(self, job: Job) -> None:
        """Lets a request wait for a slot."""
        with self.wake:
            self.check_open()
            self.waiting.append(job)
            self.wake.notify()

    def want(self, job: Job, n: int) -> None:
        """A request's reader wants n tokens in all."""
        with self.wake:
            job.ready.clear()
            job.read_ahead_to = n
            self.wake.notify()

    def cancel(self, job: Job, reason: str) -> None:
        """Ends a request within a round."""
        with self.wake:
            if job.state is not JobState.ENDED:
                job.cancelled = job.cancelled or reason
                self.wake.notify()

    def run(self, call: Callable[[], T]) -> T:
        """Runs call between two rounds, in the batcher's thread."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self.wake:
            self.check_open()
            self.calls.append((call, future))
            self.wake.notify()
        return future.result()

    def close(self, grace: float) -> None:
        """Takes no more requests. grace: seconds that running and waiting requests have left."""
        with self.wake:
            self.closing = min(self.closing or float("inf"), time.monotonic() + grace)
            self.wake.notify()

    # -- the batcher's thread -----------------------------------------------------------------------------

    def take_late(self, now: float) -> list[tuple[Job, str]]:
        """Takes out the requests that were cancelled or whose time is up, with the reason."""
        with self.wake:
            late = [(job, reason) for job in self.waiting if (reason := job.end_reason(now))]
            for job, _ in late:
                self.waiting.remove(job)
        return late

    def take_all(self) -> list[Job]:
        """Takes out all requests that wait."""
        with self.wake:
            waiting, self.waiting = list(self.waiting), collections.deque()
        return waiting

    def take(self, job: Job) -> None:
        """Takes a request out, which gets a slot."""
        with self.wake:
            self.waiting.remove(job)

    def answer_calls(self) -> None:
        """Runs the calls that are there now."""
        for _ in range(len(self.calls)):
            call, future = self.calls.popleft()
            try:
                future.set_result(call())
            except BaseException as e:
                future.set_exception(e)

    def end(self, error: BaseException) -> None:
        """Serves no request any more, and tells the callers."""
        with self.wake:
            self.ended = error
            calls, self.calls = self.calls, collections.deque()
        for _, future in calls:
            future.set_exception(error)
