"""The schemas of tools in terms that the grammar of a template's calls enforces: see call_forms.py."""

from __future__ import annotations

import json
import re
from typing import Any

from .call_forms import Form
from .ignored import ignored
from .marks import Marks
from .number_bounds import with_numbers
from .patterns import Unsupported, between_tags, counted_between_tags
from .plain_schemas import plain
from .schema_room import SchemaRoom
from .schemas import KEPT, NUMBER, by_kind, terms, unenforced
from .settled import TIME

MOST_COUNTED = 256  # characters of a text between tags; a higher bound is left to the model
MOST_LEVELS = 4096  # characters that all rules of such texts count together
MOST_INLINED = 1 << 18  # characters of the schemas that take the place of references
DEEPEST = 32  # of schemas between tags, which may refer to themselves
_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_FORMATS = {"time": TIME, "uuid": _UUID}  # other formats are patterns by now
_FORMATS |= {f"uuid{i}": _UUID for i in range(1, 6)}
_STRINGS = frozenset("pattern minLength maxLength format".split())
_STRUCTURE = frozenset("properties additionalProperties allOf items prefixItems".split())
_MARK = re.compile(r'"(\d{18})"')  # a number that may stand for a rule: see marks.py
_TYPED = re.compile(r'( string=\\")false(\\">"\)? ([\w-]+) )')  # DeepSeek's tags say whether a text follows


class Enforced:
    """Functions as the grammar is to know them. functions: their names and parameters.

    unenforced: in words, what no grammar enforces, by the names of functions. nulls: by them, the arguments
    between tags that may be text or null: see nulls.py. marks: the request's, by default those of functions
    by themselves.
    """

    def __init__(self, functions: list[dict[str, Any]], form: Form, marks: Marks | None = None) -> None:
        self.unenforced: dict[str, dict[str, None]] = {f["name"]: {} for f in functions}
        self.nulls: dict[str, set[str]] = {}
        self.form, self._rules, self._counted = form, dict[tuple[str, str, str], int](), set[str]()
        self.marks = marks or Marks(functions)
        self.room, self.inlined, self.levels = SchemaRoom(self.marks, "tools"), MOST_INLINED, MOST_LEVELS
        self.functions = [{**f, "parameters": self._parameters(f)} for f in functions]

    def put(self, grammar: str) -> str:
        """The grammar with the rules of texts between tags in the place of their numbers."""
        if not self._rules:
            return grammar
        there, rules, texts = set(_MARK.findall(grammar)), dict[str, str](), set[str]()
        for (name, kind, rule), number in self._rules.items():
            if str(number) not in there:
                self.unenforced[name]["one argument that is text or something else"] = None
            own = self._rule_of(str(number))
            texts |= {str(number)} if kind != "number" else set()
            rules[own] = rule
            if kind == "counted":
                least, most = json.loads(rule)
                chain = counted_between_tags(least, most, self.form.close, f"tagged-{self.marks.word}")
                rules |= {**chain, own: next(iter(chain))}
        ours = {str(number) for number in self._rules.values()}
        put = lambda found: self._rule_of(found[1]) if found[1] in ours else found[0]
        lines = [_MARK.sub(put, line) for line in _with_types(grammar.splitlines(), texts)]
        return "\n".join([*lines, *(f"{name} ::= {rule}" for name, rule in rules.items()), ""])

    def _rule_of(self, number: str) -> str:
        return f"tagged-{self.marks.word}-{int(number) - self.marks.number}"

    def unmet(self, names: frozenset[str], lines: list[str]) -> list[str]:
        """What no grammar enforces of these functions. lines: what the library says of its grammars."""
        out: dict[str, None] = {}
        for f in self.functions:
            if f["name"] in names:
                patterns = _patterns_in(json.dumps(f["parameters"]))
                out |= self.unenforced[f["name"]] | {
                    line: None for line in lines if _is_about(line, patterns)
                }
        return list(out)

    def mark(self, function: str, kind: str, rule: str) -> int:
        """The number that stands for this rule. kind: text, counted or number."""
        if kind == "counted" and rule not in self._counted:
            self.levels -= sum(filter(None, json.loads(rule)))
            if self.levels < 0:
                raise Unsupported("its length, beside so many others")
            self._counted.add(rule)
        return self._rules.setdefault((function, kind, rule), self.marks.number + len(self._rules))

    def _parameters(self, function: dict[str, Any]) -> Any:
        given, form, name = plain(function["parameters"], self.room), self.form, function["name"]
        own = self.unenforced[name]
        tagged = form.close and form.values
        if tagged:
            tags = _Tags(self, name, given)
            self.nulls[name] = {k for k, v in _properties(given).items() if tags.is_nullable(v)}
            given = tags.object(given, 0)
        schema = terms(given, self.room)
        own |= dict.fromkeys(unenforced(schema, self.marks))
        if not form.values and schema.get("properties"):
            own["the schema of arguments, in this model's form of calls"] = None
        elif not form.required and schema.get("required"):
            own["required, in this model's form of calls"] = None
        elif not form.items and re.search(r'"(min|max)Items":', json.dumps(schema)):
            own["the number of items, in this model's form of calls"] = None
        elif tagged and not isinstance(schema.get("properties", {}), dict):
            own["arguments without properties, in this model's form of calls"] = None
        return schema


class _Tags:
    """Rewrites the schemas of one function's arguments, which stand between tags."""

    def __init__(self, owner: Enforced, function: str, root: dict[str, Any]) -> None:
        self.owner, self.function, self.root, self.form = owner, function, root, owner.form
        self._sizes: dict[str, int] = {}

    def is_nullable(self, schema: Any) -> bool:
        """True if an argument may be text or null, and the text is none that says null."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            schema = _resolved(self.root, schema["$ref"])
        if not isinstance(schema, dict):
            return False
        ways = _alternatives(schema) or [{"const": value} for value in _values(schema)]
        ways = [one for one in ways if isinstance(one, dict)]
        values = [value for one in ways for value in _values(one)]
        null = any(one.get("type") == "null" or ("const" in one and one["const"] is None) for one in ways)
        return null and any(map(_is_text, ways)) and "null" not in values

    def object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = _properties(schema)
        if not properties:
            return schema
        return {**schema, "properties": {k: self.value(v, depth + 1) for k, v in properties.items()}}

    def value(self, schema: Any, depth: int) -> Any:
        """A schema whose texts, and numbers with bounds, are numbers that stand for rules."""
        if not isinstance(schema, dict):
            return schema
        self.owner.room.take_node()
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema, depth)
        alternatives = _alternatives(schema)
        if alternatives is not None:
            self.owner.unenforced[self.function] |= dict.fromkeys(ignored(schema))
            made = [self.value(one, depth + 1) for one in alternatives]
            same = all(new is old for new, old in zip(made, alternatives, strict=True))
            shown = {key: schema[key] for key in KEPT if key in schema}
            return schema if same else {**shown, "anyOf": made}
        if _is_text(schema):
            return self._text(schema)
        if schema.get("type") == "number" and (number := self._number(schema)) is not schema:
            rule = json.dumps(json.dumps(number["const"]))
            return {**number, "const": self.owner.mark(self.function, "number", rule)}
        if self.form.nested and schema.get("type") == "object":
            return self.object(schema, depth)
        if self.form.nested and isinstance(schema.get("items"), dict):
            return {**schema, "items": self.value(schema["items"], depth + 1)}
        return schema

    def _referred(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """What a reference leads to, if it has texts; as long as there is room for that."""
        target = _resolved(self.root, schema["$ref"])
        if not isinstance(target, dict):
            return schema
        self.owner.inlined -= self._size(schema["$ref"], target)
        if depth > DEEPEST or self.owner.inlined < 0:
            self.owner.unenforced[self.function]["so many references, in this model's form of calls"] = None
            return schema
        inner = self.value(target, depth + 1)
        return schema if inner is target else inner

    def _size(self, reference: str, target: Any) -> int:
        if reference not in self._sizes:
            self._sizes[reference] = len(json.dumps(target))
        return self._sizes[reference]

    def _number(self, schema: dict[str, Any]) -> dict[str, Any]:
        self.owner.room.characters -= NUMBER
        return with_numbers(schema, self.owner.marks) if self.owner.room.characters >= 0 else schema

    def _text(self, schema: dict[str, Any]) -> dict[str, Any]:
        pattern = schema.get("pattern")
        self.owner.unenforced[self.function] |= dict.fromkeys(ignored(schema))
        self.owner.room.characters -= len(pattern) if isinstance(pattern, str) else 0
        try:
            if self.owner.room.characters < 0:
                raise Unsupported("so many others")
            found = _rule(schema, self.form.close)
            mark = None if found is None else self.owner.mark(self.function, *found)
        except Unsupported as e:
            what = "a pattern" if "pattern" in schema else "a text"
            self.owner.unenforced[self.function][f"{what} with {e}, in this model's form of calls"] = None
            return schema
        if mark is None:
            return schema
        kept = {k: v for k, v in schema.items() if k not in ("enum", *_STRINGS)}
        return {**kept, "const": mark}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _values(schema: dict[str, Any]) -> list[Any]:
    """What a schema names as its only values; [] if it names none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else []


def _with_types(lines: list[str], texts: set[str]) -> list[str]:
    """The lines of a grammar whose tags say whether a text follows. texts: numbers that stand for one."""
    if not any(map(_TYPED.search, lines)):
        return lines
    bound = (line.partition(" ")[0].split("-") for line in lines if texts & set(_MARK.findall(line)))
    rules = {"-".join(words[:i]) for words in bound for i in range(1, len(words) + 1)}  # and what they are of

    def typed(found: re.Match[str]) -> str:
        return f"{found[1]}{'true' if found[3] in rules else 'false'}{found[2]}"

    return [_TYPED.sub(typed, line) for line in lines]


def _resolved(root: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        root = root.get(part) if isinstance(root, dict) else None
    return root


def _patterns_in(text: str) -> set[str]:
    """The patterns of a schema."""
    return set(map(json.loads, re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', text)))


def _is_about(line: str, patterns: set[str]) -> bool:
    """True if a line of the library, which may be cut, is about one of these patterns."""
    return len(line) > 900 or any(pattern in line for pattern in patterns)


def _alternatives(schema: dict[str, Any]) -> list[Any] | None:
    for key in ("oneOf", "anyOf"):
        if isinstance(schema.get(key), list):
            return schema[key]
    return by_kind(schema)


def _is_text(schema: dict[str, Any]) -> bool:
    """True if values of this schema, which has no alternatives, may be strings: as the converter sees it."""
    if "const" in schema:
        return isinstance(schema["const"], str)
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    if "type" in schema:
        return schema["type"] == "string" and "allOf" not in schema
    return bool(_STRINGS & schema.keys()) and not _STRUCTURE & schema.keys()


def _rule(schema: dict[str, Any], close: str) -> tuple[str, str] | None:
    """(kind, GBNF) of the texts of a schema, as they stand between tags; None if it allows any text."""
    if values := _values(schema):
        return "text", " | ".join(_literal(value, close) for value in values)
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if type(least) is not int or type(most) not in (int, type(None)):
        return None  # the converter refuses it
    if isinstance(schema.get("pattern"), str):
        return "text", between_tags(schema["pattern"], close, least, most)
    form = schema.get("format")
    if isinstance(form, str) and form in _FORMATS:
        return "text", between_tags(f"^({_FORMATS[form]})$", close)
    if least > MOST_COUNTED or (most is not None and most < least):
        raise Unsupported("its length")
    most = None if most is None or most > MOST_COUNTED else most
    return ("counted", json.dumps([least, most])) if least or most is not None else None


def _literal(value: Any, close: str) -> str:
    """A value between tags: a text as it is, something else as JSON writes it."""
    text = value if isinstance(value, str) else json.dumps(value)
    if close in text:
        raise Unsupported(f"{close!r} in it")
    return '"' + "".join(f"\\u{ord(c):04x}" if c in '"\\' or c < " " else c for c in text) + '"'
