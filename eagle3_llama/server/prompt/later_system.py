"""System messages behind a conversation's first: agents send them where something new must be said.

Some templates refuse them, leave them out, or show them at the beginning, so that no earlier prompt is one
any more. For such a template they are the user's.
"""

from __future__ import annotations

import itertools
from typing import Any

_SAID = "Hello.", "Be brief.", "Yes.", "Be kind.", "Bye."
PROBE: list[dict[str, Any]] = [
    {"role": role, "content": text}
    for role, text in zip(("system", "user", "system", "assistant", "system", "user"), ("You help.", *_SAID))
]


def are_shown(prompt: str) -> bool:
    """True if a template that made this of PROBE shows them where they stand."""
    places = [prompt.find(text) for text in _SAID]
    return places[0] >= 0 and places == sorted(places)


def has_later(messages: list[dict[str, Any]]) -> bool:
    return any(m["role"] == "system" for m in messages[1:])


def as_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with one system message at most. Others join the user's words beside them."""
    of = lambda m: "user" if m["role"] == "system" else m["role"]
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    out = [_joined("system", messages[:first])] if first else []
    for role, run in itertools.groupby(messages[first:], of):
        found = list(run)
        out += [_joined(role, found)] if any(m["role"] == "system" for m in found) else found
    return out


def _joined(role: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "content": "\n\n".join(m["content"] for m in messages if m["content"])}
