"""Limits on what requests may do and hold at once. A request beyond a limit gets 503."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..sandbox.spent import Spent
from ..web.errors import ApiError
from .shares import charge_asker

T = TypeVar("T")


def busy(what: str) -> ApiError:
    message = f"too many requests {what}: try again later"
    return ApiError(503, message, code="busy", headers={"Retry-After": "2"})


class Work:
    """One kind of blocking work, run in threads: `at_once` at a time, with `waiting` more in the queue.

    what: the words that follow "too many requests" in the error.
    """

    def __init__(self, at_once: int, waiting: int, what: str) -> None:
        self.most, self.what = at_once + waiting, what
        self.inside = 0
        self._running = asyncio.Semaphore(at_once)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs function(*args) in a thread. Raises ApiError 503 if the queue is full or no thread starts."""
        if self.inside >= self.most:
            raise busy(self.what)
        self.inside += 1
        spent = Spent()
        try:
            async with self._running:
                try:
                    running = asyncio.get_running_loop().run_in_executor(None, spent.of, function, *args)
                except RuntimeError as e:  # the system has no more threads
                    raise busy(self.what) from e
                return await running
        finally:
            self.inside -= 1
            charge_asker(spent.seconds)


class Room:
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


class Once(Generic[T]):
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
