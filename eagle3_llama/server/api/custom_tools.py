"""Custom tools of /v1/responses. The model gets each as a function with one argument, a text."""

from __future__ import annotations

import json
import re

PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# a character of a JSON string, or an escape: of two halves of a surrogate pair, both
_PAIR = r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PART = re.compile(rf'[^"\\]|\\(?:["\\/bfnrt]|{_PAIR}|u[0-9a-fA-F]{{4}})')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?\Z")


def arguments_of(text: str) -> str:
    """The arguments of the function's call that stands for a call with this text."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputText:
    """The text of a call, which grows with the JSON of its arguments."""

    def __init__(self) -> None:
        self.text = ""  # so far
        self._json, self._at = "", 0

    def add(self, arguments: str) -> str:
        """What is new in the text."""
        self._json += arguments
        if self._at == 0:
            if (begun := _BEGIN.match(self._json)) is None:
                return ""
            self._at = begun.end()
        last = end = self._at
        while (part := _PART.match(self._json, end)) is not None:
            last, end = part.span()
        if _HALF.match(self._json, last) is not None:  # the other half may come
            end = last
        new = self._json[self._at : end]
        self._at += len(new)
        return self._grow(json.loads(f'"{new}"', strict=False))

    def end(self) -> str:
        """The rest of a text that has ended. Arguments of another form are the text themselves."""
        try:
            made = json.loads(self._json, strict=False)
        except ValueError:
            made = None
        text = made.get("input") if isinstance(made, dict) and len(made) == 1 else None
        if not isinstance(text, str):
            text = self.text or self._json
        return self._grow(text[len(self.text) :]) if text.startswith(self.text) else ""

    def _grow(self, new: str) -> str:
        self.text += new
        return new
