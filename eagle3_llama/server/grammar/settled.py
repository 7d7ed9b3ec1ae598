"""Keywords of a JSON schema that others beside them settle. llama.cpp's converter reads one kind alone.

Beside a list of values, only those count that the rest of the schema allows. A tuple has as many items as it
describes. A format is a pattern, but for those that the converter knows. Schemas of which no two can hold at
once are `anyOf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_DAYS_OF_MONTH = (
    r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"(\d{{4}}-{_DAYS_OF_MONTH}|{_LEAP_YEAR}-02-29)"
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{3})?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = "[A-Za-z0-9]{1,30}(-[A-Za-z0-9]{1,31})?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = "[0-9a-fA-F]{1,4}"
_FEW = [
    f"({_HEX}:){{{n - 1}}}{_HEX}::" + (f"({_HEX}(:{_HEX}){{0,{6 - n}}})?" if n < 7 else "")
    for n in range(1, 8)
]
_IPV6 = "|".join([f"({_HEX}:){{7}}{_HEX}", f"::({_HEX}(:{_HEX}){{0,6}})?", *_FEW])
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DAYS = r"(\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)"
_SIGN = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(//([A-Za-z0-9._~-]+@)?{_HOST}(:[1-9][0-9]{{0,4}})?|{_SIGN}+)(/{_SIGN}*)*"
PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{TIME}",
    "email": rf"[A-Za-z0-9_+-]{{1,30}}(\.[A-Za-z0-9_+-]{{1,30}})?@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_IPV6})",
    "duration": rf"P(\d+W|{_DAYS}({_CLOCK})?|{_CLOCK})",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_PATH}(\?({_SIGN}|[/?])*)?(#({_SIGN}|[/?])*)?",
}
# the lengths of texts of a format
_LENGTHS: dict[str, tuple[int, int]] = {"date": (10, 10), "time": (9, 18), "date-time": (20, 29)}
_LENGTHS |= dict.fromkeys(("uuid", *(f"uuid{i}" for i in range(1, 6))), (36, 36))
_LENGTHS |= {"email": (3, 313), "hostname": (1, 251), "ipv4": (7, 15), "ipv6": (2, 39)}
KNOWN = frozenset("date time date-time uuid uuid1 uuid2 uuid3 uuid4 uuid5".split())  # by the converter
# which the standard describes, and no grammar of ours enforces; others mean nothing to it
LEFT = frozenset(
    "idn-email idn-hostname iri iri-reference json-pointer regex relative-json-pointer uri-reference"
    " uri-template".split()
)
_ELSEWHERE = frozenset(("$ref", "anyOf", "oneOf", "allOf"))  # what the converter reads instead of values
_KINDS: dict[str, Any] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "number": lambda v: _is_number(v),
    "integer": lambda v: _is_number(v) and (isinstance(v, int) or v.is_integer()),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_BOUNDS: dict[str, tuple[Any, Any]] = {  # keyword: what it is about, and what it says of that and its value
    "minLength": (_KINDS["string"], lambda v, n: len(v) >= n),
    "maxLength": (_KINDS["string"], lambda v, n: len(v) <= n),
    "minItems": (_KINDS["array"], lambda v, n: len(v) >= n),
    "maxItems": (_KINDS["array"], lambda v, n: len(v) <= n),
    "minimum": (_KINDS["number"], lambda v, n: v >= n),
    "maximum": (_KINDS["number"], lambda v, n: v <= n),
    "exclusiveMinimum": (_KINDS["number"], lambda v, n: v > n),
    "exclusiveMaximum": (_KINDS["number"], lambda v, n: v < n),
}


def settled(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without what others of its keywords settle, as far as this file knows."""
    if ("enum" in schema or "const" in schema) and not _ELSEWHERE & schema.keys():
        return _of_values(schema)
    return _with_format(_tuple(schema))


def fitting(schema: dict[str, Any]) -> list[Any]:
    """The values that a schema lists, as far as what stands beside them allows them; see checked()."""
    listed = schema.get("enum", [schema.get("const")])
    if not isinstance(listed, list):
        return []
    if "const" in schema:
        listed = [v for v in listed if _same(v, schema["const"])]
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else list(_KINDS)
    tests = [_KINDS[kind] for kind in kinds if isinstance(kind, str) and kind in _KINDS]
    bounds = [(*_BOUNDS[key], schema[key]) for key in checked(schema)]
    fits = lambda v: any(t(v) for t in tests) and all(not about(v) or ok(v, n) for about, ok, n in bounds)
    return [v for v in listed if fits(v)]


def checked(schema: dict[str, Any]) -> list[str]:
    """The keywords beside listed values that fitting() knows."""
    return [key for key in _BOUNDS if _is_number(schema.get(key))]


def is_of(schema: dict[str, Any], kind: str) -> bool:
    """True if values of a type may follow a schema, by its `type`."""
    given = schema.get("type")
    return kind in given if isinstance(given, list) else given in (None, kind)


def exclusive(choices: list[Any], resolve: Callable[[Any], Any]) -> bool:
    """True if no value can follow two of these schemas, as far as types and listed values tell; in O(size).

    Objects are told apart by a property that all of them require, each with other values: a discriminator.
    resolve: follows references.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    seen = set[int]()
    for one in map(resolve, choices):
        kinds = _kinds_of(one)
        if not kinds or id(one) in seen:  # twice the same one, which would also be read again and again
            return False
        seen.add(id(one))
        for kind in {"number" if kind == "integer" else kind for kind in kinds}:
            groups.setdefault(kind, []).append(one)
    for kind, group in groups.items():
        if len(group) < 2 or _differ(group):
            continue
        if kind == "object":
            described = [_required(one) for one in group]
            shared = set(described[0]).intersection(*described[1:])
            each = ([resolve(one[name]) for one in described] for name in sorted(shared))
            if any(_differ(values) for values in each):
                continue
        return False
    return True


def _kinds_of(schema: Any) -> list[str]:
    """The types of the values that follow a schema; empty if it does not say."""
    if not isinstance(schema, dict) or _ELSEWHERE & schema.keys():
        return []
    given = schema.get("type")
    kinds: list[Any] = given if isinstance(given, list) else [given]
    if given is None and (listed := _listed(schema)) is not None:
        kinds = [next(kind for kind, test in _KINDS.items() if test(value)) for value in listed]
    return kinds if all(isinstance(kind, str) and kind in _KINDS for kind in kinds) else []


def _listed(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict) or _ELSEWHERE & schema.keys():
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _required(schema: dict[str, Any]) -> dict[str, Any]:
    """The properties that an object has in any case."""
    described, names = schema.get("properties"), schema.get("required")
    if not isinstance(described, dict) or not isinstance(names, list):
        return {}
    return {name: described[name] for name in names if isinstance(name, str) and name in described}


def _differ(schemas: list[Any]) -> bool:
    """True if all of them list values, plain ones, and no two the same."""
    seen = set[tuple[bool, Any]]()
    for one in schemas:
        for value in {(isinstance(v, bool), v) if _is_plain(v) else None for v in _listed(one) or [[]]}:
            if value is None or value in seen:
                return False
            seen.add(value)
    return True


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _of_values(schema: dict[str, Any]) -> dict[str, Any]:
    """Values alone, of which each is allowed; the schema itself if there is none."""
    fit = fitting(schema)
    gone = {*checked(schema), "format"}
    if isinstance(schema.get("type"), list):
        gone.add("type")
    if not fit or schema.get("format") in (*KNOWN, *LEFT, *PATTERNS):
        return schema
    out = {k: v for k, v in schema.items() if k not in gone}
    if "const" in out:
        return {k: v for k, v in out.items() if k != "enum"}
    return {**out, "enum": fit}


def _tuple(schema: dict[str, Any]) -> dict[str, Any]:
    """A tuple without what is said of the number of items, and of further ones, if it is kept anyway."""
    name = next((key for key in ("prefixItems", "items") if isinstance(schema.get(key), list)), None)
    if name is None or not is_of(schema, "array") or _ELSEWHERE & schema.keys():
        return schema
    least, most, parts = schema.get("minItems", 0), schema.get("maxItems"), schema[name]
    if type(least) is not int or type(most) not in (int, type(None)):
        return schema
    more = name == "prefixItems" and schema.get("items", False) is not False
    if most is not None and most <= len(parts):
        parts, more = parts[:most], False
    if more and not parts:
        return {k: v for k, v in schema.items() if k != name}
    if more or least > len(parts):
        return schema
    gone = ("minItems", "maxItems", "items", "prefixItems")
    return {**{k: v for k, v in schema.items() if k not in gone}, "prefixItems": parts}


def _with_format(schema: dict[str, Any]) -> dict[str, Any]:
    """A text with the pattern of its format, and without lengths that it has anyway."""
    form = schema.get("format")
    if (
        not isinstance(form, str)
        or not is_of(schema, "string")
        or "pattern" in schema
        or _ELSEWHERE & schema.keys()
    ):
        return schema
    gone = set()
    if form in _LENGTHS:
        least, most = schema.get("minLength", 0), schema.get("maxLength", _LENGTHS[form][1])
        if type(least) is int and least <= _LENGTHS[form][0]:
            gone.add("minLength")
        if type(most) is int and most >= _LENGTHS[form][1]:
            gone.add("maxLength")
    more = {}
    if form in PATTERNS:
        gone.add("format")
        more = {"pattern": f"^{PATTERNS[form]}$"}
    return {**{k: v for k, v in schema.items() if k not in gone}, **more}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    """True if two values are equal in JSON, where true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
