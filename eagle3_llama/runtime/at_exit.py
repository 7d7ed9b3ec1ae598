"""Closes what is still open when the interpreter ends.

It would free models one by one, while threads that it does not wait for are inside llama.cpp with them.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ..errors import EagleError, ErrorKind

PATIENCE = 60.0  # seconds for the step of another thread, which then gets the error of a closed model


class Closable(Protocol):
    """Its close() may be called twice, and raises EagleError BUSY during another thread's step."""

    def close(self) -> None: ...


_open: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def close_at_exit(owner: Closable) -> None:
    """Closes it when the interpreter ends, unless it is gone by then: those first that came last."""
    _open[next(_numbers)] = owner


def started(owner: Closable, run: Callable[[], None], name: str) -> threading.Thread:
    """A thread of owner's, which its close() ends. No program has to wait for it, or to close it."""
    close_at_exit(owner)
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _close_all() -> None:
    for _, owner in sorted(_open.items(), key=lambda pair: -pair[0]):
        with contextlib.suppress(Exception):  # the others are closed too
            _close(owner)


def _close(owner: Closable) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return owner.close()
        except EagleError as e:
            if e.kind is not ErrorKind.BUSY or time.monotonic() > end:
                raise
        time.sleep(0.01)


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):  # a child has none of these threads, and their locks may be taken
    os.register_at_fork(after_in_child=_open.clear)
