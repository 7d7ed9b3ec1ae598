"""Schemas of answers in terms of grammars: bounds of numbers against decimals, lengths of any size."""

import itertools
import json
import random
import re
from decimal import Decimal

import pytest
from grammar_texts import Walk, texts
from tiers import each

from eagle3_llama.server.grammar.marks import Marks
from eagle3_llama.server.grammar.number_bounds import put_numbers
from eagle3_llama.server.grammar.patterns import Unsupported, written
from eagle3_llama.server.grammar.schema_room import SchemaRoom
from eagle3_llama.server.grammar.schemas import enforceable, unenforced
from eagle3_llama.server.sandbox import chat_library
from eagle3_llama.server.sandbox.child import Grammars

LONGEST = 5


@pytest.fixture(scope="module")
def grammars(files):
    """A checker of grammars whose model has a token for each byte."""
    return Grammars(files[0])


def left(schema):
    """What no grammar enforces of a schema, once it is in our terms."""
    marks = Marks(schema)
    return unenforced(enforceable(schema, SchemaRoom(marks)), marks)


def gbnf(schema):
    marks = Marks(schema)
    made = chat_library.schema(json.dumps(enforceable(schema, SchemaRoom(marks))))
    assert made["incomplete"] == []
    return put_numbers(made["grammar"], marks)


def all_numbers(alphabet, longest):
    """All numbers without an exponent, as JSON writes them, with their values; but for a negative zero."""
    level, found = [""], {}
    for _ in range(longest):
        level = [text + c for text in level for c in alphabet]
        level = [t for t in level if re.fullmatch(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?)?", t)]
        whole = [t for t in level if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", t)]
        found |= {t: Decimal(t) for t in whole if t[0] != "-" or Decimal(t)}
    return found


ALPHABET = "-.0159"
NUMBERS = all_numbers(ALPHABET, LONGEST)
SPECIAL = [
    {"minimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"minimum": -1, "maximum": 1},
    {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"minimum": 0.5},
    {"maximum": -0.05},
    {"exclusiveMaximum": 0},
    {"minimum": 10, "maximum": 10},
    {"minimum": 9.95, "maximum": 10.05},
    {"minimum": -10.5, "maximum": -9.9},
    {"minimum": 0, "exclusiveMinimum": 0, "maximum": 5, "exclusiveMaximum": 5.5},
    {"minimum": 1e-7, "maximum": 1e3},
    {"minimum": 15, "maximum": 1e15},
]


def random_bounds(n):
    rng, out = random.Random(3), []
    values = sorted(float(v) for v in set(NUMBERS.values()) if abs(v) < 200)
    while len(out) < n:
        low, high = sorted(rng.choice(values) for _ in range(2))
        names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        out.append({names[0]: low, names[1]: high} if rng.random() < 0.7 else {rng.choice(names): low})
    return out


def fits(value, bounds):
    of = lambda name, otherwise: Decimal(repr(bounds.get(name, otherwise)))
    return of("minimum", float("-inf")) <= value <= of("maximum", float("inf")) and of(
        "exclusiveMinimum", float("-inf")
    ) < value < of("exclusiveMaximum", float("inf"))


@pytest.mark.parametrize(
    "bounds", each([*SPECIAL, *random_bounds(60)], [*SPECIAL, *random_bounds(2)]), ids=str
)
def test_numbers_between_bounds(grammars, bounds):
    """The grammar allows all of them and no other, as far as texts of five characters tell."""
    expected = {text for text, value in NUMBERS.items() if fits(value, bounds)}
    schema = {"type": "number", **bounds}
    if enforceable(schema) == schema:  # there is no number between them
        assert not expected and left(schema)
        return
    assert texts(grammars, gbnf(schema), ALPHABET, LONGEST) == expected
    assert left(schema) == []


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 10**400},
        {"maximum": 1e300},
        {"minimum": 1e-300},
        {"minimum": 0.12345678901234567},
        {"minimum": True},
        {"maximum": "9"},
        {"minimum": 2, "maximum": 1},
        {"exclusiveMinimum": 1, "maximum": 1},
    ],
    ids=lambda b: str(b)[:40],
)
def test_bounds_that_are_not_written(bounds):
    schema = {"type": "number", **bounds}
    assert enforceable(schema) == schema and left(schema)


def test_zeros(grammars):
    """A negative zero in the schema is zero."""
    for low in (-0.0, 0):
        got = texts(grammars, gbnf({"type": "number", "minimum": low, "maximum": 0.5}), ALPHABET, 3)
        assert got == {text for text, v in NUMBERS.items() if len(text) < 4 and 0 <= v <= Decimal("0.5")}


def test_schemas_that_take_long():
    """So much is written, and the rest is left and told."""
    many = [{"type": "number", "minimum": i} for i in range(9000)]
    assert sum("const" not in one for one in enforceable({"anyOf": many})["anyOf"]) == 8744
    patterns = [{"type": "string", "pattern": "^" + "a" * 998 + "$"}] * 100
    kept = enforceable({"anyOf": patterns})["anyOf"]
    assert kept[0] != patterns[0] and kept[-1] == patterns[-1]


def test_numbers_inside_a_schema(grammars):
    """In each place where a schema may stand; and with null beside them."""
    part = {"type": "number", "minimum": 0, "maximum": 1}
    schema = {
        "type": "object",
        "properties": {
            "a": part,
            "b": {"type": ["number", "null"], "exclusiveMaximum": 0},
            "c": {"$ref": "#/$defs/x"},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "$defs": {"x": {"type": "array", "items": {"anyOf": [part, {"type": "boolean"}]}, "maxItems": 2}},
    }
    text = gbnf(schema)
    assert left(schema) == [] and f"{Marks(schema).word}:" not in text
    for given, fine in (
        ('{"a": 0.5, "b": -3, "c": [1, true]}', True),
        ('{"a": 0, "b": null, "c": []}', True),
        ('{"a": 1.5, "b": -3, "c": []}', False),
        ('{"a": 1, "b": 0, "c": []}', False),
        ('{"a": 1, "b": -1, "c": [2]}', False),
    ):
        walk = Walk(grammars._sampler(text))
        allowed = walk.takes(given, ends=True)
        walk.close()
        assert allowed == fine, given


CHARACTERS = 'ab1_- "\\\n'  # of which strings are made; as JSON writes them, they have an n too
STRINGS = {
    json.dumps("".join(s)): "".join(s)
    for n in range(5)
    for s in itertools.product(CHARACTERS, repeat=n)
    if len(json.dumps("".join(s))) <= 6
}
PATTERNS = [
    r"^a$",
    r"^[ab]+$",
    r"^\d+$",
    r"^\w*$",
    r"^\s$",
    r"^\S+$",
    r"^\D{1,2}$",
    r"^\W$",
    r"^.$",
    r"^.*$",
    r"a",
    r"a|b",
    r"^a",
    r"b$",
    r"^a|b$",
    r"^(a|b)1?$",
    r"^(?:a_)+$",
    r"^[^a]$",
    r"^[^a\s]{2}$",
    r"^[\w-]+$",
    r"^[\w -]$",
    r"^[a-b-]$",
    r'^"$',
    r"^\\$",
    r'^["\\]a*$',
    r"^\n$",
    r"^[\n\d]$",
    r"^\x61\u0062$",
    r"^a{2}$",
    r"^a{0}b$",
    r"^a{1,}?$",
    r"^(?<x>a)b*?$",
    r"\d-\d",
    r"^$",
    r"",
    r"^[\W]$",
    r"^\-\_?$",
    r"^[b1]?a?$",
    r"^(ab|a)(b|1)$",
]
ODD = [
    r"^(?=a)b$",
    r"(a)\1",
    r"\bword",
    r"a^b",
    r"a$b",
    r"^(a|^b)$",
    r"^\p{L}$",
    r"[",
    r"(a",
    r"a)",
    r"[b-a]",
    r"a**",
    r"*a",
    r"a{2",
    r"^a{3000}$",
    r"(a|)",
    r"^[]$",
    r"^[^]$",
    r"a{3,2}",
    r"^\x0$",
    "(" * 50 + "a" + ")" * 50,
    "^\x01$",
]


@pytest.mark.parametrize("longest", each([5, 6], [5]))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(grammars, pattern, longest):
    """The grammar allows the strings that the pattern matches and no other, as far as short ones tell."""
    for_python = re.sub(r"\$(?=$|\|)", r"\\Z", pattern).replace("(?<x>", "(?P<x>")
    strings = {text: s for text, s in STRINGS.items() if len(text) <= longest}
    expected = {text for text, s in strings.items() if re.search(for_python, s, re.ASCII)}
    schema = {"type": "string", "pattern": pattern}
    alphabet = sorted(set(CHARACTERS + "n") - {"\n"})
    got = texts(grammars, gbnf(schema), alphabet, longest)
    assert {t for t in got if not {"n", "\b"} & set(json.loads(t))} == expected  # an escape's letters
    assert all(re.search(for_python, json.loads(t), re.ASCII) for t in got)


@pytest.mark.parametrize("pattern", ODD)
def test_patterns_that_no_grammar_enforces(pattern):
    """They are left as they are, and what the converter does not know of them is told, or refused."""
    schema = {"type": "string", "pattern": pattern}
    assert enforceable(schema) == schema
    with pytest.raises(Unsupported):
        written(pattern)


@pytest.mark.parametrize("least, most", [(0, 2), (1, None), (2, 3), (3, 3)])
def test_lengths_beside_a_pattern(grammars, least, most):
    bounds = {"minLength": least} | ({} if most is None else {"maxLength": most})
    for pattern in (r"^[ab]+$", r"^a{2}$", r"^[ab]*$"):
        schema = {"type": "string", "pattern": pattern, **bounds}
        fits = lambda s, p=pattern: (
            re.fullmatch(p.strip("^$"), s) and least <= len(s) <= (9 if most is None else most)
        )
        expected = {text for text, s in STRINGS.items() if fits(s)}
        if enforceable(schema) == schema:  # no string has the length
            assert not expected and "beside a pattern" in left(schema)[0]
        else:
            assert texts(grammars, gbnf(schema), 'ab"', 6) == expected
    schema = {"type": "string", "pattern": "^a+b$", **bounds}
    assert enforceable(schema) == schema and "beside a pattern" in left(schema)[0]


@pytest.mark.parametrize("n", [1900, 1901, 1999, 2000, 2001, 10**6, 10**12])
def test_lengths_of_any_size(grammars, n):
    for schema in (
        {"type": "string", "maxLength": n},
        {"type": "array", "items": {"type": "string"}, "maxItems": n},
    ):
        assert grammars.convert(json.dumps(enforceable(schema)))["grammar"]


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"$ref": "#/$defs/x", "maxLength": 3}, "maxLength beside $ref"),
        ({"anyOf": [{"type": "null"}], **OBJECT}, "properties beside anyOf"),
        ({"minItems": 2}, "minItems without a type"),
        ({**OBJECT, "required": ["b"]}, "not described"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "allOf"),
        ({"allOf": [OBJECT, OBJECT], "enum": [1]}, "enum beside allOf"),
        ({**OBJECT, "allOf": [OBJECT]}, "allOf beside properties"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": 3}, "two bounds"),
        ({"type": "string", "format": "date", "pattern": "^a$"}, "format beside a pattern"),
        ({"$ref": "#/$defs/x", "description": "one"}, ""),
        ({"type": ["string", "null"], "maxLength": 3}, ""),
        ({"allOf": [OBJECT, {"$ref": "#/$defs/x"}]}, ""),
        ({"type": "object", "anyOf": [OBJECT, {"type": "object"}], "title": "x"}, ""),
        (OBJECT, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_what_the_converter_passes_over(schema, words):
    """It is told inside a schema, too, and nothing is told of what it reads."""
    for whole in (schema, {"type": "array", "items": schema}):
        found = left(whole)
        assert any(words in line for line in found) if words else not found


def test_a_single_part_of_all(grammars):
    """An allOf of one is that one, as pydantic writes a reference with a description."""
    part = {"type": "string", "pattern": "^a?$"}
    inside = {"type": "array", "items": {"allOf": [part]}, "maxItems": 1}
    assert left(inside) == []
    assert texts(grammars, gbnf(inside), '[]"ab', 5) == {"[]", '[""]', '["a"]'}
