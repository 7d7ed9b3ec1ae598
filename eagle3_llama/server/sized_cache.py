"""A cache that is bounded by the size of what it holds, not by its number."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable


class SizedCache:
    """Texts by key; those not asked for longest are dropped first. most: characters, keys included."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._items: collections.OrderedDict[Hashable, tuple[str | None, int]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: tuple[str, ...], make: Callable[[], str | None]) -> str | None:
        """What make() returned for this key; what it raises is not kept. Two threads may make the same."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key][0]
        made = make()
        size = sum(map(len, key)) + len(made or "")
        with self._lock:
            if size <= self.most and key not in self._items:
                self._items[key] = made, size
                self.size += size
            while self.size > self.most:
                self.size -= self._items.popitem(last=False)[1][1]
        return made
