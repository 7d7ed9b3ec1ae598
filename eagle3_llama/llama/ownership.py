"""Who holds a model's context: one generation, or one call such as eval(), at a time.

A generator may be left half way, go on after another one has used the context, or be finalised by the
collector in the middle of another's step, even on another thread. So each has a claim: a step asks whether
the context is still its own, and so does whatever a `finally` puts in order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ..errors import EagleError, ErrorKind


class Claim:
    """A generation's right to the context, or a call's. Made by Ownership.claim().

    adopts: calls of the same thread, in the middle of its step, are part of it. record: logits that a
    completion asks its generation to keep: none, all (of generated tokens), prompt (and of the prompt).
    """

    def __init__(self, who: str, adopts: bool) -> None:
        self.who, self.adopts, self.record = who, adopts, "none"
        self.taken = False  # it has held the context
        self.thread = 0  # of its step


class Ownership:
    """The context of one model. Nobody waits for a step: who comes in the middle of one is refused."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may finalise a generator while its thread holds it
        self._holder: Claim | None = None  # whose text the context holds
        self._running: Claim | None = None  # who is in the middle of a step

    def claim(self, who: str, adopts: bool = False) -> Claim:
        """A new claim; in the middle of a step that adopts, that step's."""
        running = self._running
        if running is not None and running.adopts and running.thread == threading.get_ident():
            return running
        return Claim(who, adopts)

    @contextlib.contextmanager
    def step(self, claim: Claim, take: bool = False) -> Iterator[None]:
        """Inside, nobody else gets the context. take: from whoever holds it.

        Raises EagleError: CONTEXT_TAKEN if another claim has taken it since, BUSY in the middle of another's
        step.
        """
        with self._lock:
            before = self._running
            if before is not None and before is not claim:
                raise _busy(before)
            if take:
                self._holder, claim.taken = claim, True
            elif claim.taken and self._holder is not claim:
                raise EagleError(
                    ErrorKind.CONTEXT_TAKEN,
                    f"this generation cannot go on: {self._holder.who} has taken the"
                    " context since its last token; finish one before the next, or load the model twice",
                )
            self._running, claim.thread = claim, threading.get_ident()
        try:
            yield
        finally:
            self._running = before

    def look(self) -> None:
        """For what only reads the context, which a callback may do.

        Raises EagleError (kind BUSY) in the middle of another thread's step.
        """
        running = self._running
        if running is not None and running.thread != threading.get_ident():
            raise _busy(running)

    @contextlib.contextmanager
    def call(self, who: str) -> Iterator[None]:
        """A call that changes what the context holds."""
        with self.step(self.claim(who, adopts=True), take=True):
            yield

    def run(
        self, claim: Claim, steps: Generator[Any, Any, None], take: bool = False
    ) -> Generator[Any, Any, None]:
        """The items of a generator while claim holds the context, which its first step takes if `take`."""
        sent = None
        try:
            while True:
                with self.step(claim, take):
                    try:
                        item = steps.send(sent)
                    except StopIteration:
                        return
                take = False
                sent = yield item
        finally:
            steps.close()

    def release(self, claim: Claim, settle: Callable[[], None]) -> None:
        """For a `finally`: calls settle if the context is still the claim's, before anybody else gets it."""
        with self._lock:
            if self._holder is claim:
                settle()


def _busy(running: Claim) -> EagleError:
    return EagleError(
        ErrorKind.BUSY,
        f"the model is in the middle of a step of {running.who}: a callback, or"
        " another thread, can use it between two tokens only",
    )
