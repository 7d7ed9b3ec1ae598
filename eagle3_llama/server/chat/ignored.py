"""Which keywords of a JSON schema llama.cpp's converter does not read, because of others beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_CHOICES = ("oneOf", "anyOf")
_NUMBER = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_STRING = frozenset("pattern minLength maxLength".split())
_ARRAY = frozenset("items prefixItems minItems maxItems".split())
_OBJECT = frozenset("properties required additionalProperties".split())
_OF_KIND = {"number": _NUMBER, "integer": _NUMBER, "string": _STRING, "array": _ARRAY, "object": _OBJECT}
_BOUND = frozenset(("enum", "const", "allOf", *_CHOICES)).union(*_OF_KIND.values())
_FORMATS = frozenset(("date", "time", "date-time", "uuid", *(f"uuid{i}" for i in range(1, 6))))
_OBJECTS = frozenset(("properties", "$ref", "enum"))  # what the converter joins in `allOf`


def ignored(node: dict[str, Any]) -> Iterator[str]:
    """What of this schema it passes over, in words. Schemas inside it are looked at for themselves."""
    bound = _BOUND & node.keys()
    if "$ref" in node:
        yield from (f"{key} beside $ref" for key in sorted(bound))
        return
    for choice in _CHOICES:
        if choice in node:
            yield from (f"{key} beside {choice}" for key in sorted(bound - {choice}))
            return
    kind = node.get("type")
    if kind is None and "allOf" not in node and not {"enum", "const"} & node.keys():
        structure = {"properties", "additionalProperties", "items", "prefixItems"} & node.keys()
        if not structure and not (_STRING & node.keys() or node.get("format") in _FORMATS):
            yield from (f"{key} without a type" for key in sorted(bound))
    if isinstance(node.get("allOf"), list) and not {"properties", "additionalProperties"} & node.keys():
        if not all(isinstance(one, dict) and _OBJECTS & one.keys() for one in node["allOf"]):
            yield "allOf of other schemas than objects"
        yield from (f"{key} beside allOf" for key in sorted(bound - {"allOf"}))
    elif "allOf" in node:
        yield "allOf beside properties"
    if "pattern" in node and node.get("format") in _FORMATS:
        yield "format beside a pattern"
    described = node.get("properties")
    if isinstance(described, dict) and isinstance(node.get("required"), list):
        if any(name not in described for name in node["required"]):
            yield "required of a property that is not described"
    if kind == "integer" and any(
        low in node and f"exclusive{low.title()}" in node for low in ("minimum", "maximum")
    ):
        yield "two bounds of an integer on one side"
