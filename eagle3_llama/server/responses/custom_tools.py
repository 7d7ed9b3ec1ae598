"""Custom tools of /v1/responses. The model gets each as a function with one argument, a text."""

from __future__ import annotations

import json
import re

from ...common.guarded_json import read_json

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
        self._parts: list[str] = []  # all of the JSON
        self._left, self._begun = "", False  # what of it has not been read; whether some has

    def add(self, arguments: str) -> str:
        """What is new in the text."""
        self._parts.append(arguments)
        self._left += arguments
        start = 0
        if not self._begun:
            if (begun := _BEGIN.match(self._left)) is None:
                return ""
            start = begun.end()
        last = end = start
        while (part := _PART.match(self._left, end)) is not None:
            last, end = part.span()
        if _HALF.match(self._left, last) is not None:  # the other half may come
            end = last
        new = self._left[start:end]
        self._left, self._begun = self._left[end:], True
        return self._grow(read_json(f'"{new}"', strict=False))

    def end(self) -> str:
        """The rest of a text that has ended. Arguments of another form are the text themselves."""
        try:
            made = read_json("".join(self._parts), strict=False)
        except ValueError:
            made = None
        text = made.get("input") if isinstance(made, dict) and len(made) == 1 else None
        if not isinstance(text, str):
            text = self.text or "".join(self._parts)
        return self._grow(text[len(self.text) :]) if text.startswith(self.text) else ""

    def _grow(self, new: str) -> str:
        self.text += new
        return new
