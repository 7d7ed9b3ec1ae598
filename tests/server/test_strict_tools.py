"""Strict tools over HTTP: what no grammar enforces is refused, and the rest is kept; null between tags."""

import json

import pytest
from bound_arguments import WHOLE, follows
from client_tools import tool, written
from server_tools import ask, events
from template_servers import demo_batcher, serving
from tiers import crossed, each

from eagle3_llama.server.grammar.nulls import with_nulls

ODD = [
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "pattern"),
    ({"type": "number", "minimum": 2, "maximum": 1}, "minimum of a number"),
    ({"type": "string", "pattern": "^a+b$", "minLength": 3}, "pattern"),
]


@pytest.fixture(scope="module")
def servers():
    kinds = {
        "own": "own",
        "json": "Qwen-Qwen3-0.6B",
        "tags": "Qwen3-Coder",
        "glm": "GLM-4.6",
        "loose": "LFM2.5-Instruct",
    }
    with demo_batcher(2048) as batcher, serving(batcher, kinds) as made:
        yield made


KINDS, CHOICES = ["own", "json", "tags", "loose"], ["auto", "required"]


@pytest.mark.parametrize("kind, choice, schema, words", crossed(KINDS, CHOICES, ODD))
def test_strict_tools(servers, kind, choice, schema, words):
    """What no grammar enforces is refused in words, of strict tools that may be called, and of no others."""
    client, body = servers[kind].client, {"tool_choice": choice, "max_tokens": 2}
    one = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
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


TAKEN = [(kind, choice) for kind in KINDS for choice in CHOICES]


@pytest.mark.parametrize("kind, choice", each(TAKEN, [("tags", "auto"), ("loose", "required")]))
def test_what_grammars_enforce_is_taken(servers, kind, choice):
    tools = [tool("f", WHOLE, strict=True)]
    r = ask(servers[kind].client, "Go.", tools=tools, tool_choice=choice, max_tokens=2)
    assert r.status_code == (400 if kind == "loose" else 200), r.text


HOT = [(kind, seed) for kind in ("own", "json", "tags") for seed in range(3)]


@pytest.mark.parametrize("kind, seed", each(HOT, HOT[:1]))
def test_a_model_keeps_them(servers, kind, seed):
    """Though it was trained for no tools, and is hot."""
    body = {"tools": [tool("find", WHOLE, strict=True)], "temperature": 1.5, "max_tokens": 300}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    r = ask(servers[kind].client, "Find 1000.", tool_choice="required", seed=seed, **body)
    choice = r.json()["choices"][0]
    if choice["finish_reason"] != "length":  # a text without a bound may have no end
        assert follows(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])), choice


MAYBE = {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}


SAID = [("null", None), ("nullify", "nullify"), ("no", "no"), ("", "")]


@pytest.mark.parametrize("said, expected", each(SAID, SAID[:2]))
def test_null_between_tags(servers, said, expected):
    """The word is null where text or null is asked for, whole and in streams; elsewhere it is text."""
    properties = {"a": MAYBE, "b": {"type": "string"}}
    find = tool("find", {"type": "object", "properties": properties, "required": ["a", "b"]})
    pair = lambda k: f"<arg_key>{k}</arg_key>\n<arg_value>{said}</arg_value>\n"
    call = f"<tool_call>find\n{pair('a')}{pair('b')}</tool_call>"
    body = {"tools": [find], "max_tokens": 200, **written(call)}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    client = servers["glm"].client
    message = ask(client, "Go.", **body).json()["choices"][0]["message"]
    [whole] = message["tool_calls"]
    assert json.loads(whole["function"]["arguments"]) == {"a": expected, "b": said}
    deltas = [e["choices"][0]["delta"] for e in events(ask(client, "Go.", stream=True, **body)) if e]
    parts = [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls") or ()]
    assert json.loads("".join(parts)) == {"a": expected, "b": said}


def test_null_of_what_is_cut():
    """What was sent of a stream is never taken back."""
    whole = json.dumps({"a": "null", "b": {"a": "null"}, "c": ['a":"null'], 'a"': "null", "d": "nullx"})
    whole = whole.replace(": ", ":").replace(", ", ",")
    read = with_nulls(whole, {"a", "d"})
    assert json.loads(read) == {**json.loads(whole), "a": None}
    for n in range(len(whole)):
        assert read.startswith(with_nulls(whole[:n], {"a", "d"})), whole[:n]
