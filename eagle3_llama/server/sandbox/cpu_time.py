"""For which client a thread works, and the processor time that child processes have taken for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_thread = threading.local()


@dataclass(frozen=True)
class Asker:
    """A client. charge: it has taken so many seconds. pause: those for which its next work has to wait."""

    client: str = ""
    charge: Callable[[float], None] = lambda _: None
    pause: Callable[[], float] = lambda: 0.0


NOBODY = Asker()


@contextlib.contextmanager
def working_for(asker: Asker) -> Iterator[None]:
    """Charges this client for what this thread and the children do meanwhile."""
    before, _thread.asker = current(), asker
    _thread.settled = time.thread_time()
    try:
        yield
    finally:
        settle()
        _thread.asker = before


def settle() -> None:
    """Charges the client for the processor time of this thread so far: its other requests wait for that."""
    now = time.thread_time()
    current().charge(now - getattr(_thread, "settled", now))
    _thread.settled = now


def current() -> Asker:
    """For whom this thread works."""
    return getattr(_thread, "asker", NOBODY)


class CpuTime:
    """Seconds of children's processor time. They are counted while a thread is within `of`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., T], *args: object) -> T:
        """function(*args), whose children are counted, also if it raises; and by who counts around it."""
        outer, before = getattr(_thread, "spent", None), self.seconds
        _thread.spent = self
        try:
            return function(*args)
        finally:
            _thread.spent = outer
            if outer is not None:
                outer.seconds += self.seconds - before


def spend(seconds: float) -> None:
    """A child has worked so long for this thread. The client is charged at once: its other requests wait."""
    current().charge(seconds)
    spent: CpuTime | None = getattr(_thread, "spent", None)
    if spent is not None:
        spent.seconds += seconds
