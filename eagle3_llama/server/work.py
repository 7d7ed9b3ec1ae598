"""Blocking work of requests, outside the event loop and in bounds: so much at once, so much waiting, the next is told 503."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .errors import ApiError

T = TypeVar("T")


def busy(what: str) -> ApiError:
    return ApiError(503, f"too many requests {what}", code="busy", headers={"Retry-After": "2"})


class Work:
    """A kind of work. what: as it is called in the answer to those who are too many."""

    def __init__(self, at_once: int, waiting: int, what: str) -> None:
        self.most, self.what = at_once + waiting, what
        self.inside = 0
        self._running = asyncio.Semaphore(at_once)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """function(*args) in a thread. Raises what it raises, and ApiError 503."""
        if self.inside >= self.most:
            raise busy(self.what)
        self.inside += 1
        try:
            async with self._running:
                return await asyncio.to_thread(function, *args)
        finally:
            self.inside -= 1


class Room:
    """Bytes that requests hold together."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what = most, what
        self.held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Raises ApiError 503 where there is no room for `size` more."""
        with self._lock:
            if self.held + size > self.most:
                raise busy(self.what)
            self.held += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self.held -= size


class Once(Generic[T]):
    """What several threads need is made by the first of them; its failure is theirs, too."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: T | None = None
        self._failed: Exception | None = None
        self._done = False

    def __call__(self) -> T:
        with self._lock:
            if not self._done:
                try:
                    self._made = self._make()
                except Exception as e:
                    self._failed = e
                self._done = True
        if self._failed is not None:
            raise self._failed
        return self._made  # type: ignore[return-value]
