"""The form in which a template writes the arguments of calls, and what its grammar enforces of their schemas.

Many templates write them as JSON. Others write each argument between tags: there a text has no quotes, and
llama.cpp's grammar allows any. It knows the schemas of numbers there. So where a text is bound by something,
a number stands for it that the request does not have. The grammar then has this number where the text is to
be, and gets the rules of the text instead.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_TEXT, _INNER = "e3-text", "e3-inner"  # constants that show where the grammar writes them
_NUMBER, _ITEM = 8110523001, 8110523002
_CLASS = r"\[(?:[^\]\\]|\\.)*\]"
_TOKEN = re.compile(rf'"(?:[^"\\]|\\.)*"|{_CLASS}|[\w-]+|\{{\d*,?\d*\}}|[()|*+?.]')


class Form(NamedTuple):
    """close: the beginning of what ends a text between tags; "" if texts are JSON.

    nested: texts inside objects and lists stand between tags, too. values: the grammar knows the schemas of
    arguments; required: it knows which must be there; items: it counts those of a list.
    """

    close: str = ""
    nested: bool = False
    values: bool = True
    required: bool = True
    items: bool = True


def probe() -> dict[str, Any]:
    """A tool of which form_of() knows what must be in the grammar."""
    inner = {"type": "object", "properties": {"t": {"type": "string", "const": _INNER}}, "required": ["t"]}
    items = {"type": "array", "items": {"type": "number", "const": _ITEM}, "minItems": 1, "maxItems": 2}
    properties = {
        "text": {"type": "string", "const": _TEXT},
        "number": {"type": "number", "const": _NUMBER},
        "list": items,
        "inner": inner,
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    about = {"name": "e3_probe", "description": "Nothing.", "parameters": schema}
    return {"type": "function", "function": about}


def form_of(grammar: str) -> Form:
    """The form, from a grammar of calls of the probe alone."""
    number = f'"{_NUMBER}"'
    if number not in grammar:
        return Form(values=False, required=False, items=False)
    close = ""
    if _TEXT not in grammar:
        rule = re.search(rf"^(\S+) ::= {number}$", grammar, re.M)
        found = re.search(rf'(?<![\w-]){re.escape(rule[1])} "((?:[^"\\]|\\.)+)"', grammar) if rule else None
        close = found[1].encode().decode("unicode_escape")[:2] if found else "\0"
    must = lambda number: not _without(grammar, f'"{number}"')
    return Form(close, _INNER not in grammar, True, must(_NUMBER), must(_ITEM))


def _without(grammar: str, literal: str) -> bool:
    """True if a grammar has a text that is written without this literal."""
    rules = dict(line.split(" ::= ", 1) for line in grammar.splitlines() if " ::= " in line)
    bodies = {name: _TOKEN.findall(body) for name, body in rules.items()}
    users: dict[str, set[str]] = {}
    for name, tokens in bodies.items():
        for token in tokens:
            if token in bodies:
                users.setdefault(token, set()).add(name)
    possible, left = set[str](), list(bodies)
    while left:
        name = left.pop()
        if name not in possible and _Body(bodies[name], possible, literal).alternatives():
            possible.add(name)
            left += users.get(name, ())
    return "root" in possible


class _Body:
    """Reads a rule's tokens. possible: rules that are known to have a text without the literal."""

    def __init__(self, tokens: list[str], possible: set[str], literal: str) -> None:
        self.tokens, self.possible, self.literal, self.at = tokens, possible, literal, 0

    def alternatives(self) -> bool:
        """True if one of them can do without it."""
        any_, all_ = False, True
        while self.at < len(self.tokens) and self.tokens[self.at] != ")":
            token = self.tokens[self.at]
            self.at += 1
            if token == "|":
                any_, all_ = any_ or all_, True
                continue
            fine = token in self.possible or token[0] in '"[.'
            if token == "(":
                fine = self.alternatives()
                self.at += 1
            fine = fine and token != self.literal
            if self.at < len(self.tokens) and self.tokens[self.at][0] in "*+?{":
                fine = fine or re.match(r"[*?]|\{0?,|\{0\}", self.tokens[self.at]) is not None
                self.at += 1
            all_ = all_ and fine
        return any_ or all_
