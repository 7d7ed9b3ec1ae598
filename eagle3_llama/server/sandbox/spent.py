"""The processor time that child processes have taken for what a thread is at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_thread = threading.local()


class Spent:
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
            spend(self.seconds - before)


def spend(seconds: float) -> None:
    """A child has worked so long for this thread."""
    spent: Spent | None = getattr(_thread, "spent", None)
    if spent is not None:
        spent.seconds += seconds
