"""Which parts of a JSON schema no grammar of ours enforces. llama.cpp's converter passes over them."""

from __future__ import annotations

from typing import Any

from .ignored import ignored
from .marks import Marks
from .number_bounds import with_numbers
from .patterns import Unsupported, written
from .plain_schemas import plain
from .schema_room import DEFS, SchemaRoom

_PASSED_OVER = frozenset(
    "multipleOf uniqueItems minProperties maxProperties patternProperties propertyNames contains minContains"
    " maxContains not if then else dependentRequired dependentSchemas dependencies unevaluatedProperties"
    " unevaluatedItems".split()
)
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
NUMBER = 256  # characters of patterns, which take as long as the bounds of a number
_COUNTED = {"maxLength": 2000, "maxItems": 1900}  # the most that a grammar counts
_ONE = ("items", "additionalProperties")  # keywords whose value is a schema
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SHOWN = ("title", "description", "default")  # what templates show of a schema, and no grammar needs
_NAMED = ("properties", *DEFS)
KEPT = ("type", *SHOWN, *DEFS)  # what stays where alternatives take a schema's place
_KINDS = frozenset("object array string number integer boolean null".split())
_KINDS_OF = {
    **dict.fromkeys(("properties", "additionalProperties", "required"), ("object",)),
    **dict.fromkeys(("items", "prefixItems"), ("array",)),
    **dict.fromkeys(_BOUNDS, ("number", "integer")),
}
_BEFORE_TYPES = frozenset(("$ref", "anyOf", "oneOf", "allOf"))  # what the converter reads instead of a type


def enforceable(schema: Any, room: SchemaRoom | None = None) -> Any:
    """The same schema for the converter, in terms that it enforces: see terms() and plain_schemas.py.

    room: by default that of a schema by itself. Raises ApiError 400 as plain() does.
    """
    room = room or SchemaRoom(Marks(schema))
    return terms(plain(schema, room), room)


def terms(schema: Any, room: SchemaRoom) -> Any:
    """A plain schema in terms that the converter enforces: see decimals.py and patterns.py.

    Raises ApiError 400 if it has more parts than there is room for.
    """
    if not isinstance(schema, dict):
        return schema
    room.take_node()
    out = _alone(schema)
    for key in _ONE:
        if isinstance(out.get(key), dict):
            out[key] = terms(out[key], room)
    for key in _LIST:
        if isinstance(out.get(key), list):
            out[key] = [terms(inner, room) for inner in out[key]]
    for key in _NAMED:
        if isinstance(out.get(key), dict):
            out[key] = {name: terms(inner, room) for name, inner in out[key].items()}
    for key, most in _COUNTED.items():  # a higher bound is left to the model, as llama.cpp leaves it
        if isinstance(out.get(key), int) and out[key] > most:
            del out[key]
    kinds, pattern = out.get("type"), out.get("pattern")
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        out["type"] = list(dict.fromkeys(kinds))  # the converter writes what comes twice twice
    room.characters -= NUMBER * bool(_BOUNDS & out.keys()) + (len(pattern) if isinstance(pattern, str) else 0)
    if room.characters < 0:
        return out
    if _BOUNDS & out.keys() and not _BEFORE_TYPES & out.keys() and (each := by_kind(out)) is not None:
        numbers = [with_numbers(one, room.marks) for one in each]
        return {**{k: out[k] for k in KEPT if k in out}, "anyOf": numbers}
    return with_numbers(_with_pattern(out), room.marks)


def by_kind(schema: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A schema for each of the types in a list of JSON's types; None if `type` is something else.

    What is about objects, lists or numbers alone is in no other, so schemas inside do not multiply by level.
    """
    kinds = schema.get("type")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
        return None
    part = {key: value for key, value in schema.items() if key not in DEFS}
    about = lambda kind: {key: value for key, value in part.items() if kind in _KINDS_OF.get(key, _KINDS)}
    return [{**about(kind), "type": kind} for kind in dict.fromkeys(kinds)]


def _alone(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without an `allOf` of one, as pydantic writes a reference with a description."""
    inner = schema.get("allOf")
    if isinstance(inner, list) and len(inner) == 1 and isinstance(inner[0], dict):
        if not schema.keys() - {"allOf", *SHOWN}:
            return {**{key: schema[key] for key in SHOWN if key in schema}, **inner[0]}
    return dict(schema)


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with a pattern that the converter writes rightly, if there is one."""
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(pattern, str) or type(least) is not int or type(most) not in (int, type(None)):
        return schema
    try:
        text = written(pattern, least, most)
    except Unsupported:
        return schema
    return {k: v for k, v in schema.items() if k not in ("minLength", "maxLength")} | {"pattern": text}


def unenforced(schema: Any, marks: Marks) -> list[str]:
    """The keywords that a grammar of this schema does not enforce, each once. marks: the request's.

    The bounds of a number are enforced as far as enforceable() has written them.
    """
    found: dict[str, None] = {}
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, dict):
            continue
        found |= dict.fromkeys(key for key in node if key in _PASSED_OVER)
        found |= dict.fromkeys(() if marks.has(node.get("const")) else ignored(node))
        if node.get("type") != "integer":
            found |= dict.fromkeys(f"{key} of a number" for key in node if key in _BOUNDS)
        if "pattern" in node:  # the converter passes over them
            found |= dict.fromkeys(
                f"{key} beside a pattern" for key in ("minLength", "maxLength") if key in node
            )
        for key in _ONE:
            left.append(node.get(key))
        for key in _LIST:
            left += node[key] if isinstance(node.get(key), list) else []
        for key in _NAMED:
            left += node[key].values() if isinstance(node.get(key), dict) else []
    return sorted(found)
