"""Schemas in plain terms, before anything is made of them.

llama.cpp's converter names the rule of a reference after its letters and digits. References that differ in
other characters would share a rule, and so would those of several tools. So each schema that is referred to
gets a name of its own in the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from .marks import plain_word
from .schema_room import DEFS, SchemaRoom
from .settled import exclusive, settled

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_Place = tuple["str | int", ...]


def plain(root: Any, room: SchemaRoom) -> Any:
    """The same schema, whose references are all to its own `$defs`, by names that no other schema has.

    Keywords that others beside them settle are left out: see settled.py. A schema with a reference that leads
    nowhere stays as it is. Raises ApiError 400 for `$defs` that are no object, and for more parts than there
    is room for.
    """
    return _Plain(root, room, room.marks.name, settle=True).whole() if isinstance(root, dict) else root


def shown(root: Any, room: SchemaRoom) -> Any:
    """A schema as templates show it: as it is, unless the converter would not find what it refers to.

    It takes its parts from the room. Raises ApiError 400 as plain() does.
    """
    if not isinstance(root, dict):
        return root
    numbers, taken = itertools.count(2), set[str]()

    def name(of: str) -> str:
        found = plain_word(of)
        while found in taken:
            found = f"{plain_word(of)}-{next(numbers)}"
        taken.add(found)
        return found

    made = _Plain(root, room, name)
    out = made.whole()
    room.nodes = made.left
    return out if made.moved else root


class _Plain:
    """name: makes a definition's name, from the last part of a reference. settle: leave out keywords.

    moved: there was a reference that the converter does not understand. left: parts that there is room for.
    """

    def __init__(
        self, root: dict[str, Any], room: SchemaRoom, name: Callable[[str], str], settle: bool = False
    ) -> None:
        self._root, self._room, self._name, self._settle = root, room, name, settle
        self._names: dict[_Place, str] = {}
        self._places: list[_Place] = []
        self.left, self._lost, self.moved = room.nodes, False, False

    def whole(self) -> dict[str, Any]:
        out = self._schema(self._root)
        defs: dict[str, Any] = {}
        for place in self._places:  # it grows by those that these refer to in turn
            defs[self._names[place]] = self._schema(_at(self._root, place))
        if self._lost:
            return self._root
        return {**out, "$defs": defs} if defs else out

    def _schema(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        self.left -= 1
        if self.left < 0:
            raise self._room.too_many()
        out: dict[str, Any] = {}
        for key, value in node.items():
            if key in DEFS:
                self._room.check_defs(key, value)
            elif key == "$ref" and isinstance(value, str):
                out[key] = self._reference(value)
            elif key == "properties" and isinstance(value, dict):
                out[key] = {name: self._schema(inner) for name, inner in value.items()}
            elif key in _LISTS and isinstance(value, list):
                out[key] = [self._schema(inner) for inner in value]
            else:
                out[key] = self._schema(value) if key in ("items", "additionalProperties") else value
        if not self._settle:
            return out
        choices = node.get("oneOf")
        if isinstance(choices, list) and "anyOf" not in out and exclusive(choices, self._resolved):
            out["anyOf"] = out.pop("oneOf")
        return settled(out)

    def _resolved(self, schema: Any) -> Any:
        """The schema that a reference leads to, if it is one. A longer chain of references stays one."""
        for _ in range(4):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            place = _place(self._root, schema["$ref"])
            schema = None if place is None else _at(self._root, place)
        return schema

    def _reference(self, reference: str) -> str:
        place, told = _place(self._root, reference), _place(self._root, reference, raw=True)
        place = told if place is None else place
        if place is None or not isinstance(_at(self._root, place), dict):
            self._lost = True
            return reference
        self.moved = self.moved or place != told
        if place not in self._names:
            self._names[place] = self._name(str(place[-1]) if place else "root")
            self._places.append(place)
        return f"#/$defs/{self._names[place]}"


def _place(root: Any, reference: str, raw: bool = False) -> _Place | None:
    """Where a reference leads, None if nowhere. raw: without escapes, as the converter reads it."""
    if not raw:
        reference = unquote(reference)
        if reference == "#":
            return ()
    if not reference.startswith("#/"):
        return None
    node, out = root, list["str | int"]()
    for part in reference[2:].split("/"):
        key = part if raw else part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            out.append(key)
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and len(key) < 9 and int(key) < len(node):
            out.append(int(key))
            node = node[int(key)]
        else:
            return None
    return tuple(out)


def _at(root: Any, place: _Place) -> Any:
    for key in place:
        root = root[key]
    return root
