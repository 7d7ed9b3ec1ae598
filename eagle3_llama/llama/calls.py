"""Calls into a model that many threads may make at once. They keep its close() waiting."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from ..errors import EagleError, ErrorKind


class Calls:
    """`with calls:` around what uses the model. closed: makes the error of a call after close()."""

    def __init__(self, closed: Callable[[], EagleError]) -> None:
        self._closed_error = closed
        self._closed = False
        self._changed = threading.Condition()
        self._inside: collections.Counter[int] = collections.Counter()  # calls by thread

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._closed and me not in self._inside:
                raise self._closed_error()
            self._inside[me] += 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self._changed:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._changed.notify_all()

    def check_outside(self) -> None:
        """Raises EagleError BUSY in a thread that is inside a call: it would wait for itself."""
        if threading.get_ident() in self._inside:
            raise EagleError(
                ErrorKind.BUSY,
                "close() is not possible in a callback, which a generation waits for: call it afterwards",
            )

    def close(self) -> None:
        """Waits for the calls under way, and refuses further ones. May be called twice."""
        self.check_outside()
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
