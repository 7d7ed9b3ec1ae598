"""What a strict schema is answered with follows it, as a validator of JSON schemas says, or it is refused."""

import json
import random
from urllib.parse import quote

import pytest
from grammar_texts import END, let_through
from tiers import each

from eagle3_llama.runtime.binding import llama_cpp
from eagle3_llama.server.grammar.call_forms import Form
from eagle3_llama.server.grammar.marks import Marks
from eagle3_llama.server.grammar.number_bounds import put_numbers
from eagle3_llama.server.grammar.schema_room import SchemaRoom
from eagle3_llama.server.grammar.schemas import enforceable, unenforced
from eagle3_llama.server.grammar.tool_schemas import Enforced
from eagle3_llama.server.sandbox import chat_library
from eagle3_llama.server.sandbox.child import Grammars

LONGEST = 400  # bytes of an answer; a text without a bound may have no end
BYTES = range(3, 259)  # the tokens of single bytes
# blanks, escapes, exponents, and what may be no character
RARE = {3 + byte for byte in (*b" \n\r\t\\eE", *range(128, 256))}
CLOSING = {3 + byte for byte in b'"]}'}


@pytest.fixture(scope="module")
def grammars(files):
    """A checker of grammars whose model has a token for each byte."""
    return Grammars(files[0])


def strict_grammar(grammars, schema):
    """The grammar of a strict schema; what refuses it in words otherwise: (grammar, words)."""
    marks = Marks(schema)
    terms = enforceable(schema, SchemaRoom(marks))
    if odd := unenforced(terms, marks):
        return None, "; ".join(odd)
    try:
        made = chat_library.schema(json.dumps(terms))
    except chat_library.ChatError as e:
        return None, str(e)
    if made["incomplete"]:
        return None, "; ".join(made["incomplete"])
    grammar = put_numbers(made["grammar"], marks)
    try:
        grammars.read(grammar)
    except ValueError as e:  # a schema that refers to itself alone
        return None, str(e)
    return grammar, ""


def random_answer(grammars, grammar, seed):
    """A random text of a grammar; None for one that does not end."""
    rng, out = random.Random(seed), b""
    sampler = grammars._sampler(grammar)
    try:
        while len(out) < LONGEST:
            allowed = let_through(sampler, [END, *BYTES])
            assert allowed, (grammar, out)
            if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                return out.decode()
            usual = [t for t in allowed if t != END]
            usual = [t for t in usual if t not in RARE] or usual
            closing = [t for t in usual if t in CLOSING]
            token = rng.choice(closing if closing and rng.random() < 0.4 else usual)
            llama_cpp.llama_sampler_accept(sampler, token)
            out += bytes([token - 3])
        return None
    finally:
        llama_cpp.llama_sampler_free(sampler)


def check(grammars, schema, n):
    """True if a schema is answered: n random answers follow it then."""
    import jsonschema_rs

    grammar, words = strict_grammar(grammars, schema)
    if grammar is None:
        assert words
        return False
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(n):
        text = random_answer(grammars, grammar, seed)
        assert text is None or validator.is_valid(json.loads(text)), (schema, text)
    return True


ABC = {"type": "string", "enum": ["a", "bb", "ccc"]}
ONE_TWO = [{"const": 1}, {"type": "string", "maxLength": 2}]


def kind(name):
    """An object of a union that a property tells apart, as pydantic writes one."""
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


ANSWERED = [
    {"type": "array", "prefixItems": ONE_TWO, "items": False},
    {"type": "array", "prefixItems": ONE_TWO, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": ONE_TWO, "items": {"type": "null"}, "maxItems": 1},
    {"prefixItems": ONE_TWO, "maxItems": 1, "minItems": 1},
    {**ABC, "maxLength": 2, "minLength": 2},
    {"type": "integer", "enum": [1, 2, "2", True, 2.0, 5.5, 7], "minimum": 2},
    {"type": "integer", "enum": [1, 2, 3], "exclusiveMaximum": 3, "const": 2},
    {"type": ["string", "null"], "enum": ["a", None, 5]},
    {"type": "array", "enum": [[], [1], [1, 2]], "minItems": 1},
    {"type": "string", "format": "date", "minLength": 10, "maxLength": 10},
    {"type": "string", "format": "date-time", "minLength": 20},
    {"type": "string", "format": "uuid", "maxLength": 100},
    {"type": ["string", "null"], "format": "ipv4", "maxLength": 15},
    *({"type": "string", "format": name} for name in "email hostname ipv4 ipv6 duration uri".split()),
    {"type": "string", "pattern": "^(a|[bc])+$", "maxLength": 2},
    {"type": "integer", "format": "int32"},
    {"type": "string", "format": "a-format-of-their-own"},
    {"oneOf": [{"type": "integer"}, ABC, {"type": "null"}]},
    {"oneOf": [{"const": "a"}, {"enum": ["b", 1]}, {"enum": [True, 2]}]},
    {"oneOf": [kind("cat"), kind("dog"), {"type": "string"}]},
]
REFUSED = [
    ({"type": "array", "prefixItems": ONE_TWO, "items": {"const": 2}}, "items beside prefixItems"),
    ({"type": "array", "prefixItems": ONE_TWO, "minItems": 3}, "minItems beside prefixItems"),
    ({**ABC, "pattern": "^b+$"}, "pattern beside enum"),
    ({"const": "abc", "pattern": "^b+$"}, "pattern beside const"),
    ({"type": "integer", "enum": ["1", "2"]}, "enum of values that the rest"),
    ({"type": "string", "const": 5}, "const of values that the rest"),
    ({**ABC, "maxLength": 0}, "enum of values that the rest"),
    ({"type": "string", "enum": ["a@b.c", "x"], "format": "email"}, "format beside enum"),
    ({"enum": [{"a": 1}], "required": ["b"]}, "required beside enum"),
    ({"type": "string", "format": "date", "maxLength": 4}, "maxLength beside a pattern"),
    ({"type": "string", "format": "time", "maxLength": 4}, "maxLength beside format"),
    ({"type": "string", "pattern": "^(ab)+$", "maxLength": 3}, "maxLength beside a pattern"),
    ({"type": "string", "format": "email", "maxLength": 20}, "maxLength beside a pattern"),
    ({"type": "string", "format": "email", "pattern": "x"}, "format beside a pattern"),
    ({"type": "string", "format": "regex"}, "the format regex"),
    ({"type": "object", "required": ["a"]}, "not described"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf of"),
    ({"oneOf": [ABC, {"const": "a"}]}, "oneOf of"),
    ({"oneOf": [kind("cat"), kind("cat")]}, "oneOf of"),
    ({"oneOf": [kind("cat"), {"type": "object", "properties": {"kind": {"const": "dog"}}}]}, "oneOf of"),
]


@pytest.mark.parametrize("schema", ANSWERED, ids=str)
def test_what_is_enforced(grammars, schema):
    for whole in (schema, {"type": "object", "properties": {"x": schema}, "required": ["x"]}):
        assert check(grammars, whole, 20)
    for form in (Form(), Form("</"), Form("]<", nested=True)):
        strict = Enforced([{"name": "find", "parameters": whole}], form)
        assert strict.unmet(frozenset(["find"]), []) == []


@pytest.mark.parametrize("schema, words", REFUSED, ids=str)
def test_what_is_refused(grammars, schema, words):
    for whole in (schema, {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}):
        grammar, said = strict_grammar(grammars, whole)
        assert grammar is None and words in said
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    for form in (Form(), Form("</"), Form("]<", nested=True)):  # and of the arguments of calls
        strict = Enforced([{"name": "find", "parameters": parameters}], form)
        assert strict.unmet(frozenset(["find"]), [])


VALUES = [
    "",
    "a",
    "ab",
    "a-b",
    "2024-02-29",
    0,
    1,
    2,
    2.0,
    2.5,
    -1,
    True,
    False,
    None,
    [],
    [1, "a"],
    {},
    {"a": 1},
]
FORMATS = "date time date-time uuid email ipv4 ipv6 hostname duration uri regex iri".split()
NAMES = ["a", "b", "a-b", "a_b", "ö", "ü", "x[1]", "x<1>"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]


def schemas(st):
    """Schemas of any keywords together, whose bounds leave something. st: hypothesis.strategies."""
    values, kinds = st.sampled_from(VALUES), st.sampled_from(TYPES)
    plain = {
        "type": kinds | st.lists(kinds, min_size=1, max_size=3, unique=True),
        "enum": st.lists(values, min_size=1, max_size=5, unique_by=repr),
        "const": values,
        "pattern": st.sampled_from(["^a+$", "^[ab-]*$", r"^\d{2}$", "b", "^a|b$", "^(ab|c)+$", "(?=a)"]),
        "format": st.sampled_from(FORMATS),
        "minLength": st.integers(0, 2),
        "maxLength": st.sampled_from([2, 3, 10, 40]),
        "minimum": st.sampled_from([-2, 0, 1, 0.5]),
        "maximum": st.sampled_from([2, 3, 10, 2.5]),
        "exclusiveMinimum": st.sampled_from([-3, 0]),
        "exclusiveMaximum": st.sampled_from([3, 100.5]),
        "multipleOf": st.just(2),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(2, 3),
        "required": st.lists(st.sampled_from(NAMES[:4]), max_size=2, unique=True),
        "additionalProperties": st.just(False),
        "description": st.just("Some."),
    }

    references = st.sampled_from([f"#/$defs/{quote(name)}" for name in NAMES[:6]])

    def some(inner):
        nested = {
            "items": inner | st.just(False),
            "prefixItems": st.lists(inner, min_size=1, max_size=3),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "$ref": references,
        }
        # mostly those that belong together, and sometimes any
        of = {
            "string": ["pattern", "format", "minLength", "maxLength", "enum", "const"],
            "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum"],
            "number": ["minimum", "maximum", "exclusiveMaximum", "const"],
            "array": ["items", "prefixItems", "minItems", "maxItems", "enum"],
            "object": ["properties", "required", "additionalProperties"],
        }
        every = {**plain, **nested}
        keys = lambda names: st.sets(st.sampled_from(sorted(names)), max_size=3)
        picked = lambda names: keys(names).flatmap(
            lambda ks: st.fixed_dictionaries({k: every[k] for k in sorted(ks)})
        )
        typed = [picked(names).map(lambda d, t=t: {**d, "type": t}) for t, names in of.items()]
        return st.one_of(*typed, picked(every), references.map(lambda to: {"$ref": to}))

    deep = st.recursive(
        some(st.sampled_from([{"type": "string"}, {"type": "integer"}, {}])), some, max_leaves=6
    )
    defs = st.fixed_dictionaries({name: deep for name in NAMES[:6]})
    return st.tuples(deep, defs).map(lambda both: {**both[0], "$defs": both[1]})


@pytest.mark.parametrize("n", each([60, 2000], [60]))
def test_random_schemas(grammars, n):
    """Those that are answered at all: some of them, and never wrongly."""
    import hypothesis

    answered = []

    @hypothesis.settings(
        max_examples=n, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(schemas(hypothesis.strategies))
    def run(schema):
        answered.append(check(grammars, schema, 5))

    run()
    assert sum(answered) > n // 10, "hardly any was answered"
