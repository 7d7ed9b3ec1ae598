"""Which keywords of a JSON schema llama.cpp's converter does not read, because of others beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .settled import KNOWN, LEFT, PATTERNS, fitting, is_of

_CHOICES = ("oneOf", "anyOf")
_NUMBER = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_STRING = frozenset("pattern minLength maxLength".split())
_OF_TEXTS = frozenset(("pattern", "format"))  # what is not looked for in listed values
_ARRAY = frozenset("items prefixItems minItems maxItems".split())
_OBJECT = frozenset("properties required additionalProperties".split())
_BOUND = frozenset(("enum", "const", "allOf", *_CHOICES)).union(_NUMBER, _STRING, _ARRAY, _OBJECT)
_OBJECTS = frozenset(("properties", "$ref", "enum"))  # what the converter joins in `allOf`


def ignored(node: dict[str, Any]) -> Iterator[str]:
    """What of this schema it passes over, in words. Schemas inside it are looked at for themselves."""
    bound = _BOUND & node.keys()
    if "$ref" in node:
        yield from (f"{key} beside $ref" for key in sorted(bound))
        return
    if "oneOf" in node:
        yield "oneOf of schemas that types, or a property with a value of its own in each, do not tell apart"
    for choice in _CHOICES:
        if choice in node:
            yield from (f"{key} beside {choice}" for key in sorted(bound - {choice}))
            return
    if {"enum", "const"} & node.keys() and "allOf" not in node:
        yield from _beside_values(node)
        return
    kind = node.get("type")
    if kind is None and "allOf" not in node:
        structure = {"properties", "additionalProperties", "items", "prefixItems"} & node.keys()
        if not structure and not (_STRING & node.keys() or _has_format(node)):
            yield from (f"{key} without a type" for key in sorted(bound))
    if isinstance(node.get("allOf"), list) and not {"properties", "additionalProperties"} & node.keys():
        if not all(isinstance(one, dict) and _OBJECTS & one.keys() for one in node["allOf"]):
            yield "allOf of other schemas than objects"
        yield from (f"{key} beside allOf" for key in sorted(bound - {"allOf"}))
    elif "allOf" in node:
        yield "allOf beside properties"
    if is_of(node, "string"):
        yield from _of_texts(node)
    if is_of(node, "array") and any(isinstance(node.get(key), list) for key in ("prefixItems", "items")):
        yield from (f"{key} beside prefixItems" for key in ("minItems", "maxItems") if key in node)
        if "prefixItems" in node and "items" in node:
            yield "items beside prefixItems"
    described = node.get("properties", {})
    if is_of(node, "object") and isinstance(described, dict) and isinstance(node.get("required"), list):
        if any(isinstance(name, str) and name not in described for name in node["required"]):
            yield "required of a property that is not described"
    if kind == "integer" and any(
        low in node and f"exclusive{low.title()}" in node for low in ("minimum", "maximum")
    ):
        yield "two bounds of an integer on one side"


def _beside_values(node: dict[str, Any]) -> Iterator[str]:
    """What is passed over beside `enum` or `const`, if it is about one of the values."""
    name = "const" if "const" in node else "enum"
    values = [node["const"]] if name == "const" else node["enum"]
    if not isinstance(values, list):
        return  # the converter refuses it
    if len(fitting(node)) < len(values):
        yield f"{name} of values that the rest of its schema does not allow"
    about: dict[type, frozenset[str]] = {str: _OF_TEXTS, list: _ARRAY, dict: _OBJECT}
    beside = {key for value in values for key in about.get(type(value), frozenset()) & node.keys()}
    for key in sorted(beside):
        if key != "format" or node[key] in (*KNOWN, *LEFT, *PATTERNS):
            yield f"{key} beside {name}"


def _of_texts(node: dict[str, Any]) -> Iterator[str]:
    form = node.get("format")
    if not isinstance(form, str):
        return
    if "pattern" in node:
        if form in KNOWN | LEFT | PATTERNS.keys():
            yield "format beside a pattern"
    elif form in LEFT:
        yield f"the format {form}"
    elif form in KNOWN:
        yield from (f"{key} beside format" for key in ("minLength", "maxLength") if key in node)


def _has_format(node: dict[str, Any]) -> bool:
    return isinstance(node.get("format"), str) and node["format"] in KNOWN
