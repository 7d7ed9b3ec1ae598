"""A cache with a limit on the total size of its items."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable


class SizedCache:
    """Texts by key. Drops the least recently used first. most: limit in characters, including the keys."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._items: collections.OrderedDict[Hashable, tuple[str | None, int]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: tuple[str, ...], make: Callable[[], str | None]) -> str | None:
        """The text of this key, from make() if it is new. Two threads may call make() for the same key.

        If make() raises, nothing is stored.
        """
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
