"""Requests made to hurt a server: what scripts/measure/hostile.py sends.

A case is made from a number, so each can be sent again. The templates hurt by variables of the request, which
PREFIX before a usual template obeys: loops, texts that double, macros that call themselves.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

DEEP = 4000  # levels of nesting: more than the stack of a parser without limits holds
PREFIX = """\
{%- macro again(n) %}{{ again(n + 1) }}{% endmacro -%}
{%- if hurt == "loop" %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif hurt == "range" %}{% for i in range(1000000000) %}x{% endfor %}
{%- elif hurt == "double" %}{% set ns = namespace(t="x") %}
{%- for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}
{%- elif hurt == "times" %}{{ "x" * 2000000000 }}
{%- elif hurt == "macro" %}{{ again(0) }}
{%- elif hurt == "raise" %}{{ raise_exception("no") }}
{%- elif hurt == "nothing" %}{{ messages[99].content.parts.none }}
{%- elif hurt == "special" %}{{ "<|im_end|>" * 30000 }}
{%- elif hurt == "long" %}{{ "long " * 30000 }}
{%- elif hurt == "filter" %}{{ messages | tojson | length }}{{ messages | nofilter }}
{%- endif -%}
"""
HURTS = "loop range double times macro raise nothing special long filter".split()
ODD_TEXTS = (
    "", " ", "\0", "\x1b[2J", "\u202e\ufeff", "\U0010ffff", "\ud800", "é" * 500, "a" * 20_000, "\n" * 3000,
    "<|im_end|>" * 40, "<tool_call>", "</think>", "<think>" * 50, "{{ 7*7 }}{% for x in y %}", "%s%n%n",
    "[" * DEEP, '{"a":' * DEEP, "(" * DEEP, "```json\n{", '{"name": "f", "arguments": {}}',
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 10**400, 0.5, 1e308, float("nan"), "", "x", [], [[]], {}, {"a": {"b": []}},
    *ODD_TEXTS[:9],
)  # fmt: skip
OUTPUTS = (
    "[" * 60, '<tool_call>\n{"name": "f", "arguments": ' + "[" * 40, "<think>" * 9, "</think>" * 9,
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "<tool_call>" * 9, "{" * 30, '{"a":' * 9,
    '<tool_call>\n{"name": "f", "arguments": {"x": "\\ud83d"}}\n</tool_call>', "\u202e" * 9, "💥" * 9,
    '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' * 2, "<think>\nx\n</think>\n\n",
)  # fmt: skip
GRAMMARS = (
    "root ::= root", 'root ::= ("a" | "b")*', "root ::= [", 'root ::= x\nx ::= "a" x | ',
    'root ::= "a"{99999}',
    'root ::= ((("a"*)*)*)*', 'root ::= [^\\x00-\\U0010FFFF]', 'root ::= "' + "a" * 30_000 + '"',
    "root ::= " + " | ".join(f'"{i}"' for i in range(3000)), "root ::= " + "(" * 3000,
)  # fmt: skip

COMPLETION: dict[str, tuple[Any, ...]] = {  # fields of llama.cpp's completions, and values at their limits
    "n_predict": (0, -1, 64), "n_cmpl": (1, 2), "n_probs": (0, 1, 20), "post_sampling_probs": (True,),
    "return_tokens": (True,), "response_fields": (["content"], ["a/b/c", "x"], [], ["/", "timings/x"]),
    "samplers": (["top_k"], "kfypmxt", [], ["top_p", "top_p"]), "mirostat": (1, 2), "repeat_last_n": (0, 64),
    "logit_bias": ([[5, False]], [["hi", -9]], {"5": 1e6}, [[-1, 1]]), "json_schema": ({}, {"type": "null"}),
    "grammar": ("", GRAMMARS[1]), "id_slot": (-1, 0, 1, 99), "ignore_eos": (True,), "n_keep": (-1, 9),
    "stop": (["e"], [""], ["x"] * 40), "top_k": (0, -1), "top_p": (0, 1), "min_p": (1,), "typical_p": (0.01,),
    "lora": ([], [{"id": 0, "scale": 1}]), "t_max_predict_ms": (0, 5), "xtc_probability": (0, 1),
    "dry_sequence_breakers": (["\n"], []), "timings_per_token": (True,), "return_progress": (True,),
    "cache_prompt": (False,), "speculative": ({"n_max": 4}, {"report": True}), "seed": (-1, 2**32 - 1),
}  # fmt: skip


class Case(NamedTuple):
    """A request. leaves: bytes of the answer after which the client disconnects; None: it reads all."""

    kind: str
    path: str
    body: bytes
    leaves: int | None = None


def case(seed: int) -> Case:
    """The case of a number."""
    rng = random.Random(seed)
    make = rng.choice((_template, _output, _tools, _schema, _echo, _grammar, _field, _bytes, _texts))
    path, body = make(rng)
    if isinstance(body, dict) and rng.random() < 0.4 and "count" not in path:
        body["stream"] = True
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    return Case(make.__name__.strip("_"), path, data, rng.randrange(400) if rng.random() < 0.15 else None)


def _body(rng: random.Random, text: str = "Hello") -> tuple[str, dict[str, Any]]:
    """A valid request of one of the APIs, for few tokens."""
    more: dict[str, Any] = {"temperature": rng.choice((0, 0.8)), "seed": rng.randrange(9)}
    n, message = rng.randint(1, 12), {"role": "user", "content": text}
    path = rng.choice(("/v1/chat/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
    if path == "/v1/responses":
        return path, {"input": [message], "max_output_tokens": n, **more}
    return path, {"messages": [message], "max_tokens": n, **more}


def _any_body(rng: random.Random, text: str = "Hello") -> tuple[str, dict[str, Any]]:
    """The same, or one of llama.cpp's completions, which have no messages and no tools."""
    if rng.random() < 0.75:
        return _body(rng, text)
    more: dict[str, Any] = {"temperature": rng.choice((0, 0.8)), "seed": rng.randrange(-1, 9)}
    prompt = rng.choice((text, [text, text], {"prompt_string": text}, [1, 2, text]))
    return "/completion", {"prompt": prompt, "n_predict": rng.randint(1, 12), **more}


def _template(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _body(rng)
    kwargs: dict[str, Any] = {"hurt": rng.choice(HURTS)}
    if rng.random() < 0.3:
        name = rng.choice(("enable_thinking", "messages", "tools", "bos_token", "x"))
        kwargs = {name: rng.choice(ODD_VALUES)}
    return path, {**body, "chat_template_kwargs": kwargs}


def _told(text: str) -> str:
    """A grammar that makes the model write a text."""
    return f"root ::= {json.dumps(text, ensure_ascii=False)}"


def _output(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """What the model writes, in the way of the parser of its answers."""
    path, body = _body(rng)
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    more = {field: rng.choice((9, 60)), "grammar": _told(rng.choice(OUTPUTS))}
    return path, {**body, **more, "tools": [_tool(rng, path, {"type": "object", "properties": {}})]}


def _tool(rng: random.Random, path: str, schema: Any, name: str = "f") -> dict[str, Any]:
    about = rng.choice(("", "Does it.", ODD_TEXTS[rng.randrange(10)]))
    if path == "/v1/messages":
        return {"name": name, "description": about, "input_schema": schema}
    function = {"name": name, "description": about, "parameters": schema}
    if path == "/v1/responses":
        return {"type": "function", **function}
    return {"type": "function", "function": function}


def _tools(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _body(rng)
    names = rng.choice((["f"], ["f", "f"], ["f" * 256], [""], ["é💥"], [f"t{i}" for i in range(40)], ["a b"]))
    tools = [_tool(rng, path, _schema_of(rng), name) for name in names]
    if path == "/v1/messages":
        choice = rng.choice(({"type": "any"}, {"type": "tool", "name": names[0]}, {"type": "auto"}))
    else:
        inner = {"name": names[0]}
        named = {"type": "function", **(inner if path == "/v1/responses" else {"function": inner})}
        choice = rng.choice(("required", "auto", "none", named))
    return path, {**body, "tools": tools, "tool_choice": choice}


def _schema(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _any_body(rng)
    if path == "/completion":
        return path, {**body, "json_schema": _schema_of(rng)}
    form = {"name": "x", "schema": _schema_of(rng), "strict": rng.random() < 0.5}
    if path == "/v1/responses":
        return path, {**body, "text": {"format": {"type": "json_schema", **form}}}
    if path == "/v1/messages":
        return path, {**body, "output_config": {"format": {"type": "json_schema", "schema": form["schema"]}}}
    return path, {**body, "response_format": {"type": "json_schema", "json_schema": form}}


def _schema_of(rng: random.Random) -> Any:
    deep: Any = {"type": "string"}
    for _ in range(rng.choice((3, 20, 40))):
        deep = {"type": "array", "items": deep}
    wide = {f"p{i}": {"type": "integer", "minimum": -i, "maximum": i} for i in range(rng.choice((3, 60)))}
    types: Any = {"type": "string"}
    kinds: Any = rng.choice(
        (["object"] * 8, ["object", "array", "string", "number", "null"], ["x", {}, None])
    )
    for _ in range(rng.choice((3, 10))):
        types = {"type": kinds, "properties": {"a": types}, "minimum": 0.5}
    pattern = rng.choice(("^(a|a)*$", "^(a*)*b$", "(?=x)", "[", "^\\p{L}+$", "^.{1,9999}$", "a{1,100000}"))
    return rng.choice(
        (
            deep,
            types,
            {"type": "object", "properties": wide, "required": list(wide)},
            {"$ref": "#"},
            {"$ref": "https://example.invalid/x"},
            {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "$ref": "#/$defs/n"},
            {"type": "array", "items": {"type": "null"}, "minItems": rng.choice((2, 10**6))},
            {"type": "string", "pattern": pattern},
            {"type": "string", "minLength": 10**5, "maxLength": rng.choice((1, 10**9))},
            {"enum": list(range(rng.choice((0, 3000))))},
            {"type": "integer", "minimum": 9, "maximum": rng.choice((3, 10**30))},
            {"not": {}},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            rng.choice(ODD_VALUES),
        )
    )


def _echo(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A conversation that no server made: broken calls, results of no call, roles in any order."""
    long = '{"a": "' + "x" * 9999 + '"}'
    arguments = rng.choice(("{}", "", "[" * DEEP, '{"a":' * DEEP, '{"a": 1', "null", long))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    texts = [rng.choice(ODD_TEXTS) for _ in range(3)]
    if rng.random() < 0.5:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1], "tool_calls": [call] * rng.choice((1, 3))},
            {"role": "tool", "tool_call_id": rng.choice(("c", "d")), "content": texts[2]},
            {"role": rng.choice(("user", "system", "nobody")), "content": rng.choice(ODD_VALUES)},
        ]
        rng.shuffle(messages)
        return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}
    if rng.random() < 0.5:
        items: list[dict[str, Any]] = [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": texts[0]}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": rng.choice(("c", "d")), "output": texts[1]},
            {"type": "message", "role": "user", "content": texts[2]},
        ]
        rng.shuffle(items)
        return "/v1/responses", {"input": items, "max_output_tokens": 4}
    blocks = [
        {"type": "thinking", "thinking": texts[0], "signature": ""},
        {"type": "tool_use", "id": "c", "name": "f", "input": rng.choice(({}, {"a": [[]]}, 3))},
    ]
    name, value = rng.choice(("c", "d")), rng.choice(ODD_VALUES)
    results = [{"type": "tool_result", "tool_use_id": name, "content": value}]
    talk = [
        {"role": "user", "content": texts[1]},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    rng.shuffle(talk)
    path = rng.choice(("/v1/messages", "/v1/messages/count_tokens"))
    return path, {"messages": talk, **({"max_tokens": 4} if path == "/v1/messages" else {})}


def _grammar(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _any_body(rng)
    return path, {**body, "grammar": rng.choice(GRAMMARS)}


def _field(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _any_body(rng)
    more = "model stop seed top_k min_p n tools metadata stream_options speculative logit_bias logprobs"
    if path == "/completion":
        for name in rng.sample([*COMPLETION], 2):
            body[name] = rng.choice((*COMPLETION[name], rng.choice(ODD_VALUES)))
        return path, body
    for name in rng.sample([*body, *more.split()], 2):
        body[name] = rng.choice(ODD_VALUES)
    return path, body


def _texts(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = rng.choice(ODD_TEXTS)
    if rng.random() < 0.3:
        return "/tokenize", {"content": text}
    if rng.random() < 0.3:
        return "/v1/completions", {"prompt": text, "max_tokens": 4, "logprobs": 2}
    return _any_body(rng, text)


def _bytes(rng: random.Random) -> tuple[str, bytes]:
    """No JSON, or nearly."""
    path, body = _any_body(rng)
    whole = json.dumps(body).encode()
    at = rng.randrange(len(whole))
    odd = whole[:at] + b"\xff" + whole[at:]
    return path, rng.choice((whole[:at], odd, b"[" * 50_000, b"", whole + whole))
