"""Schemas of tools' arguments: in each template's form of calls, the grammar allows what they do, no more."""

import itertools
import json
import re
from decimal import Decimal

import pytest
import templates
from bound_arguments import WHOLE, follows
from client_tools import tool
from grammar_texts import Walk, texts
from grammar_walks import Characters, begun
from tiers import each

from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.grammar.call_forms import Form, form_of, probe
from eagle3_llama.server.grammar.number_bounds import put_numbers
from eagle3_llama.server.grammar.schema_room import MOST_NODES
from eagle3_llama.server.grammar.schemas import enforceable
from eagle3_llama.server.grammar.tool_schemas import MOST_INLINED, Enforced
from eagle3_llama.server.prompt import tools_as_text
from eagle3_llama.server.sandbox.chat_library import ChatError, ChatTemplate, parse
from eagle3_llama.server.sandbox.child import MAX_GBNF, Grammars

ASKED = [{"role": "user", "content": "Go."}]
VALUE, NUMBER = "e3value", 4711  # constants whose places in a call are those of other values
CODE = 'ab1</\n"\\ '
AB = {"type": "string", "enum": ["a", "b"]}
STRINGS = {  # schema: what Python says of a string
    "pattern": ({"type": "string", "pattern": r"^a\d*b?$"}, lambda s: re.fullmatch(r"a[0-9]*b?", s)),
    "anywhere": ({"type": "string", "pattern": r"b\s1"}, lambda s: re.search(r"b\s1", s)),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, lambda s: 2 <= len(s) <= 3),
    "short": ({"type": "string", "maxLength": 1}, lambda s: len(s) <= 1),
    "enum": ({"type": "string", "enum": ["a1", '"b', "1"]}, lambda s: s in ("a1", '"b', "1")),
    "const": ({"type": "string", "const": "b1"}, lambda s: s == "b1"),
    "either": ({"type": "string", "anyOf": [AB, {"type": "string", "pattern": r"^\d1$"}]},
               lambda s: s in ("a", "b", "11")),
    "reference": ({"type": "string", "$ref": "#/$defs/x"}, lambda s: s in ("ab", "b")),
}  # fmt: skip
SHORT = ["".join(s) for n in range(4) for s in itertools.product(CODE, repeat=n)]
DEFS = {"x": {"type": "string", "enum": ["ab", "b"]}}
NUMBERS = {
    "number": ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}, lambda v: Decimal("0.5") <= v < 1),
    "below": ({"type": "number", "maximum": -1.5}, lambda v: v <= Decimal("-1.5")),
    "integer": ({"type": "integer", "minimum": 5, "maximum": 15}, lambda v: 5 <= v <= 15 and v == int(v)),
}


@pytest.fixture(scope="module")
def grammars(files):
    """A checker of grammars whose model has a token for each byte."""
    return Grammars(files[0])


class Kind:
    """A template and the form of its calls."""

    def __init__(self, name):
        self.template = ChatTemplate(templates.text(name), "<s>", "</s>")
        asked = {"messages": ASKED, "tools": [probe()], "tool_choice": "required", "enable_thinking": False}
        try:
            made = self.template.apply(asked)
        except ChatError:
            made = {"forced": ""}
        self.form = form_of(made["forced"]) if made["forced"] else None

    def enforced(self, schema, inner=False):
        """Two tools with one argument, `code`, or one in an object. Returns (tools, Enforced)."""
        parameters = {"type": "object", "properties": {"code": schema}, "required": ["code"]}
        if inner:
            parameters = {"type": "object", "properties": {"o": parameters}, "required": ["o"]}
        if "$ref" in schema:
            parameters["$defs"] = DEFS
        tools = [tool(name, parameters) for name in ("find", "look")]
        return tools, Enforced([t["function"] for t in tools], self.form)

    def raw(self, inner):
        """True if a text stands between tags."""
        return bool(self.form.close) and (not inner or self.form.nested)

    def shown(self, value, inner=False):
        """A value as a call has it."""
        return value if isinstance(value, str) and self.raw(inner) else json.dumps(value)

    def read(self, text, inner=False):
        return text if self.raw(inner) else json.loads(text)

    def is_plain(self, text, inner):
        """True if it has no escapes of other letters, and no blanks around it."""
        return self.raw(inner) or (text == text.strip() and not {"n", "\b"} & set(json.loads(text)))

    def writes(self, text, inner, schema):
        """True if a text that follows the schema may be written between these tags: see between_tags()."""
        close = self.form.close
        if not self.raw(inner):
            return True
        return close not in text if "maxLength" in schema else close[0] not in text or "pattern" not in schema

    def grammar(self, schema, inner=False, choice="required", **more):
        tools, enforced = self.enforced(schema, inner)
        asked = {"messages": ASKED, "tools": tools, "tool_choice": choice, "enable_thinking": False, **more}
        asked["enforced"] = [{"type": "function", "function": f} for f in enforced.functions]
        if "called" in more:
            asked["enforced"] = [t for t in asked["enforced"] if t["function"]["name"] in more["called"]]
        made = self.template.apply(asked)
        text = put_numbers(enforced.put(made["forced"] or made["grammar"]), enforced.marks)
        unmet = enforced.unmet(frozenset(["find"]), made["incomplete"])
        assert unmet == [] or not self.form.required, unmet
        assert f"{enforced.marks.word}:" not in text and str(enforced.marks.number)[:12] not in text
        return text, made


@pytest.fixture(scope="module")
def kind_of():
    made = {}
    return lambda name: made.get(name) or made.setdefault(name, Kind(name))


# whose grammars let any text stand within a call, or nothing: a call as they write it
WRITTEN = {
    "openbmb-MiniCPM5-1B": '<function name="find"><param name="code">e3value</param></function>',
    "Mistral-Small-3.2-24B-Instruct-2506": '[TOOL_CALLS]find[ARGS][ARGS]{"code": "e3value"}',
    "muse-glimmer": ' to=find<|message|><atem:function_calls><atem:invoke name="find">'
    '<atem:parameter name="code">e3value</atem:parameter></atem:invoke></atem:function_calls>',
}


@pytest.fixture(scope="module")
def characters():
    return Characters()


def around(characters, kind, value, inner=False, written=""):
    """What stands before and behind a value in a call of `find`."""
    schema = {"type": "string" if isinstance(value, str) else "integer", "const": value}
    grammar, made = kind.grammar(schema, inner, called=["find"])
    shown = kind.shown(value, inner)
    text = characters.walk(grammar, begun(made, False), 0, written)
    at = text.index(shown, text.index("code"))  # the call's id may be the same
    return text[:at], text[at + len(shown) :]


NAMES = [n for n in templates.names() if n != "CohereForAI-c4ai-command-r-plus-tool_use"]
# One for each form of calls, on which alone depends what is written where: the others are thorough.
FORMS = ["Qwen-Qwen3-0.6B", "GLM-4.6", "Qwen3-Coder", "MiniMax-M3", "openbmb-MiniCPM5-1B", "Kimi-K3"]


@pytest.mark.thorough
def test_each_form_has_a_template_of_the_quick_ones(kind_of):
    assert {kind_of(name).form for name in FORMS} == {kind_of(name).form for name in NAMES} - {None}


# inside an object texts stand between tags with one form alone, and are JSON with the others
OWN = [*((name, False) for name in FORMS if name != "MiniMax-M3"), ("GLM-4.6", True), ("MiniMax-M3", True)]
# the others in one of the two places, in turn: their grammars are made by the same code
PLACES = sorted({*OWN, *((name, i % 2 == 1) for i, name in enumerate(NAMES))})


@pytest.mark.parametrize("name, inner", each(PLACES, OWN))
def test_texts(grammars, characters, kind_of, name, inner):
    """Exactly those that Python finds to follow the schema, as JSON or as they are between tags."""
    kind = kind_of(name)
    if kind.form is None or not kind.form.values or (inner and name in WRITTEN):
        return  # see test_forms
    before, close = around(characters, kind, VALUE, inner, WRITTEN.get(name, ""))
    alphabet, longest = (set(CODE), 3) if kind.raw(inner) else (set(CODE + "n") - {"\n"}, 5)
    for about, (schema, fits) in STRINGS.items():
        grammar, _ = kind.grammar(schema, inner, called=["find"])
        got = texts(grammars, grammar, sorted(alphabet), longest, before, close)
        expected = {kind.shown(s, inner) for s in SHORT if fits(s) and kind.writes(s, inner, schema)}
        assert {t for t in got if kind.is_plain(t, inner)} == {t for t in expected if len(t) <= longest}, (
            about
        )
        assert all(fits(kind.read(t, inner)) for t in got), about


@pytest.mark.parametrize("name", each(NAMES, FORMS))
def test_numbers(grammars, characters, kind_of, name):
    kind = kind_of(name)
    if kind.form is None or not kind.form.values:
        return  # see test_forms
    written = WRITTEN.get(name, "").replace('"e3value"', "4711").replace("e3value", "4711")
    before, close = around(characters, kind, NUMBER, False, written)
    alphabet, longest = "-.015", 4
    level = ["".join(s) for n in range(1, longest + 1) for s in itertools.product(alphabet, repeat=n)]
    numbers = {t: Decimal(t) for t in level if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", t)}
    for about, (schema, fits) in NUMBERS.items():
        grammar, _ = kind.grammar(schema, called=["find"])
        got = texts(grammars, grammar, alphabet, longest, before, close)
        expected = {t for t, v in numbers.items() if fits(v) and (v or t[0] != "-")}
        assert got == {t for t in expected if about != "integer" or "." not in t}, about


# whose calls begin, or whose thoughts stand, in a way of their own
OWN_WAYS = ["meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b", "ByteDance-Seed-OSS"]


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", each(NAMES, [*FORMS, *OWN_WAYS]))
def test_calls(characters, kind_of, name, choice):
    """What the grammar lets a model write is a call whose arguments, as they are read, follow the schema."""
    kind = kind_of(name)
    if kind.form is None or not kind.form.required or name in WRITTEN:
        return  # see test_forms
    tools = [tool("find", WHOLE)]
    enforced = Enforced([tools[0]["function"]], kind.form)
    other = [{"type": "function", "function": enforced.functions[0]}]
    for seed, thinking in enumerate((False, True, False)):
        asked = {"messages": ASKED, "tools": tools, "enforced": other, "enable_thinking": thinking}
        try:
            made = kind.template.apply({**asked, "tool_choice": choice})
        except ChatError:
            assert name == "ByteDance-Seed-OSS"  # it knows no alternatives
            return
        grammar = put_numbers(enforced.put(made["forced"] or made["grammar"]), enforced.marks)
        assert enforced.unmet(frozenset(["find"]), made["incomplete"]) == []
        first = begun(made, thinking)
        if made["forced"]:
            text = characters.walk(grammar, first, seed)
        else:
            assert made["lazy"]
            words = [t["word"] for t in made["triggers"] if "word" in t]  # it may end at once before them
            text = first + characters.walk(grammar, words[0] if words else "", seed)
        [call] = parse(made, text, partial=False)["tool_calls"]
        assert call["name"] == "find" and follows(json.loads(call["arguments"])), text


def check_trigger(grammars, grammar, pattern, text):
    """The pattern finds a call in the text, and the grammar reads it from its beginning."""
    assert re.search(pattern, text)[1] == text.strip(), text
    walk = Walk(grammars._sampler(grammar))
    assert walk.takes(text.strip()), text
    walk.close()


BEGUN = ('{"name":"find",', ' \n{ "name" : "find",', '{\n\n  "name":\n\t"find",', '{"name": "a.b(c|",')
DATA = (
    'So {"name": "find",', '{"names": "find",', '{"type": "x", "name": "find",', '{"a": {"name": "find",',
    '{"name": "Alice", "age": 3}', '{"name": "find"}', '{"name": "finder",', '{"name": "Find",', "[1]",
    '{"name": "axb(c|",', '{"name":  "find",',
)  # fmt: skip


def test_calls_without_a_sign(kind_of, grammars):
    """Llama 3 begins a call with its JSON: alone in the answer, with a tool's name, and more behind it."""
    kind = kind_of("meta-llama-Llama-3.1-8B-Instruct")
    tools = [tool("find", WHOLE), tool("a.b(c|", WHOLE)]
    made = kind.template.apply({"messages": ASKED, "tools": tools})
    [trigger] = made["triggers"]
    typed = ('{ "type": "function", "name" : "find",', '{"type":"function","name": "find"\n\t,')
    for text in (*BEGUN, *typed):
        check_trigger(grammars, made["grammar"], trigger["pattern"], text)
    for text in DATA:
        assert re.search(trigger["pattern"], text) is None, text
    few = kind.template.apply({"messages": ASKED, "tools": tools, "called": ["find"]})
    assert re.search(few["triggers"][0]["pattern"], BEGUN[-1]) is None
    assert made["lazy"] and "find" in made["grammar"]
    none = kind.template.apply({"messages": ASKED, "tools": [tool("find", WHOLE)], "tool_choice": "none"})
    assert not none["lazy"] and not none["grammar"]


def test_own_calls(grammars):
    """The same of the form for templates that know no tools; JSON with another name stays content."""
    functions = [tool(name, WHOLE)["function"] for name in ("find", "a.b(c|")]
    grammar, pattern = (
        grammars.convert(json.dumps(tools_as_text.schema(functions)))["grammar"],
        tools_as_text.trigger(functions),
    )
    for text in BEGUN:
        check_trigger(grammars, grammar, pattern, text)
    for text in DATA:
        assert re.search(pattern, text) is None, text
    for name, n in (("find", 1), ("Alice", 0)):
        content = json.dumps({"name": name, "arguments": {}})
        for partial in (True, False):
            message = tools_as_text.split({"content": content}, partial, ["find", "a.b(c|"])
            assert len(message.get("tool_calls", ())) == n and message["content"] == ("" if n else content)


LOOSE = {"Kimi-K3", "LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "google-gemma-4-31B-it"}
LOOSE.add("google-gemma-4-31B-it-interleaved")
ANY_ORDER = {"muse-glimmer", "openbmb-MiniCPM5-1B"}


@pytest.mark.parametrize("name", each(NAMES, FORMS))
def test_forms(kind_of, name):
    """What a form of calls leaves to the model is told, in words."""
    kind = kind_of(name)
    if kind.form is None:
        return
    assert kind.form.values == (name not in LOOSE)
    assert kind.form.required == (name not in LOOSE | ANY_ORDER)
    assert kind.form.items == (name not in LOOSE | ANY_ORDER | {"MiniMax-M3"})
    items = {
        "type": "object",
        "properties": {"l": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
    }
    needs = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    odd = {
        about: Enforced([tool("find", schema)["function"]], kind.form).unmet(frozenset(["find"]), [])
        for about, schema in (("values", items), ("required", needs), ("items", items))
    }
    for about, words in (("values", "schema"), ("required", "required"), ("items", "number of items")):
        if not getattr(kind.form, about) and (about == "values" or kind.form.values):
            assert any(words in line for line in odd[about]), odd
    if kind.form == Form(kind.form.close, kind.form.nested):
        assert not any(odd.values())


CHAIN = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
CHAIN["d30"] = {"type": "string", "enum": ["x"]}
OWN_TAIL = {
    "d0": {"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}, {"type": "string", "enum": ["x"]}]}
}
LARGE = {"d0": {"type": "string", "maxLength": 5, "description": "x" * 100_000}}
TEXT = {"type": "string"}
KINDS = ["object", "array", "string", "number", "integer", "boolean", "null"]


def nested(kinds, depth):
    """A schema whose `type` is a list, with itself inside; at last a text."""
    inner = {"type": "string", "pattern": r"(?=x)y"}  # no grammar enforces it
    for _ in range(depth):
        inner = {"type": kinds, "properties": {"a": inner}, "required": ["a"], "minimum": 0.5}
    return inner


@pytest.mark.parametrize(
    "properties, defs",
    [
        ({"a": {"$ref": "#/$defs/d0"}}, CHAIN),
        ({"a": {"$ref": "#/$defs/d0"}}, OWN_TAIL),
        ({f"a{i}": {"$ref": "#/$defs/d0"} for i in range(1000)}, LARGE),
        ({f"a{i}": {**TEXT, "pattern": "^" + r"\w" * 500 + "$"} for i in range(300)}, {}),
        ({f"a{i}": {**TEXT, "minLength": i % 256, "maxLength": 256} for i in range(2000)}, {}),
        ({f"a{i}": {"type": "number", "minimum": i + 0.5} for i in range(3000)}, {}),
        ({"a": nested(["object"] * 8, 10)}, {}),
        ({"a": nested(KINDS * 2, 10)}, {}),
        ({"a": {"type": "array", "items": nested(["object", "array", "string", "number"], 12)}}, {}),
    ],
    ids=[
        "doubles",
        "itself",
        "large",
        "patterns",
        "lengths",
        "numbers",
        "one type",
        "types",
        "types of items",
    ],
)
def test_schemas_that_grow(properties, defs):
    """What comes of them is bounded, and what has no room is told."""
    function = {"name": "find", "parameters": {"type": "object", "properties": properties, "$defs": defs}}
    enforced = Enforced([function], Form("</", nested=True))
    assert enforced.unmet(frozenset(["find"]), [])
    size = len(json.dumps(enforced.functions))
    assert size < 2 * len(json.dumps(function)) + MOST_INLINED
    assert len(json.dumps(enforceable(function["parameters"]))) < 5 * len(json.dumps(function))
    grammar = "\n".join(f'r{i} ::= "{enforced.marks.number + i}"' for i in range(4000))
    assert len(enforced.put(grammar)) < MAX_GBNF + 2 * size


@pytest.mark.parametrize("form", [Form(), Form("</", nested=True)], ids=["json", "nested"])
def test_more_parts_than_there_is_room_for(form):
    """They are refused in words, before anything is made of them."""
    for fine, n in ((True, MOST_NODES // 3), (False, MOST_NODES)):
        schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "boolean"}] * n}}}
        tools = [{"name": "find", "parameters": schema}]
        if fine:
            assert Enforced(tools, form).functions == tools and enforceable(schema) == schema
            continue
        for make, field in (
            (lambda: Enforced(tools, form), "tools"),
            (lambda: enforceable(schema), "format"),
        ):
            with pytest.raises(ApiError, match=f"{field}: its schemas have more than {MOST_NODES} parts"):
                make()


def test_what_is_about_objects_alone(grammars):
    """Where a schema is split by its types, each part has what is about its type, and $defs stay."""
    schema = {
        "type": ["object", "integer", "array", "object"],
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "additionalProperties": False,
        "items": {"$ref": "#/$defs/x"},
        "minItems": 1,
        "maxItems": 1,
        "minimum": 5,
        "maximum": 6,
        "$defs": {"x": {"type": "boolean"}},
    }
    grammar = grammars.convert(json.dumps(enforceable(schema)))["grammar"]
    right, wrong = ('{"a": true}', "5", "6", "[false]"), ('{"a": 5}', "{}", "7", "[]", "[5]", "true", '"a"')
    for text in (*right, *wrong):
        walk = Walk(grammars._sampler(grammar))
        allowed = walk.takes(text, ends=True)
        walk.close()
        assert allowed == (text in right), text


@pytest.mark.parametrize(
    "odd",
    [
        {"enum": 5},
        {"type": "string", "enum": 5},
        {"format": [1]},
        {"type": "string", "format": {}},
        {"pattern": 5},
        {"type": "string", "minLength": -1},
        {"type": "string", "minLength": True},
        {"type": "string", "maxLength": 10**30},
        {"type": ["string", 5, None]},
        {"type": {}},
        {"anyOf": 5},
        {"anyOf": [5, None]},
        {"$ref": 5},
        {"$ref": "#/"},
        {"$ref": "#/properties/a"},
        {"required": [[1]], "properties": {}},
        {"properties": {"a": None}},
        {"allOf": [5]},
        {"enum": [{}, [], None, "a"]},
        {"const": None},
        {"enum": ["a", {}], "format": [1], "type": [{}, "string"], "minLength": "x"},
        {"prefixItems": [], "items": {}, "minItems": []},
        5,
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "form", [Form(), Form("</"), Form("]<", True, items=False)], ids=["json", "tags", "nested"]
)
def test_senseless_schemas(odd, form):
    """They are left to the converter, which refuses what it does not know."""
    for parameters in ({"type": "object", "properties": {"a": odd}}, odd):
        function = {"name": "find", "parameters": parameters if isinstance(parameters, dict) else {}}
        enforced = Enforced([function], form)
        assert isinstance(enforced.put('root ::= "x"'), str)
        enforced.unmet(frozenset(["find"]), ["pattern x is not supported"])
