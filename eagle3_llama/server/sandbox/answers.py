"""The children that read what models have written. A parser's text, up to 450 KB, goes to each child once."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .pool import Sandbox

UNKNOWN: dict[str, Any] = {"unknown": True}  # what a child says of a syntax that it does not have


class Syntax:
    """How the answers to one request are to be read. fields: format, generation_prompt and parser."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.name = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class AnswerReaders(Sandbox):
    """A Sandbox of such children."""

    PAUSES = False

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, answers=True)

    def parse(self, syntax: Syntax, text: str, partial: bool) -> dict[str, Any] | None:
        """The message that a text is, None if it is none. partial: the text goes on. Raises as call()."""
        given: dict[str, Any] = {"do": "parse", "name": syntax.name, "text": text, "partial": partial}
        message = self.call(**given)
        return self.call(**given, syntax=syntax.fields) if message == UNKNOWN else message
