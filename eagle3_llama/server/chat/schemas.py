"""Which parts of a JSON schema no grammar of ours enforces. llama.cpp's converter passes over them."""

from __future__ import annotations

from typing import Any

_PASSED_OVER = frozenset(
    "multipleOf uniqueItems minProperties maxProperties patternProperties propertyNames contains minContains"
    " maxContains not if then else dependentRequired dependentSchemas dependencies unevaluatedProperties"
    " unevaluatedItems".split()
)
_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_ONE = ("items", "additionalProperties")  # keywords whose value is a schema
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "$defs", "definitions")


def unenforced(schema: Any) -> list[str]:
    """The keywords that a grammar of this schema does not enforce, each once.

    The bounds of an integer are enforced; those of a number are not, for it may have any digits.
    """
    found: dict[str, None] = {}
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, dict):
            continue
        found |= dict.fromkeys(key for key in node if key in _PASSED_OVER)
        if node.get("type") != "integer":
            found |= dict.fromkeys(f"{key} of a number" for key in node if key in _BOUNDS)
        for key in _ONE:
            left.append(node.get(key))
        for key in _LIST:
            left += node[key] if isinstance(node.get(key), list) else []
        for key in _NAMED:
            left += node[key].values() if isinstance(node.get(key), dict) else []
    return sorted(found)
