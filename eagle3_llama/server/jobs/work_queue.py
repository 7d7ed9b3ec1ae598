"""Limits on what requests may do and hold at once. A request beyond a limit gets 503."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from ..errors import ApiError
from ..sandbox.cpu_time import Asker, current, settle, working_for
from ..sandbox.turns import Turns, Waiter
from .client_quota import asker

T = TypeVar("T")


def busy(what: str) -> ApiError:
    message = f"too many requests {what}: try again later"
    return ApiError(503, message, code="busy", headers={"Retry-After": "2"})


class Places:
    """Who is inside: `most` together, and each client in any case its equal part of that."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: collections.Counter[str] = collections.Counter()

    @property
    def inside(self) -> int:
        return self._of.total()

    def has_room(self, client: str, n: int = 1) -> bool:
        part = self.most // len({*self._of, client})
        return self.inside + n <= self.most or self._of[client] + n <= part

    def enter(self, client: str, n: int = 1) -> None:
        self._of[client] += n

    def leave(self, client: str, n: int = 1) -> None:
        self._of[client] -= n
        if not self._of[client]:
            del self._of[client]


class WorkQueue(Places):
    """One kind of blocking work, run in threads: `at_once` at a time, with `waiting` more in the queue.

    The clients take turns: see Turns. what: the words that follow "too many requests" in the error.
    """

    def __init__(self, at_once: int, waiting: int, what: str) -> None:
        super().__init__(at_once + waiting)
        self.what, self._at_once, self._turns = what, at_once, Turns()
        self._ready: dict[Waiter, asyncio.Future[None]] = {}
        self._later: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs function(*args) in a thread. Raises ApiError 503 if the queue is full or no thread starts."""
        who, loop = asker(), asyncio.get_running_loop()
        if not self.has_room(who.client):
            raise busy(self.what)
        self.enter(who.client)
        turn = self._turns.wait(who)
        self._ready[turn] = loop.create_future()
        try:
            self._serve()
            await self._ready[turn]
            try:
                running = loop.run_in_executor(None, _charged, who, function, *args)
            except RuntimeError as e:  # the system has no more threads
                raise busy(self.what) from e
            return await running
        finally:
            self._turns.end(turn)
            del self._ready[turn]
            self.leave(who.client)
            self._serve()

    def _serve(self) -> None:
        """Gives free places to those whose turn it is. For those who have to pause it is called again."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        while (turn := self._turns.next(self._at_once - self._turns.running)) is not None:
            self._turns.begin(turn)
            if not self._ready[turn].done():  # its request may have been given up
                self._ready[turn].set_result(None)
        if self._turns.running < self._at_once and (pause := self._turns.pause()) is not None:
            self._later = asyncio.get_running_loop().call_later(pause, self._serve)


def _charged(who: Asker, function: Callable[..., T], *args: Any) -> T:
    with working_for(who):
        return function(*args)


class ThreadTurns:
    """Places for threads that work for requests by themselves, `at_once` at a time. The clients take turns.

    Each thread computes for itself, and holds up all others meanwhile: Python runs one at a time.
    """

    def __init__(self, at_once: int, what: str) -> None:
        self._at_once, self.what = at_once, what
        self._changed, self._turns = threading.Condition(), Turns()

    @contextlib.contextmanager
    def place(self, seconds: float) -> Iterator[None]:
        """Waits for a place, for at most so long. Raises ApiError 503 if there is none."""
        end = time.monotonic() + seconds
        with self._changed:
            turn = self._turns.wait(current())
        try:
            with self._changed:
                while self._turns.next(self._at_once - self._turns.running) is not turn:
                    if (left := end - time.monotonic()) <= 0:
                        raise busy(self.what)
                    self._changed.wait(min(left, turn.asker.pause() or left))
                self._turns.begin(turn)
                self._changed.notify_all()  # there may be another place
            yield
        finally:
            settle()
            with self._changed:
                self._turns.end(turn)
                self._changed.notify_all()


class ByteBudget:
    """A limit on the bytes that all requests hold together."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what = most, what
        self.held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Takes `size` bytes. Raises ApiError 503 if they would exceed the limit."""
        with self._lock:
            if self.held + size > self.most:
                raise busy(self.what)
            self.held += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self.held -= size


class Lazy(Generic[T]):
    """A value that several threads need. The first one makes it. If that fails, all get its exception."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: list[T] = []  # the value, once it is made
        self._failed: Exception | None = None

    def __call__(self) -> T:
        with self._lock:
            if not self._made and self._failed is None:
                try:
                    self._made.append(self._make())
                except Exception as e:
                    self._failed = e
        if self._failed is not None:
            raise self._failed
        return self._made[0]
