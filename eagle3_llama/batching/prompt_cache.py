"""Texts that slots gave up, in memory with all that a slot holds of them, for prompts that begin alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .slot_state import SlotState

LEAST = 16  # tokens that are worth a copy: fewer are decoded with the next chunk, in about the same time


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens at the beginning of both."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def goes_on(n: int, n_prompt: int, n_tokens: int) -> bool:
    """True if a prompt that shares n tokens with a text goes on with its conversation.

    It has all of the text's prompt, but for what a template adds before an answer. What it lacks is of the
    answer: its thoughts are left out, say, or another answer is wanted. Nobody will ask for that again.
    """
    return n >= min(n_prompt, n_tokens) - LEAST


@dataclasses.dataclass(eq=False)
class SavedText:
    """A text of a client, which begins with a prompt of n_prompt tokens.

    least: fewest tokens that it can be cut to, once it is in a slot.
    """

    client: str
    state: SlotState
    least: int
    n_prompt: int
    ids: np.ndarray = dataclasses.field(init=False)  # int32, because comparing lists takes 20 times as long

    def __post_init__(self) -> None:
        self.ids = np.array(self.state.tokens, np.int32)

    @property
    def n_bytes(self) -> int:
        """Its bytes in memory."""
        return self.state.n_bytes + self.ids.nbytes

    def shared(self, ids: np.ndarray) -> int:
        """Number of tokens at the beginning that it shares with these, as far as it can be cut there."""
        n = min(len(ids), len(self.ids))
        differ = np.flatnonzero(self.ids[:n] != ids[:n])
        n = int(differ[0]) if len(differ) else n
        return n if n >= self.least else 0


class PromptCache:
    """Texts of at most n_bytes together. For the batcher's thread; other threads may read its counts.

    If there is no room, the client with the most bytes loses the text that it has not used for longest: so
    nobody loses texts because another one has many.
    """

    def __init__(self, n_bytes: int) -> None:
        self.most_bytes = n_bytes
        self.n_bytes = 0
        self._texts: dict[str, list[SavedText]] = {}  # by client, the one used last at the end

    def __len__(self) -> int:
        return sum(len(texts) for texts in list(self._texts.values()))

    def find(self, client: str, tokens: Sequence[int]) -> tuple[SavedText | None, int]:
        """The client's text with the longest beginning of these tokens, and how many it shares with them."""
        ids = np.array(tokens, np.int32)
        best, most = None, 0
        for text in self._texts.get(client, ()):
            if (n := text.shared(ids)) > most:
                best, most = text, n
        return best, most

    def holds(self, client: str, tokens: Sequence[int]) -> bool:
        """True if a text of the client begins with all of these tokens, and can be cut behind them."""
        return self.find(client, tokens)[1] == len(tokens)

    def add(self, text: SavedText) -> None:
        """Keeps a text, without those that are its beginning, and drops others if there is no room."""
        if text.n_bytes > self.most_bytes or self.holds(text.client, text.state.tokens):
            return
        for other in list(self._texts.get(text.client, ())):
            if text.shared(other.ids) == len(other.ids):  # whoever could use the other can use this one
                self.remove(other)
        self._texts.setdefault(text.client, []).append(text)
        self.n_bytes += text.n_bytes
        while self.n_bytes > self.most_bytes:
            self.remove(max(self._texts.values(), key=lambda texts: sum(t.n_bytes for t in texts))[0])

    def use(self, text: SavedText, n: int) -> None:
        """A slot takes n tokens of the text, which leaves the cache if its conversation goes on there."""
        if goes_on(n, text.n_prompt, len(text.ids)):
            self.remove(text)
        elif text in (texts := self._texts.get(text.client, [])):
            texts.remove(text)
            texts.append(text)

    def remove(self, text: SavedText) -> None:
        """Drops a text, if it is still there."""
        texts = self._texts.get(text.client, [])
        if text in texts:
            texts.remove(text)
            self.n_bytes -= text.n_bytes
            if not texts:
                del self._texts[text.client]

    def clear(self) -> None:
        """Drops all texts."""
        self._texts.clear()
        self.n_bytes = 0
