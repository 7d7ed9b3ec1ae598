"""Schemas of tools' arguments: in each template's form of calls, the grammar allows what they do, no more."""

import itertools
import json
import re
from decimal import Decimal

import pytest
import templates
from client_tools import tool
from grammar_texts import texts
from grammar_walks import Characters, begun
from server_tools import ask
from template_servers import demo_batcher, serving

from eagle3_llama.server.chat.call_forms import Form, form_of, probe
from eagle3_llama.server.chat.decimals import put_numbers
from eagle3_llama.server.chat.tool_schemas import Enforced
from eagle3_llama.server.sandbox.chat_library import ChatError, ChatTemplate, parse
from eagle3_llama.server.sandbox.child import Grammars

ASKED = [{"role": "user", "content": "Go."}]
VALUE, NUMBER = "e3value", 4711  # constants whose places in a call are those of other values
CODE = 'ab1</\n"\\ '
STRINGS = {  # schema: what Python says of a string
    "pattern": ({"type": "string", "pattern": r"^a\d*b?$"}, lambda s: re.fullmatch(r"a[0-9]*b?", s)),
    "anywhere": ({"type": "string", "pattern": r"b\s1"}, lambda s: re.search(r"b\s1", s)),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, lambda s: 2 <= len(s) <= 3),
    "short": ({"type": "string", "maxLength": 1}, lambda s: len(s) <= 1),
    "enum": ({"type": "string", "enum": ["a1", '"b', "1"]}, lambda s: s in ("a1", '"b', "1")),
    "const": ({"type": "string", "const": "b1"}, lambda s: s == "b1"),
    "either": ({"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "string", "pattern": r"^\d1$"}]},
               lambda s: s in ("a", "b", "11")),
    "reference": ({"$ref": "#/$defs/x"}, lambda s: s in ("ab", "b")),
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
        """Whether a text stands between tags."""
        return bool(self.form.close) and (not inner or self.form.nested)

    def shown(self, value, inner=False):
        """A value as a call has it."""
        return value if isinstance(value, str) and self.raw(inner) else json.dumps(value)

    def read(self, text, inner=False):
        return text if self.raw(inner) else json.loads(text)

    def is_plain(self, text, inner):
        """Whether it has no escapes of other letters, and no blanks around it."""
        return self.raw(inner) or (text == text.strip() and not {"n", "\b"} & set(json.loads(text)))

    def writes(self, text, inner, schema):
        """Whether a text that follows the schema may be written between these tags: see between_tags()."""
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
        text = put_numbers(enforced.put(made["forced"] or made["grammar"]))
        assert enforced.unmet(frozenset(["find"]), made["incomplete"]) == []
        assert "e3-number" not in text and "8110" not in text
        return text, made


@pytest.fixture(scope="module")
def kind_of():
    made = {}
    return lambda name: made.get(name) or made.setdefault(name, Kind(name))


# whose grammars let any text stand within a call, where a walk does not end: a call as they write it
WRITTEN = {
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
    before, found, close = characters.walk(grammar, begun(made, False), 0, written).partition(shown)
    assert found
    return before, close


NAMES = [n for n in templates.names() if n != "CohereForAI-c4ai-command-r-plus-tool_use"]


@pytest.mark.parametrize("inner", [False, True], ids=["argument", "inside"])
@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
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


WHOLE = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": r"^[ab]\d{2}$"},
        "unit": {"type": "string", "enum": ["c", "f x"]},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "score": {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5},
        "day": {"type": "string", "format": "date"},
        "inner": {
            "type": "object",
            "properties": {
                "s": {"type": "string", "pattern": r"^[\w-]x\d$"},
                "n": {"type": "number", "maximum": 3},
            },
            "required": ["s", "n"],
        },
    },
    "required": ["code", "unit", "score", "day", "inner"],
    "additionalProperties": False,
}


def follows(given):
    """Whether arguments follow WHOLE."""
    inner, either = given["inner"], given.get("either")
    return (
        set(given) - {"either"} == set(WHOLE["required"])
        and re.fullmatch(r"[ab][0-9]{2}", given["code"])
        and given["unit"] in ("c", "f x")
        and 0.25 <= given["score"] < 0.5
        and re.fullmatch(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", given["day"])
        and re.fullmatch(r"[a-zA-Z0-9_-]x[0-9]", inner["s"])
        and inner["n"] <= 3
        and (either is None or either == "null" or len(either) <= 3)
    )


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", NAMES)
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
        grammar = put_numbers(enforced.put(made["forced"] or made["grammar"]))
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


LOOSE = {"Kimi-K3", "LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "google-gemma-4-31B-it"}
LOOSE.add("google-gemma-4-31B-it-interleaved")
ANY_ORDER = {"muse-glimmer", "openbmb-MiniCPM5-1B"}


@pytest.mark.parametrize("name", NAMES)
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


ODD = [
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "pattern"),
    ({"type": "number", "minimum": 2, "maximum": 1}, "minimum of a number"),
    ({"type": "string", "pattern": "^a+b$", "minLength": 3}, "pattern"),
]


@pytest.fixture(scope="module")
def servers():
    kinds = {"own": "own", "json": "Qwen-Qwen3-0.6B", "tags": "Qwen3-Coder", "loose": "LFM2.5-Instruct"}
    with demo_batcher(2048) as batcher, serving(batcher, kinds) as made:
        yield made


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("kind", ["own", "json", "tags", "loose"])
def test_strict_tools(servers, kind, choice):
    """What no grammar enforces is refused in words, of strict tools that may be called, and of no others."""
    client = servers[kind].client
    for schema, words in ODD:
        one = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        body = {"tool_choice": choice, "max_tokens": 2}
        r = ask(client, "Go.", tools=[tool("f", one, strict=True), tool("g")], **body)
        error = r.json()["error"]
        assert r.status_code == 400 and error["param"] == "tools", r.text
        assert "strict" in error["message"] and (words in error["message"] or kind == "loose"), error
        for tools, chosen in (
            ([tool("f", one), tool("g")], choice),
            ([tool("f", one, strict=True), tool("g")], {"type": "function", "function": {"name": "g"}}),
        ):
            r = ask(client, "Go.", tools=tools, **{**body, "tool_choice": chosen})
            assert r.status_code == 200, r.text
    r = ask(client, "Go.", tools=[tool("f", WHOLE, strict=True)], tool_choice=choice, max_tokens=2)
    assert r.status_code == (400 if kind == "loose" else 200), r.text


@pytest.mark.parametrize("kind", ["own", "json", "tags"])
def test_a_model_keeps_them(servers, kind):
    """Though it was trained for no tools, and is hot."""
    body = {"tools": [tool("find", WHOLE, strict=True)], "temperature": 1.5, "max_tokens": 300}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    for seed in range(3):
        r = ask(servers[kind].client, "Find 1000.", tool_choice="required", seed=seed, **body)
        choice = r.json()["choices"][0]
        if choice["finish_reason"] != "length":  # a text without a bound may have no end
            assert follows(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])), choice
