"""Which parts of a JSON schema no grammar of ours enforces. llama.cpp's converter passes over them."""

from __future__ import annotations

from typing import Any

from .decimals import with_numbers
from .ignored import ignored
from .patterns import Unsupported, written

_PASSED_OVER = frozenset(
    "multipleOf uniqueItems minProperties maxProperties patternProperties propertyNames contains minContains"
    " maxContains not if then else dependentRequired dependentSchemas dependencies unevaluatedProperties"
    " unevaluatedItems".split()
)
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
MOST_CHARACTERS, NUMBER = 1 << 16, 256
_COUNTED = {"maxLength": 2000, "maxItems": 1900}  # the most that a grammar counts
_ONE = ("items", "additionalProperties")  # keywords whose value is a schema
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SHOWN = ("title", "description", "default")  # what templates show of a schema, and no grammar needs
_NAMED = ("properties", "$defs", "definitions")


def enforceable(schema: Any, room: list[int] | None = None) -> Any:
    """The same schema for the converter, in terms that it enforces: see decimals.py and patterns.py.

    room: for how many characters of patterns there is still time; a number takes as long as some of them.
    """
    room = [MOST_CHARACTERS] if room is None else room
    if not isinstance(schema, dict):
        return schema
    out = _alone(schema)
    for key in _ONE:
        if isinstance(out.get(key), dict):
            out[key] = enforceable(out[key], room)
    for key in _LIST:
        if isinstance(out.get(key), list):
            out[key] = [enforceable(inner, room) for inner in out[key]]
    for key in _NAMED:
        if isinstance(out.get(key), dict):
            out[key] = {name: enforceable(inner, room) for name, inner in out[key].items()}
    for key, most in _COUNTED.items():  # a higher bound is left to the model, as llama.cpp leaves it
        if isinstance(out.get(key), int) and out[key] > most:
            del out[key]
    kind, pattern = out.get("type"), out.get("pattern")
    room[0] -= NUMBER * bool(_BOUNDS & out.keys()) + (len(pattern) if isinstance(pattern, str) else 0)
    if room[0] < 0:
        return out
    if isinstance(kind, list) and _BOUNDS & out.keys():
        rest = {k: v for k, v in out.items() if k not in _BOUNDS}
        kinds = [{**(out if name in ("number", "integer") else rest), "type": name} for name in kind]
        shown = {k: out[k] for k in ("type", *SHOWN) if k in out}
        return {**shown, "anyOf": [with_numbers(one) for one in kinds]}
    return with_numbers(_with_pattern(out))


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


def unenforced(schema: Any) -> list[str]:
    """The keywords that a grammar of this schema does not enforce, each once.

    The bounds of a number are enforced as far as enforceable() has written them.
    """
    found: dict[str, None] = {}
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, dict):
            continue
        found |= dict.fromkeys(key for key in node if key in _PASSED_OVER)
        found |= dict.fromkeys(ignored(node))
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
