"""Each client's share of the machine beside its rows in the rounds, while other clients generate.

A round has rows of all clients, and one more hardly slows down the others. But a prompt is decoded between
two rounds, and the children, the threads and the event loop that work for a request take the cores that
compute. A client that sends one request after the other could slow down its neighbours to a fraction. So it
is charged with all of that, and whoever has taken more than a share waits before the next request begins, and
before further work for those that it has sent at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable

from ..sandbox.cpu_time import NOBODY, Asker

SHARE = 0.15  # seconds a second
BURST = 0.5  # seconds that a client may take at once, after a time without requests
REQUEST = 0.006  # seconds that any request is charged with: it wakes threads while others compute
MOST_PAUSE = 5.0  # seconds
_asker: contextvars.ContextVar[Asker] = contextvars.ContextVar("asker", default=NOBODY)


class ClientQuota:
    """The accounts of the clients. others: whether another client than this one generates."""

    def __init__(self, others: Callable[[str], bool]) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._debts: dict[str, tuple[float, float]] = {}  # seconds, and when they were right

    def charge(self, client: str, seconds: float) -> None:
        """Work of so many seconds was done for this client. For any thread."""
        with self._lock:
            debt = min(self._debt(client) + seconds, BURST + SHARE * MOST_PAUSE)
            self._debts[client] = debt, time.monotonic()

    def _debt(self, client: str) -> float:
        debt, then = self._debts.get(client, (0.0, 0.0))
        return max(debt - SHARE * (time.monotonic() - then), 0.0)

    def pause(self, client: str) -> float:
        """Seconds for which its next request has to wait."""
        if not self._others(client):
            return 0.0
        with self._lock:
            return max(self._debt(client) - BURST, 0.0) / SHARE

    def asker(self, client: str) -> Asker:
        """The client, for what works for it in threads and children."""
        return Asker(client, lambda seconds: self.charge(client, seconds), lambda: self.pause(client))

    async def turn(self, client: str) -> None:
        """Waits until a request of this client may begin. What the rest of the task does is charged to it."""
        _asker.set(self.asker(client))
        self.charge(client, REQUEST)
        if (seconds := self.pause(client)) > 0.0:
            await asyncio.sleep(seconds)


def asker() -> Asker:
    """The client whose request this task answers; NOBODY if it answers none."""
    return _asker.get()
