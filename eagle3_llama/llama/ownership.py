"""Ownership of a model's context: one generation, or one call such as eval(), at a time.

A generator may be left half way, be continued after another one has used the context, or be finalised by
the garbage collector during another's step, even on another thread. Therefore each has a claim. Each step,
and each clean-up in a `finally`, checks that the claim still holds the context.

A call that leaves the text as it is, such as save_state(), holds the context without taking it from anybody.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ..errors import EagleError, ErrorKind


class Claim:
    """The right of a generation or a call to the context. Made by Ownership.claim().

    adopts: calls that the same thread makes during its step are part of it.
    """

    def __init__(self, who: str, adopts: bool) -> None:
        self.who = who
        self.adopts = adopts
        self.taken = False  # it has held the context
        self.thread = 0  # the one that runs its step


class Ownership:
    """Ownership of one model's context.

    Nobody waits for a step: a callback in it may wait for whoever waits. What comes during one is refused.
    Everybody waits for a hold() of another thread, which is short and calls nobody.
    """

    def __init__(self, calls: contextlib.AbstractContextManager[Any] | None = None) -> None:
        """calls: entered for each step of a generator, see Calls."""
        self._calls = calls or contextlib.nullcontext()
        self._lock = threading.RLock()  # a generator may be finalised while its thread holds the lock
        self._holder: Claim | None = None  # whose text the context holds
        self._running: Claim | None = None  # whose step is running
        self._held = 0  # depth of hold(), for which its thread keeps the lock
        self._late: list[tuple[Claim, Callable[[], None]]] = []  # releases that came during a hold()

    def claim(self, who: str, adopts: bool = False) -> Claim:
        """A new claim. During a step that adopts calls, the claim of that step."""
        running = self._running
        if running is not None and running.adopts and running.thread == threading.get_ident():
            return running
        return Claim(who, adopts)

    @contextlib.contextmanager
    def step(self, claim: Claim, take: bool = False) -> Iterator[None]:
        """Inside, nobody else gets the context. take: takes it from its holder.

        Raises EagleError CONTEXT_TAKEN if another claim has taken it since, BUSY during another's step.
        """
        before = self._enter(claim, take)
        try:
            yield
        finally:
            self._running = before

    def _enter(self, claim: Claim, take: bool) -> Claim | None:
        """Begins a step(). Returns whose step was running, which runs again after it."""
        with self._lock:
            before = self._running
            if before is not None and before is not claim:
                raise _busy(before)
            if take:
                self._holder = claim
                claim.taken = True
            elif claim.taken and self._holder is not claim:
                who = self._holder.who if self._holder is not None else "another"
                raise EagleError(
                    ErrorKind.CONTEXT_TAKEN,
                    f"this generation cannot continue: {who} has taken the context since its last token;"
                    " finish one before the next, or load the model twice",
                )
            self._running = claim
            claim.thread = threading.get_ident()
            return before

    @contextlib.contextmanager
    def hold(self, who: str) -> Iterator[None]:
        """For a call that leaves the text as it is. Inside, nobody else gets the context.

        A callback may make such a call during its own step. A generation can continue afterwards.

        Raises EagleError BUSY during another thread's step.
        """
        with self._lock:
            before = self._running
            if before is not None and before.thread != threading.get_ident():
                raise _busy(before)
            mine = Claim(who, adopts=False)
            mine.thread = threading.get_ident()
            self._running = mine
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1
                self._running = before
                if not self._held:
                    self._release_late()

    @contextlib.contextmanager
    def call(self, who: str) -> Iterator[None]:
        """For a call that changes the context."""
        with self.step(self.claim(who, adopts=True), take=True):
            yield

    def run(
        self, claim: Claim, steps: Generator[Any, Any, None], take: bool = False
    ) -> Generator[Any, Any, None]:
        """The items of a generator. Each step needs the context. take: the first step takes it."""
        sent = None
        try:
            while True:
                before = self._enter(claim, take)  # as step(), for each token
                try:
                    with self._calls:
                        item = steps.send(sent)
                except StopIteration:
                    return
                finally:
                    self._running = before
                take = False
                sent = yield item
        finally:
            steps.close()

    def release(self, claim: Claim, settle: Callable[[], None]) -> None:
        """For a `finally`: calls settle if the claim still holds the context, before anybody else gets it.

        During a hold() of this thread, in which the collector may finalise a generator, it waits for its end.
        """
        with self._lock:
            if self._held:
                self._late.append((claim, settle))
            elif self._holder is claim:
                settle()

    def _release_late(self) -> None:
        late, self._late = self._late, []
        for claim, settle in late:
            if self._holder is claim:
                settle()


def _busy(running: Claim) -> EagleError:
    return EagleError(
        ErrorKind.BUSY,
        f"the model is in the middle of a step of {running.who}: a callback or another thread can use it only"
        " between two tokens",
    )
