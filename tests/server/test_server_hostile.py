"""Hostile requests: from the OpenAPI document, invalid ones, and large ones. No 500, no hang.

EAGLE3_FUZZ says how many hostile bodies there are: 300, or 5000 for a full run.
"""

import copy
import json
import os
import random

import httpx
import pytest
from server_tools import CHAT, JSON, Streams, ask, idle, running, settings, until
from tiers import crossed, each

KEY = {"Authorization": "Bearer k"}
MESSAGES = "/v1/messages"
N = int(os.environ.get("EAGLE3_FUZZ", 300))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Few tokens a request: it is the way to the model that is tried here."""
    with running(
        settings(
            api_key="k",
            n_ctx=256,
            max_tokens_cap=4,
            max_n=2,
            n_parallel=2,
            slot_save_path=str(tmp_path_factory.mktemp("slots")),
            embeddings="target",
        )
    ) as s:
        yield s


@pytest.fixture(scope="module")
def stuck(files):
    """A tiny model, all of whose letters are tokens of their own."""
    with running(settings(model=files[0], eagle=files[1], n_ctx=512, n_parallel=3, threads=1)) as s:
        yield s


def operations():
    return [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/completion"),
        ("POST", MESSAGES),
        ("POST", f"{MESSAGES}/count_tokens"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", f"{CHAT}/input_tokens"),
        ("POST", "/apply-template"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("POST", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/{response_id}/input_items"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model_id}"),
        ("GET", "/props"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/metrics"),
        ("GET", "/slots"),
        ("POST", "/slots/{slot}"),
    ]


@pytest.fixture(scope="module")
def document(server):
    """For schemathesis, which takes a second to import."""
    import schemathesis

    return schemathesis.openapi.from_url(server.url + "/openapi.json", headers=KEY)


@pytest.mark.parametrize("method, path, mode", crossed(operations(), ["positive", "negative"]))
def test_what_the_document_says(pytestconfig, document, method, path, mode):
    """Bodies that it allows and bodies that it forbids get answers that it describes. More with --all."""
    import hypothesis
    import schemathesis
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    operation, mode = document[path][method], schemathesis.GenerationMode(mode)

    @hypothesis.settings(
        max_examples=max(10, N // 20) if pytestconfig.getoption("all") else 4,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        derandomize=True,
        database=None,
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def run(case):
        case.call_and_validate(
            timeout=30, headers=KEY, excluded_checks=[positive_data_acceptance]
        )  # what a schema cannot say is refused all the same

    try:
        run()
    except hypothesis.errors.Unsatisfiable:
        assert (
            mode is schemathesis.GenerationMode.NEGATIVE and "{" not in path
        )  # nothing there that could be wrong


def test_the_document_describes_every_route(server):
    document = server.client.get("/openapi.json").json()
    assert {(m.upper(), path) for path, methods in document["paths"].items() for m in methods} == set(
        operations()
    )
    chat = document["paths"][CHAT]["post"]
    assert {"200", "400", "401", "413", "503", "504"} <= set(chat["responses"])
    body = document["components"]["schemas"]["ChatBody"]
    assert body["additionalProperties"] is False and body["properties"]["n"]["anyOf"][0]["maximum"] == 2


# -- bodies made to hurt ----------------------------------------------------------------------------------

BIG = int("1" + "0" * 400)
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    BIG,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\x1b[2J",
    "\u202e\ufeff",
    "\U0010ffff",
    "é" * 1000,
    "a" * 70_000,
    "<|im_end|>" * 50,
    "{{ 7*7 }}{% for x in y %}",
    "%s%n%n",
    "../../etc/passwd",
    [],
    [[]],
    {},
    {"": {}},
    ["x"] * 5000,
    [0] * 5000,
    {"type": "text"},
    {"$ref": "#"},
    [None],
    "\\ud800",
    {str(i): i for i in range(3000)},
]
GRAMMARS = [
    "",
    "root",
    "root ::= ",
    "root ::= root",
    'root ::= ""',
    "root ::= [a-",
    'root ::= "a"{5000}',
    'root ::= (("a"*)*)*',
    "root ::= (" * 3000,
    "root ::= <99999>",
    'root ::= "\\x00"',
    "root ::= a\na ::= b\nb ::= a",
    "root ::= [^\\x00-\\U0010FFFF]",
    'root ::= "\\uD800"',
    "root ::= [\\U00110000]",
    'root ::= "a" | [b-a]',
    'root ::= ("a" | "b")+ root?',
    'ws ::= " "',
    "root ::= ." + "?" * 500,
    'root ::= "\\',
    "# nothing\n",
    "root ::= <1>",
    "root ::= !<2>{2000}",
]
TYPES = {"type": "string"}  # a list of types on each of ten levels
for _ in range(10):
    TYPES = {"type": ["object"] * 8, "properties": {"a": TYPES}, "minimum": 1}
SCHEMAS = [
    {},
    TYPES,
    {"type": "string", "minLength": 10**7},
    {"$ref": "#/a"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "file:///etc/passwd"},
    {"type": "string", "pattern": "^(((((a+)+)+)+)+)+$"},
    {"type": "string", "pattern": "^[a$"},
    {"enum": []},
    {"enum": [BIG % 2**62, "x", None, {}]},
    {"type": "sting"},
    {"anyOf": [{"type": "object", "properties": {str(i): {"type": "integer"}}} for i in range(300)]},
    {"type": "array", "items": {}, "maxItems": 10**6},
    {"type": "object", "properties": {"a" * 300: {}}, "required": ["b"]},
    {"allOf": [{"$ref": "#/x"}]},
    {"const": '\0\n"'},
    {"type": ["string", "x"]},
]


NO_TOKEN = "[b-a]"  # a range without a character
STUCK = "[a-z]{40} " + NO_TOKEN  # the sandbox does not look so far ahead


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 2},
        {"temperature": 1, "typical_p": 0.3, "repeat_penalty": 1.3, "seed": 3},
        {"mirostat_mode": 1, "seed": 4},
        {"mirostat_mode": 2, "seed": 5},
        {"temperature": 0, "logprobs": True, "top_logprobs": 5},
        {"temperature": 0, "speculative": {"n_max": 4}},
        {"temperature": 0.8, "seed": 6, "n": 2, "logit_bias": {"5": 3}},
    ],
    ids=lambda sampling: ",".join(name for name in sampling if name != "seed"),
)
def test_a_grammar_that_gets_stuck(stuck, sampling):
    """The request fails, streamed or not, and the one beside it has its own text."""
    alone = ask(stuck.client, max_tokens=20).json()["choices"][0]["message"]["content"]
    with Streams(stuck, 1, grammar="root ::= [a-z]+") as beside:
        until(lambda: stuck.gate.inside == 1)
        r = ask(stuck.client, grammar=f"root ::= {STUCK}", max_tokens=100, **sampling)
        assert r.status_code == 400 and r.json()["error"]["code"] == "refused", r.text
        assert "grammar" in r.json()["error"]["message"]
        assert "error" not in beside.texts[0]
    until(lambda: idle(stuck))
    assert ask(stuck.client, max_tokens=20).json()["choices"][0]["message"]["content"] == alone


def test_a_grammar_with_a_way_out(stuck):
    """An alternative that no token can follow does not matter where another one is there."""
    r = ask(stuck.client, grammar=f'root ::= "yes" | "no" | {NO_TOKEN}', max_tokens=20, temperature=0)
    assert r.status_code == 200 and r.json()["choices"][0]["message"]["content"] in ("yes", "no"), r.text


def valid(rng):
    """A (path, body) that is fine."""
    path = rng.choice(
        [
            CHAT,
            CHAT,
            "/v1/completions",
            MESSAGES,
            f"{MESSAGES}/count_tokens",
            "/tokenize",
            "/detokenize",
            "/slots/0?action=save",
            "/slots/0?action=restore",
            "/slots/0?action=erase",
            "/apply-template",
            "/v1/embeddings",
        ]
    )
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "hi"}]}
    talk = {
        "system": [{"type": "text", "text": "hi"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hi"}, call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 9},
    }
    bodies = {
        CHAT: {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 1,
            "stop": ["x"],
            "seed": 1,
            "stream": rng.random() < 0.3,
            "logit_bias": {"5": 1},
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
                }
            ],
            "stream_options": {"include_usage": True},
            "speculative": {"n_max": 2},
            "user": "u",
        },
        "/v1/completions": {
            "prompt": "hi",
            "max_tokens": 2,
            "logprobs": 1,
            "echo": rng.random() < 0.3,
            "suffix": None,
            "seed": 1,
        },
        MESSAGES: {**talk, "max_tokens": 2, "stop_sequences": ["x"], "stream": rng.random() < 0.3},
        f"{MESSAGES}/count_tokens": talk,
        "/apply-template": {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
        "/v1/embeddings": {"input": ["hi", "you"], "encoding_format": "base64", "dimensions": 576},
        "/tokenize": {"content": "hi", "with_pieces": True},
        "/detokenize": {"tokens": [1, 2]},
    }
    return path, json.loads(json.dumps(bodies.get(path, {"filename": "x"})))


def places(value, path=()):
    """Every place in a JSON value, as a path of keys."""
    yield path
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*path, key))


def put(value, path, new):
    if not path:
        return new
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def hostile(seed):
    """The seed's (path, bytes)."""
    rng = random.Random(seed)
    path, body = valid(rng)
    kind = rng.random()
    if kind < 0.55:
        for _ in range(rng.randint(1, 2)):
            body = put(body, rng.choice(list(places(body))), copy.deepcopy(rng.choice(VALUES)))
            if not isinstance(body, (dict, list)):
                break
    elif kind < 0.65 and path == CHAT:
        body["grammar"] = rng.choice(GRAMMARS)
    elif kind < 0.75 and path == CHAT:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": rng.choice(SCHEMAS)},
        }
    elif kind < 0.8 and path == CHAT:
        body["tools"][0]["function"]["parameters"], body["tool_choice"] = rng.choice(SCHEMAS), "required"
    elif kind < 0.85:
        body[rng.choice(["", "x" * 300, "__class__", "Messages", "max_token", "\0"])] = copy.deepcopy(
            rng.choice(VALUES)
        )
    raw = json.dumps(body).encode()
    if kind >= 0.85:
        raw = damaged(raw, rng)
    return path, raw


def damaged(raw, rng):
    at = rng.randrange(len(raw))
    deep = rng.choice([30, 300, 50_000])
    return rng.choice(
        [
            raw[:at],
            raw + raw,
            raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
            b"[" * deep + b"]" * deep,
            b"\xff" * 50,
            raw.replace(b'"hi"', b'"\\ud800"'),
            raw.replace(b"2", b"1" * 5000),
            raw.replace(b"hi", b"\xed\xa0\x80"),
            b'{"messages":' * deep + b"1" + b"}" * deep,
            b"\0" * 100,
            raw.replace(b"{", b"{" + b'"a":1,' * 100),
            b"\xef\xbb\xbf" + raw,
            raw.decode().encode("utf-16"),
        ]
    )


@pytest.mark.parametrize("kind", ["x" * 50_000, ["x"] * 5000], ids=["text", "list"])
def test_the_error_of_a_wrong_type_is_short(server, kind):
    """It says which types there are, and does not send back what was sent."""
    first = ask(server.client, response_format={"type": kind})
    turn = {"role": "user", "content": [{"type": kind}]}
    other = server.client.post(MESSAGES, json={"messages": [turn], "max_tokens": 1})
    for r, name in ((first, "json_schema"), (other, "tool_use")):
        assert r.status_code == 400 and len(r.content) < 600, r.text[:300]
        assert name in r.json()["error"]["message"]


def test_types_inside_types(server):
    """Such a schema grows by its levels, not by its types on each of them."""
    given = {"name": "f", "parameters": {"type": "object", "properties": {"x": TYPES}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": TYPES}}
    r = ask(server.client, max_tokens=2, response_format=form)
    assert r.status_code == 200, r.text
    tools = [{"type": "function", "function": given}]
    r = ask(server.client, max_tokens=2, tools=tools, tool_choice="required")
    assert r.json()["error"]["n_prompt_tokens"] < 1000, r.text  # the prompt shows it as it was sent


PARTS = 5


@pytest.mark.parametrize("part", each(range(PARTS), [0]))
def test_hostile_bodies(server, part):
    seen, seeds = {}, range(part * N // PARTS, (part + 1) * N // PARTS)
    with httpx.Client(base_url=server.url, timeout=30, headers=KEY) as client:
        for seed in seeds:
            path, raw = hostile(seed)
            r = client.post(path, content=raw, headers=JSON)
            seen[r.status_code] = seen.get(r.status_code, 0) + 1
            assert r.status_code < 500, (seed, path, raw[:300], r.text[:300])
            if r.status_code >= 400:
                error = r.json()["error"]
                assert error["message"] and len(r.content) < 3000, (seed, r.text[:300])
            if seed % 25 == 0:
                assert ask(client, max_tokens=2).status_code == 200, seed
    n = len(seeds)
    assert seen.get(200, 0) > n // 20 and seen.get(400, 0) > n // 10 and 422 not in seen, seen
    until(lambda: idle(server))
    assert ask(server.client, max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", "/v1/models/%00"),
        ("GET", "/v1/models/" + "x" * 5000),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd"),
        ("PUT", CHAT),
        ("POST", "/slots/-1?action=save"),
        ("POST", "/slots/0"),
        ("POST", "/slots/0?action=%00"),
        ("GET", "/slots?fail=1"),
        ("TRACE", "/"),
        ("DELETE", "/v1/models"),
    ],
)
def test_odd_paths(server, method, path):
    r = server.client.request(method, path, json={"filename": "x"} if method == "POST" else None)
    assert 200 <= r.status_code < 500 and (r.status_code == 200 or r.json()["error"]["message"])


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Request-Id": "x" * 5000},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "\x7f"},
        {"Origin": "http://[::1"},
        {"Origin": "null"},
        {"Accept": "\xff"},
        {"Authorization": "Bearer " + "x" * 10_000},
        {"Transfer-Encoding": "chunked", "Content-Length": "5"},
    ],
)
def test_odd_headers(server, headers):
    raw = {k: v.encode("latin-1") for k, v in {**JSON, **headers}.items()}
    r = server.client.post(
        CHAT, content=b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}', headers=raw
    )
    assert r.status_code in (200, 400, 401, 403, 415)
