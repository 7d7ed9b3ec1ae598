"""The names of the fields of a body's parts, by which a mistaken one is answered."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from ..body.other_servers import OtherServers


@functools.lru_cache(maxsize=64)
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def field_names(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """The fields of the object at a place of a body, which is given as in pydantic's errors.

    Those of other servers are left out: they are there to name ours.
    """
    schema = _schema(model)
    found = [schema]
    for part in place:
        found = [inner for one in found for inner in _inside(one, part, schema.get("$defs", {}))]
    flat = [one for outer in found for one in _members(outer, schema.get("$defs", {}))]
    foreign = set[str]()
    if issubclass(model, OtherServers) and not place:
        foreign = OtherServers.model_fields.keys() - model.__annotations__.keys()
    return [name for one in flat for name in one.get("properties", {}) if name not in foreign]


def _members(schema: dict[str, Any], defs: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema without references, or those that it is a choice of."""
    if "$ref" in schema:
        return _members(defs[schema["$ref"].rpartition("/")[2]], defs)
    choices = schema.get("anyOf") or schema.get("oneOf")
    return [one for choice in choices for one in _members(choice, defs)] if choices else [schema]


def _inside(schema: dict[str, Any], part: int | str, defs: dict[str, Any]) -> list[dict[str, Any]]:
    """The target of a part of a place: an item, a field, or the schema itself for a union's member."""
    choices = schema.get("anyOf") or schema.get("oneOf") or []
    tags = [c["discriminator"]["mapping"] for c in (schema, *choices) if "discriminator" in c]
    if named := [mapping[part] for mapping in tags if part in mapping]:
        return [{"$ref": named[0]}]
    members = _members(schema, defs)
    if isinstance(part, int):
        return [one["items"] for one in members if "items" in one]
    return [one["properties"][part] for one in members if part in one.get("properties", {})] or [schema]
