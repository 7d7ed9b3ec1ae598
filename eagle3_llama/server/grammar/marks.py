"""Words and numbers that stand for something else in a request's schemas, and that it does not have."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from typing import Any

_NUMBERS = 10**6  # that follow one another; a request's schemas have fewer parts


class Marks:
    """Marks for a request that has `given`: all its schemas, with what stands beside them in a grammar.

    word: letters and digits. number: the first of the numbers, of 18 digits. The same request has the same
    marks, so what is made with them can be kept.
    """

    def __init__(self, given: Any) -> None:
        text = json.dumps(given)
        for i in itertools.count():
            digest = hashlib.sha256(f"{i} {text}".encode()).hexdigest()
            first = 10**11 + int(digest, 16) % (9 * 10**11)
            self.word, self.number = f"e{digest[:11]}", first * _NUMBERS
            if self.word not in text and str(first) not in text:
                break
        self._names = itertools.count()

    def has(self, value: Any) -> bool:
        """True if a constant is one of the marks."""
        if isinstance(value, str):
            return value.startswith(f"{self.word}:")
        return type(value) is int and 0 <= value - self.number < _NUMBERS

    def name(self, of: str) -> str:
        """A new name for a definition, which begins as `of` does. No rule of a grammar has it by chance."""
        return f"{plain_word(of)}-{self.word}{next(self._names)}d"


def plain_word(text: str) -> str:
    """The letters and digits that a text begins with, as far as a name may have them."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text[:32]).strip("-") or "x"
