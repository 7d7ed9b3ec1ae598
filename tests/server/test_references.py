"""References and names inside schemas: each means what the client says, whatever its characters are."""

import json

import pytest
import templates
from client_tools import call_of, tool
from grammar_texts import Walk
from server_tools import CHAT, ask, running, tiny
from tiers import each

from eagle3_llama.server.body.chat import ChatBody
from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.grammar.marks import Marks
from eagle3_llama.server.grammar.number_bounds import put_numbers
from eagle3_llama.server.prompt.template_client import ChatLibrary
from eagle3_llama.server.prompt.template_request import json_wanted, marks_of
from eagle3_llama.server.prompt.tools import tools_of
from eagle3_llama.server.sandbox.child import Grammars

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"  # a template that knows no tools
TEMPLATES = {"json": "Qwen-Qwen3-0.6B", "tags": "GLM-4.6", "own": None}
DIGIT, WORD = {"type": "integer", "minimum": 0, "maximum": 4}, {"type": "string", "enum": ["xy", "z"]}


@pytest.fixture(scope="module")
def grammars(files):
    """A checker of grammars whose model has a token for each byte."""
    return Grammars(files[0])


@pytest.fixture(scope="module")
def libraries(grammars):
    """The chat library's children, by kind of template."""
    convert, made = lambda schema, _: grammars.convert(json.dumps(schema)), {}
    for kind, name in TEMPLATES.items():
        text = PLAIN if name is None else templates.text(name)
        setup = {"template": text, "tool_use": None, "eos": "</s>", "bos": "<s>"}
        made[kind] = ChatLibrary(20.0, setup, convert)
        made[kind]._templates.CHILDREN = 1
    yield made
    for library in made.values():
        library.close()


def prepared(library, **body):
    """A chat request as the model would get it, and its grammar."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Go."}], **body})
    marks, request = (
        marks_of(body),
        {"messages": [{"role": "user", "content": "Go."}], "enable_thinking": False},
    )
    made = library.prepare(request, tools_of(body), json_wanted(body, marks), marks)
    return made, put_numbers(made.grammar, marks)


def written_call(kind, name, arguments):
    if kind == "tags":
        shown = lambda value: value if isinstance(value, str) else json.dumps(value)
        pair = lambda k, v: f"<arg_key>{k}</arg_key>\n<arg_value>{shown(v)}</arg_value>\n"
        return f"<tool_call>{name}\n{''.join(pair(k, v) for k, v in arguments.items())}</tool_call>"
    return (
        call_of(name, **arguments) if kind == "json" else json.dumps({"name": name, "arguments": arguments})
    )


def check(grammars, grammar, right, wrong):
    """The grammar takes each of the texts `right`, and none of `wrong`."""
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            walk = Walk(grammars._sampler(grammar))
            taken = walk.takes(text, ends=True)
            walk.close()
            assert taken is expected, (text, grammar)


def both(first, second, defs):
    """An object with a digit and a word, by references."""
    properties = {"p": {"$ref": first}, "q": {"$ref": second, "description": "A word."}}
    return {"type": "object", "properties": properties, "required": ["p", "q"],
            "additionalProperties": False, **defs}  # fmt: skip


def two(first, second, where="$defs"):
    return both(f"#/{where}/{first}", f"#/{where}/{second}", {where: {first: DIGIT, second: WORD}})


NAMES = [("A_b", "A-b"), ("类型甲", "类型乙"), ("Größe", "Grüße"), ("List[int]", "List<int>"), ("a.b", "a b")]
NAMES += [("A", "a"), ("-", "_"), ("x" * 200 + "1", "x" * 200 + "2")]
ESCAPES = {
    "slash": both("#/$defs/a~1b", "#/$defs/a~0b", {"$defs": {"a/b": DIGIT, "a~b": WORD}}),
    "percent": both("#/$defs/List%5Bint%5D", "#/%24defs/%E7%B1%BB",
                    {"$defs": {"List[int]": DIGIT, "类": WORD}}),
    "as it is": both("#/$defs/a%5Bb", "#/$defs/a%[b", {"$defs": {"a%5Bb": DIGIT, "a%[b": WORD}}),
    "within": both("#/$defs/both/properties/p", "#/$defs/both/anyOf/1",
                   {"$defs": {"both": {"properties": {"p": DIGIT}, "anyOf": [{}, WORD]}}}),
    "chain": both("#/$defs/a", "#/$defs/b", {"$defs": {
        "a": {"$ref": "#/$defs/a-b"}, "b": {"$ref": "#/$defs/a_b"}, "a-b": DIGIT, "a_b": WORD}}),
    "older": two("A_b", "A-b", "definitions"),
}  # fmt: skip
SCHEMAS = {" ".join(names)[:20]: two(*names) for names in NAMES} | ESCAPES
GOOD, BAD = [{"p": 3, "q": "xy"}], [{"p": "xy", "q": "xy"}, {"p": 3, "q": 3}, {"p": "z", "q": 4}]
CASES = [(kind, about) for about in SCHEMAS for kind in TEMPLATES]


@pytest.mark.parametrize("kind, about", each(CASES, [c for i, c in enumerate(CASES) if i % 3 == i // 3 % 3]))
def test_each_leads_to_its_own_definition(libraries, grammars, kind, about):
    """In the arguments of a tool, and in a schema of answers."""
    schema = SCHEMAS[about]
    made, grammar = prepared(
        libraries[kind], tools=[tool("find", schema, strict=True)], tool_choice="required"
    )
    assert made.incomplete == ()
    texts = [[written_call(kind, "find", one) for one in some] for some in (GOOD, BAD)]
    check(grammars, grammar, *texts)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, grammar = prepared(libraries[kind], response_format=form)
    check(grammars, grammar, [json.dumps(one) for one in GOOD], [json.dumps(one) for one in BAD])


def item(definition, name="Item"):
    """A schema as pydantic and MCP's servers write it."""
    return {"type": "object", "title": "Arguments", "properties": {"item": {"$ref": f"#/$defs/{name}"}},
            "required": ["item"], "$defs": {name: {**definition, "title": name}}}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_tools_whose_definitions_have_the_same_name(libraries, grammars, kind):
    tools = [tool("find", item(DIGIT)), tool("look", item(WORD)), tool("see", item({"type": "boolean"}))]
    _, grammar = prepared(libraries[kind], tools=tools, tool_choice="required")
    values = {"find": 3, "look": "xy", "see": True}
    call = lambda name, value: written_call(kind, name, {"item": value})
    wrong = [call(name, v) for name in values for v in values.values() if v is not values[name]]
    check(grammars, grammar, [call(name, v) for name, v in values.items()], wrong)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_tools_beside_a_schema_with_the_same_names(libraries, grammars, kind):
    """The model calls a tool, or answers by the schema, and each has its own definition."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": item(WORD)}}
    _, grammar = prepared(libraries[kind], tools=[tool("find", item(DIGIT))], response_format=form)
    call = lambda value: written_call(kind, "find", {"item": value})
    check(grammars, grammar, [call(3), '{"item": "xy"}'], [call("xy"), '{"item": 3}'])


TREE = {"type": "object", "properties": {"n": DIGIT, "c": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["n"], "additionalProperties": False}  # fmt: skip
NODE = {"$ref": "#/$defs/No-de", "$defs": {
    "No-de": {"type": "object", "properties": {
        "n": DIGIT, "c": {"type": "array", "items": {"$ref": "#/$defs/No_de"}}},
              "required": ["n"], "additionalProperties": False},
    "No_de": {"$ref": "#/$defs/No-de"}}}  # fmt: skip
OWN = {"type": "object", "properties": {
    "n": DIGIT, "c": {"type": "array", "items": {"anyOf": [{"$ref": "#/properties/d"}]}},
    "d": {"type": "object", "properties": {"n": {"$ref": "#/properties/n"}, "c": {"$ref": "#/properties/c"}},
          "required": ["n"], "additionalProperties": False}},
    "required": ["n"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("schema", [TREE, NODE, OWN], ids=["root", "each other", "properties"])
def test_recursion(libraries, grammars, schema):
    right = ['{"n": 1}', '{"n": 1, "c": []}', '{"n": 1, "c": [{"n": 2, "c": [{"n": 4}, {"n": 0}]}]}']
    wrong = ['{"n": 5}', '{"n": 1, "c": [{"n": 5}]}', '{"n": 1, "c": [{"n": 2, "c": [{"c": []}]}]}']
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for library in libraries.values():
        check(grammars, prepared(library, response_format=form)[1], right, wrong)
    if schema is not NODE:
        _, grammar = prepared(libraries["json"], tools=[tool("find", schema)], tool_choice="required")
        calls = [[call_of("find", **json.loads(text)) for text in some] for some in (right, wrong)]
        check(grammars, grammar, *calls)


def test_templates_show_schemas_as_they_are(libraries):
    """But where the library would not find what a reference leads to."""
    made, _ = prepared(libraries["json"], tools=[tool("find", two("A_b", "A-b"))])
    assert '"$ref": "#/$defs/A_b"' in made.prompt and '"A-b": {' in made.prompt
    made, _ = prepared(libraries["json"], tools=[tool("find", ESCAPES["slash"])])
    assert '"$ref": "#/$defs/a-b"' in made.prompt and '"a-b-2": {' in made.prompt


@pytest.mark.parametrize(
    "reference", ["#/$defs/none", "#/properties/p/x", "other.json#/a", "#name", "#/$defs/l/7"]
)
def test_references_that_lead_nowhere(libraries, reference):
    schema = both(reference, "#/$defs/w", {"$defs": {"w": WORD, "l": [1]}})
    for kind in ("json", "own"):
        with pytest.raises((ApiError, ValueError), match="ref"):
            prepared(libraries[kind], tools=[tool("find", schema)], tool_choice="required")


def test_a_clients_texts_are_no_marks(libraries, grammars):
    """Constants, values, names and descriptions stay what they are, if another request's rules have them."""
    other = Marks("another request")
    texts = ["e3-number:1:2", f"{other.word}:1:2", f"bounded-{other.word}-0"]
    numbers = [8110523000000, 8110523001, other.number]
    plain = {"bounded": {"type": "number", "minimum": 1, "maximum": 2, "description": texts[1]},
             "short": {"type": "string", "maxLength": 3, "description": str(numbers[2])}}  # fmt: skip
    consts = {f"c{i}": value for i, value in enumerate([*texts, *numbers])}
    own = {key: {"const": value} for key, value in consts.items()}
    names = {text: {"enum": [text, numbers[2]]} for text in (*texts, *map(str, numbers))}
    schema = {"type": "object", "properties": {**plain, **own, **names}, "additionalProperties": False,
              "required": [*plain, *own, *names]}  # fmt: skip
    good = {"bounded": 1.5, "short": "ab", **consts, **{name: name for name in names}}
    bad = [{**good, "c0": 1.5}, {**good, "c1": 1.5}, {**good, "bounded": texts[1]}, {**good, "c5": "ab"}]
    for kind, library in libraries.items():
        _, grammar = prepared(library, tools=[tool("find", schema)], tool_choice="required")
        calls = [[written_call(kind, "find", one) for one in some] for some in ([good], bad)]
        check(grammars, grammar, *calls)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, grammar = prepared(libraries["own"], response_format=form)
    check(grammars, grammar, [json.dumps(good)], [json.dumps(one) for one in bad])


def test_references_to_parts_of_parts(libraries):
    """However they lie within each other, what comes of them is bounded over all tools."""
    inner = DIGIT
    for _ in range(10):
        inner = {"type": "object", "properties": {"a": inner}}
    places = ["#" + "/properties/a" * n for n in range(1, 11)] * 20
    big = {"type": "object", "properties": {"a": inner, "b": {"anyOf": [{"type": "null"}] * 900}}}
    big["properties"] |= {f"r{i}": {"$ref": place} for i, place in enumerate(places)}
    big["properties"] |= {f"s{i}": {"$ref": f"#/properties/b/anyOf/{i}"} for i in range(900)}
    big["properties"]["all"] = {"$ref": "#/%70roperties/b"}
    with pytest.raises(ApiError, match="parts"):
        prepared(libraries["json"], tools=[tool(f"f{i}", big) for i in range(40)])


WRONG_DEFS = [[], "x", 5, None]


@pytest.fixture(scope="module")
def servers(files):
    with running(tiny(files, n_ctx=2048, chat_template_file=templates.file_of("Qwen-Qwen3-0.6B"))) as qwen:
        yield qwen


@pytest.mark.parametrize("defs", each(WRONG_DEFS, WRONG_DEFS[:1]), ids=str)
def test_definitions_that_are_no_object(servers, defs):
    """Each route that takes tools, or a schema, refuses them by the field's name."""
    schema = {"type": "object", "properties": {"p": DIGIT}, "$defs": defs}
    hello, chat = [{"role": "user", "content": "Hi."}], tool("find", schema)
    flat = {"type": "function", **chat["function"]}
    theirs = {"name": "find", "input_schema": schema}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies = [
        (CHAT, {"messages": hello, "tools": [chat]}),
        (CHAT, {"messages": hello, "response_format": form}),
        ("/apply-template", {"messages": hello, "tools": [chat]}),
        ("/v1/messages", {"messages": hello, "tools": [theirs], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": hello, "tools": [theirs]}),
        ("/v1/responses", {"input": "Hi.", "tools": [flat]}),
        ("/v1/responses/input_tokens", {"input": "Hi.", "tools": [flat]}),
        ("/v1/completions", {"prompt": "Hi.", "json_schema": schema}),
    ]
    for path, body in bodies:
        r = servers.client.post(path, json=body)
        assert r.status_code == 400 and "$defs" in r.text and "no object" in r.text, (path, r.text)


def test_answers_over_http(servers):
    """Of tools whose definitions have the same name: each call follows its own."""
    tools = [tool("find", item(DIGIT)), tool("look", item(WORD))]
    fits = {"find": lambda v: v in range(5), "look": lambda v: v in ("xy", "z")}
    more = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 100, "temperature": 2}
    more["parallel_tool_calls"] = False
    for seed in range(6):
        r = ask(servers.client, "Go.", tools=tools, tool_choice="required", seed=seed, **more)
        [call] = r.json()["choices"][0]["message"]["tool_calls"]
        assert fits[call["function"]["name"]](json.loads(call["function"]["arguments"])["item"]), call
