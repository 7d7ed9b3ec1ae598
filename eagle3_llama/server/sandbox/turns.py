"""Whose turn it is, where clients wait for one of a few places."""

from __future__ import annotations

import collections
import time

from .cpu_time import Asker

ABOUT = 10.0  # seconds after its last work for which a client is about


class Waiter:
    """One request's place in the queue. begun: it has a place."""

    def __init__(self, asker: Asker) -> None:
        self.asker, self.begun = asker, False


class Turns:
    """The requests that wait for places, and those that have one. Its owner locks.

    The next place is for the client that has the fewest, and of several for the one that was served longest
    ago. A client that has to pause is passed over. The last free place is not for a client that has another
    while a second client is about: so that one finds a free place, whatever the first one sends.
    """

    def __init__(self) -> None:
        self.running = 0
        self._waiting: dict[str, collections.deque[Waiter]] = {}
        self._of: collections.Counter[str] = collections.Counter()  # places of each client
        self._seen: dict[str, float] = {}  # when its last work ended
        self._served: dict[str, int] = {}
        self._count = 0

    def wait(self, asker: Asker) -> Waiter:
        turn = Waiter(asker)
        self._waiting.setdefault(asker.client, collections.deque()).append(turn)
        return turn

    def next(self, free: int) -> Waiter | None:
        """Who may take one of the free places; None if nobody may now."""
        order = sorted(self._waiting, key=lambda c: (self._of[c], self._served.get(c, 0)))
        for client in order if free else ():
            turn = self._waiting[client][0]
            kept = free == 1 and self._of[client] and self._others(client)
            if not kept and turn.asker.pause() <= 0:
                return turn
        return None

    def pause(self) -> float | None:
        """Seconds until the first of those who pause need not any more; None if nobody does."""
        pauses = [turns[0].asker.pause() for turns in self._waiting.values()]
        return min((seconds for seconds in pauses if seconds > 0), default=None)

    def begin(self, turn: Waiter) -> None:
        client, turn.begun = turn.asker.client, True
        self._take_out(turn)
        self._of[client] += 1
        self.running, self._count = self.running + 1, self._count + 1
        self._served[client] = self._count

    def end(self, turn: Waiter) -> None:
        """The request needs no place any more, or waits for none."""
        if not turn.begun:
            self._take_out(turn)
            return
        client = turn.asker.client
        self._of[client] -= 1
        self.running -= 1
        self._seen[client] = time.monotonic()

    def _take_out(self, turn: Waiter) -> None:
        waiting = self._waiting[turn.asker.client]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[turn.asker.client]

    def _others(self, client: str) -> bool:
        since = time.monotonic() - ABOUT
        recent = (name for name, at in self._seen.items() if at > since)
        return any(name != client for name in (*self._waiting, *+self._of, *recent))
