"""Admits choices up to a limit, and lets the running ones end when the server shuts down."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..errors import ApiError, shutting_down
from .client_quota import ClientQuota
from .work_queue import ByteBudget, Places

FLUSH = 0.5  # the last seconds of --grace, in which clients are told that their requests were cancelled
MAX_LOGPROBS = 1 << 28  # bytes of logprobs in all answers that have not been sent yet


class Running(Protocol):
    """A request's job, as the gate sees it."""

    def cancel(self) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class Gate:
    """Admits choices: at most `capacity` may run or wait at once, and none is admitted while draining.

    When one client has taken all of that, another one may still have its equal part.
    """

    def __init__(self, capacity: int, n_parallel: int, quota: ClientQuota) -> None:
        self.capacity, self.n_parallel, self.quota = capacity, n_parallel, quota
        self.draining = False
        self.logprobs = ByteBudget(MAX_LOGPROBS, "ask for logprobs")
        self.jobs: set[Running] = set()
        self._places, self._seconds = Places(capacity), 1.0
        self._lock = threading.Condition()

    @property
    def inside(self) -> int:
        return self._places.inside

    def enter(self, n: int, client: str = "") -> None:
        """Admits n choices of a client. Raises ApiError 503 with Retry-After if it has no room for them."""
        with self._lock:
            if self.draining:
                raise shutting_down(Connection="close")
            self.check_room(n, client)
            self._places.enter(client, n)

    def check_room(self, n: int, client: str = "") -> None:
        """Raises ApiError 503 with Retry-After if there is no room for n choices of a client."""
        if not self._places.has_room(client, n):
            inside = self.inside
            wait = self._seconds * (1 + inside / self.n_parallel)
            message = f"the queue is full: {inside} requests run or wait, the limit is {self.capacity}"
            headers = {"Retry-After": str(max(1, min(60, round(wait))))}
            raise ApiError(503, message, code="queue_full", headers=headers)

    async def drain(self, grace: float, sending: Callable[[], bool] = lambda: False) -> None:
        """Refuses new requests, waits `grace` seconds for the running ones, then cancels those that are left.

        sending: says whether answers are still being sent.
        """
        self.draining, end = True, time.monotonic() + grace
        while (self.inside or sending()) and time.monotonic() < end - FLUSH:
            await asyncio.sleep(0.02)
        for job in list(self.jobs):
            job.cancel()
        while self.inside and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for job in list(self.jobs):  # those whose threads wait for a native call that does not return
            job.fail(shutting_down())

    def took(self, seconds: float) -> None:
        """One choice has ended after this many seconds."""
        with self._lock:
            self._seconds += 0.1 * (seconds - self._seconds)

    def leave(self, client: str = "") -> None:
        """One place of the client is free."""
        with self._lock:
            self._places.leave(client)
            self._lock.notify_all()

    def wait(self, seconds: float) -> bool:
        """Waits until all choices have ended, for at most this long. Returns whether they have."""
        with self._lock:
            return self._lock.wait_for(lambda: self.inside == 0, seconds)
