"""Anthropic's Messages API: the form of answers and events, and what both say. --all: by its client, too."""

import json

import event_checks
import pytest
from client_tools import PLACE
from event_checks import by_anthropic, check_message, message_of, prompt_tokens
from server_tools import CHAT, Blocked, ask, idle, running, settings, until
from template_servers import OWN_AND_QWEN, chat_fixtures
from tiers import crossed, each

from eagle3_llama.server.anthropic.answer import _input
from eagle3_llama.server.body.chat import MAX_TOOLS
from eagle3_llama.server.http import stream

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOLS = [
    {"name": name, "description": f"Looks up the {name}.", "input_schema": PLACE, "cache_control": None}
    for name in ("weather", "train")
]
RIVERS = {"role": "user", "content": "Name three rivers."}
WHOLE = 200  # tokens that a call has room in
NO_THOUGHTS = {"thinking": {"type": "disabled"}}
ONE = {"disable_parallel_tool_use": True}
CALL = '<tool_call>\n{"name": "train", "arguments": {"city": "Oslo", "day": 3}}\n</tool_call>'
TRAIN = ("tool_use", "train", {"city": "Oslo", "day": 3})
KINDS = list(OWN_AND_QWEN)


batcher, servers = chat_fixtures(2048, OWN_AND_QWEN)


@pytest.fixture(scope="module", autouse=True)
def official(pytestconfig):
    """With --all, Anthropic's own types check all that is answered: they take seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_checks, "OFFICIAL", pytestconfig.getoption("all"))
        yield


@pytest.fixture(params=each(KINDS, ["qwen"]))  # and `own` where a test says so
def server(servers, request):
    return servers[request.param]


def body_of(**more):
    return {"model": "any", "messages": [RIVERS], "max_tokens": 12, "temperature": 0, **more}


def whole(server, path=PATH, **more):
    r = server.client.post(path, json=body_of(**more))
    assert r.status_code == 200, r.text
    check_message(r.json())
    return r.json()


def frames(server, **more):
    """The (name, data) of a stream's events."""
    r = server.client.post(PATH, json=body_of(stream=True, **more))
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream"), r.text
    parts = [part.split("\n") for part in r.text.split("\n\n") if part]
    found = [(e.removeprefix("event: "), json.loads(d.removeprefix("data: "))) for e, d in parts]
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def streamed(server, **more):
    """A stream's message, put together from its events, whose order it checks."""
    message = message_of(frames(server, **more))
    check_message(message)
    return message


def told(message):
    """What an answer says, without what differs from one to the next."""
    blocks = [
        (b["type"], b["name"], b["input"]) if b["type"] == "tool_use" else (b["type"], b[b["type"]])
        for b in message["content"]
    ]
    return blocks, message["stop_reason"], message["stop_sequence"]


def count(server, path=COUNT, **more):
    kept = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
    r = server.client.post(path, json={k: v for k, v in body_of(**more).items() if k in kept})
    assert r.status_code == 200, r.text
    assert set(r.json()) == {"input_tokens"}
    by_anthropic("MessageTokensCount", r.json())
    return r.json()["input_tokens"]


def error_of(r, status):
    assert r.status_code == status, r.text
    body = r.json()
    assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    assert body["type"] == "error"
    return body["error"]


@pytest.mark.parametrize(
    "server, more",
    crossed(KINDS, [
        {},
        {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9},
        {"system": "Be brief.", **NO_THOUGHTS},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"tools": TOOLS, "tool_choice": {"type": "any", **ONE}, "max_tokens": WHOLE, **NO_THOUGHTS},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"tools": TOOLS, **NO_THOUGHTS},
        {"messages": [RIVERS, {"role": "assistant", "content": "1. The"}], **NO_THOUGHTS},
        {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}, "max_tokens": WHOLE},
        {"speculative": {"n_max": 3}},
    ]),
    indirect=["server"],
    ids=lambda m: m if isinstance(m, str) else ",".join(m) or "plain",
)  # fmt: skip
def test_streams_say_what_answers_say(server, more):
    """And the prompt has as many tokens as count_tokens says."""
    got = whole(server, **more)
    assert told(streamed(server, **more)) == told(got)
    assert count(server, **more) == prompt_tokens(got["usage"])
    assert 0 < got["usage"]["output_tokens"] <= more.get("max_tokens", 12)


CHOICES = [("any", {"weather", "train"}), ("tool", {"train"})]


@pytest.mark.parametrize("server, choice, names", crossed(KINDS, CHOICES), indirect=["server"])
def test_calls_are_enforced(server, choice, names):
    """The model was never trained for tools: without the grammar it writes none."""
    chosen = {"type": choice, **ONE} | ({"name": "train"} if choice == "tool" else {})
    got = whole(server, tools=TOOLS, tool_choice=chosen, max_tokens=WHOLE, **NO_THOUGHTS)
    assert got["stop_reason"] == "tool_use"
    (call,) = got["content"]
    assert call["type"] == "tool_use" and call["name"] in names and call["id"]
    assert call["input"]["day"] <= 31 and isinstance(call["input"]["city"], str)


def test_a_call_that_is_cut(server):
    """Half a call is no call, and the answer ends at its limit."""
    more = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "train"}, "max_tokens": 9, **NO_THOUGHTS}
    got = whole(server, **more)
    assert got["stop_reason"] == "max_tokens" and all(b["type"] != "tool_use" for b in got["content"])
    assert streamed(server, **more)["stop_reason"] == "max_tokens"


WRITTEN = [
    (f"<think>\nHm.\n</think>\n\nI look. {CALL}", [("thinking", "Hm.\n"), ("text", "I look."), TRAIN]),
    ("<think>\n\n</think>\n\nHello.", [("text", "Hello.")]),
    (f"{CALL}\n{CALL}", [TRAIN, TRAIN]),
    (f"<think>\nHm.\n</think>\n\n{CALL}", [("thinking", "Hm.\n"), TRAIN]),
    ("<think>\nHm, so.\n</think>\n\nHello. ", [("thinking", "Hm, so.\n"), ("text", "Hello. ")]),
]


@pytest.mark.parametrize("written, expected", each(WRITTEN, WRITTEN[:3]))
def test_blocks_of_what_a_model_writes(servers, written, expected):
    """The text is told by a grammar; each block comes once, whole and streamed, and may be sent back."""
    more = {"tools": TOOLS, "grammar": f"root ::= {json.dumps(written)}", "max_tokens": WHOLE}
    got = whole(servers["qwen"], **more)
    reason = "tool_use" if TRAIN in expected else "end_turn"
    assert told(got) == (expected, reason, None)
    assert told(streamed(servers["qwen"], **more)) == told(got)
    blocks = [*got["content"], {"type": "redacted_thinking", "data": "x"}]
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": [{"type": "text", "text": "Late."}]}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    back = [RIVERS, {"role": "assistant", "content": blocks}, {"role": "user", "content": results or "So?"}]
    assert told(whole(servers["qwen"], messages=back, tools=TOOLS))[0]


def test_arguments_with_half_a_character(servers):
    """JSON can name it, and UTF-8 cannot: the answer is still one, whole and streamed."""
    city = r'"city": "\ud83d"'
    text = CALL.replace('"city": "Oslo"', city)
    more = {"tools": TOOLS, "grammar": f"root ::= {json.dumps(text)}"}
    got = whole(servers["qwen"], max_tokens=WHOLE, **more)
    assert told(got)[0] == [("tool_use", "train", {"city": "\ufffd", "day": 3})]
    assert streamed(servers["qwen"], max_tokens=WHOLE, **more)["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "text", ["[" * 9000, '{"a":' * 9000, '{"a": 1e999}', '{"a": NaN}', '{"a": ' + "1" * 9999 + "}"]
)
def test_arguments_that_are_no_json(text):
    """What nests too deep, and numbers that JSON does not have, are told as what they are: a text."""
    told = {"function": {"arguments": text}}
    assert _input(told) == {"INVALID_JSON": text}
    assert _input({"function": {"arguments": '{"a": 1e99}'}}) == {"a": 1e99}


@pytest.mark.parametrize("kind, failed", crossed(KINDS, [False, True]))
def test_a_round_trip_of_a_call(servers, kind, failed):
    """The prompt is the one of a chat with the same call and result."""
    server = servers[kind]
    more = {"tools": TOOLS, "max_tokens": WHOLE, **NO_THOUGHTS}
    call = whole(server, tool_choice={"type": "tool", "name": "train", **ONE}, **more)["content"][0]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "at nine", "is_error": failed}
    again = {"type": "text", "text": "When?"}
    back = [RIVERS, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, again]}]
    got = whole(server, messages=back, **{**more, "max_tokens": 8})
    function = {"name": "train", "arguments": json.dumps(call["input"], ensure_ascii=False)}
    said = ("Error: " if failed else "") + "at nine"
    same = [
        RIVERS,
        {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "name": "train", "content": said},
        {"role": "user", "content": "When?"},
    ]
    tools = [
        {
            "type": "function",
            "function": {"name": t["name"], "description": t["description"], "parameters": PLACE},
        }
        for t in TOOLS
    ]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = ask(server.client, messages=same, tools=tools, max_tokens=8, **off).json()
    assert prompt_tokens(got["usage"]) == chat["usage"]["prompt_tokens"]
    text = chat["choices"][0]["message"]["content"].lstrip()
    assert told(got)[0] == ([("text", text)] if text else [])


def test_why_an_answer_ends(server):
    """At a stop sequence, which is named; at its limit; or at its own end, whatever sequences there are."""
    more = {"max_tokens": 40, **NO_THOUGHTS}
    text = whole(server, **more)["content"][0]["text"]
    word = text.split()[3]
    for sequences in (["never", word], [word, "never"]):
        got = whole(server, stop_sequences=sequences, **more)
        assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", word)
        assert got["content"][0]["text"] == text[: text.index(word)]
        assert told(streamed(server, stop_sequences=sequences, **more)) == told(got)
    got = whole(server, stop_sequences=["never"], **{**more, "max_tokens": 3})
    assert (got["stop_reason"], got["stop_sequence"]) == ("max_tokens", None)
    ended = {"grammar": 'root ::= "Hello there"', "stop_sequences": ["never"], **more}
    for got in (whole(server, **ended), streamed(server, **ended)):
        assert told(got) == ([("text", "Hello there")], "end_turn", None)


def test_a_stop_sequence_within_a_call(servers):
    """It is like a limit there: half a call is no call."""
    more = {"grammar": f"root ::= {json.dumps(CALL)}", "max_tokens": WHOLE, "tools": TOOLS, **NO_THOUGHTS}
    got = whole(servers["qwen"], stop_sequences=["slo"], **more)
    assert told(got) == ([], "max_tokens", None)
    sent = frames(servers["qwen"], stop_sequences=["slo"], **more)
    [last] = [e["delta"] for e in sent if e["type"] == "message_delta"]
    assert last == {"stop_reason": "max_tokens", "stop_sequence": None}
    got = whole(servers["qwen"], stop_sequences=["</tool_call>"], **more)
    assert told(got) == ([TRAIN], "tool_use", None)


def test_the_text_is_that_of_a_chat(server):
    """With the same seed; and a field that is left out has the same default."""
    for more in ({"seed": 3, "temperature": 0.9}, {"seed": 4}):
        body = {"model": "any", "messages": [RIVERS], "max_tokens": 24, **more}
        got = server.client.post(PATH, json=body).json()
        message = server.client.post(CHAT, json=body).json()["choices"][0]["message"]
        expected = [message.get("reasoning_content") or "", message["content"] or ""]
        assert [text for _, text in told(got)[0]] == [t.lstrip() for t in expected if t.strip()]


@pytest.mark.thorough
def test_the_official_client(servers):
    """create, stream, tools, count_tokens, and the classes of its errors."""
    import anthropic

    client = anthropic.Anthropic(base_url=servers["own"].url, api_key="none", max_retries=0, timeout=60)
    given = {"model": "any", "max_tokens": 24, "messages": [RIVERS], "extra_body": {"temperature": 0}}
    got = client.messages.create(**given)
    with client.messages.stream(**given) as events:
        assert "".join(events.text_stream) == got.content[0].text
        final = events.get_final_message()
    assert final.content[0].text == got.content[0].text and final.stop_reason == got.stop_reason
    assert final.usage.output_tokens == got.usage.output_tokens
    called = {**given, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": WHOLE}
    with client.messages.stream(**called) as events:
        blocks = events.get_final_message().content
    assert [b.type for b in blocks] == ["tool_use"] * len(blocks) and blocks[0].input["day"] <= 31
    tokens = client.messages.count_tokens(model="any", messages=[RIVERS]).input_tokens
    assert tokens == got.usage.input_tokens + got.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**{**given, "extra_body": {"temperature": 99}})


MANY = {"list": [0] * 9999}
CALLS = [{"type": "tool_use", "id": f"c{i}", "name": "train", "input": {}} for i in range(MAX_TOOLS + 1)]
CALLED = [{"role": "assistant", "content": CALLS[i : i + 100]} for i in range(0, len(CALLS), 100)]
ENDED = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0"}]}]
MUCH = {  # what is right here, and too much for the chat that it stands for
    "calls": {"messages": [{"role": "user", "content": "x"}, *CALLED, *ENDED]},
    "schema": {"tools": [{"name": "f", "input_schema": MANY}]},
    "variables": {"chat_template_kwargs": MANY, "thinking": {"type": "enabled", "budget_tokens": 9}},
}


@pytest.mark.parametrize(
    "path, message, more",
    [
        (PATH, "max_tokens: Field required", {"max_tokens": ...}),
        (PATH, "did you mean max_tokens", {"max_token": 3}),
        (PATH, "did you mean system", {"sytem": "x"}),
        (PATH, "leave the part of type 'image' out", {"content": [{"type": "image", "source": {}}]}),
        (PATH, "no parts of type 'voice'", {"content": [{"type": "voice"}]}),
        (PATH, "a user's message has no block of type tool_use", {
            "content": [{"type": "tool_use", "id": "x", "name": "train", "input": {}}]
        }),
        (PATH, "no earlier message has a tool_use", {
            "content": [{"type": "tool_result", "tool_use_id": "x"}]
        }),
        (PATH, "no tool of type 'bash_20250124'", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (PATH, "another `type` than object", {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}),
        (PATH, "there is no tool 'no'", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}),
        (PATH, "`any` needs tools", {"tool_choice": {"type": "any"}}),
        (PATH, "`name` belongs to", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
        (PATH, "output_config.format: no grammar enforces", {
            "output_config": {"format": {"type": "json_schema", "schema": {"multipleOf": 9}}}
        }),
        (PATH, "a report", {"speculative": {"report": True}}),
        *((path, message, {**MUCH[name], **({} if path is PATH else {"max_tokens": ..., "temperature": ...})})
          for path in (PATH, COUNT) for name, message in (
            ("calls", "messages: calls and texts of one turn: List should have at most"),
            ("schema", "tools[0].input_schema: it has more than 10000 values"),
            ("variables", "chat_template_kwargs: it has more than 10000 values"),
        )),
        (PATH, "prompt has", {"content": "a river " * 3000}),
        (COUNT, "unknown field", {"max_tokens": 3}),
        (COUNT, "there is no tool 'no'", {
            "max_tokens": ..., "temperature": ..., "tools": TOOLS,
            "tool_choice": {"type": "tool", "name": "no"},
        }),
    ],
)  # fmt: skip
def test_what_is_refused(server, path, message, more):
    """In Anthropic's form, with its names of fields."""
    if "content" in more:
        more = {"messages": [{"role": "user", "content": more["content"]}]}
    body = {k: v for k, v in body_of(**more).items() if v is not ...}
    error = error_of(server.client.post(path, json=body), 400)
    assert error["type"] == "invalid_request_error" and message in error["message"], error
    until(lambda: idle(server))


def test_tools_that_anthropics_service_runs(server):
    """They are left out, and the answer says so. One that is named is refused."""
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    for told in (False, True):
        r = server.client.post(PATH, json=body_of(tools=[*TOOLS, search], stream=told, max_tokens=2))
        assert r.status_code == 200 and r.headers["x-left-out"] == "web_search_20250305"
    assert count(server, tools=[*TOOLS, search]) == count(server, tools=TOOLS)
    named = body_of(tools=[*TOOLS, search], tool_choice={"type": "tool", "name": "web_search"})
    assert "runs no tools" in error_of(server.client.post(PATH, json=named), 400)["message"]


def test_neighbouring_turns_of_one_role(server):
    """They are one, whose blocks they share out."""
    turn = lambda role, *texts: {"role": role, "content": [{"type": "text", "text": t} for t in texts]}
    one = [turn("user", "Hi.", "You?"), turn("assistant", "Yes, ", "me."), turn("user", "Name three rivers.")]
    more = [turn("user", "Hi."), turn("user", "You?"), turn("assistant", "Yes, "), turn("assistant", "me.")]
    assert count(server, messages=one) == count(server, messages=[*more, one[-1]])
    assert told(whole(server, messages=one)) == told(whole(server, messages=[*more, one[-1]]))


@pytest.mark.parametrize("odd", [[1], 5, "x", None, {"a": 5}, {"a": []}], ids=repr)
@pytest.mark.parametrize("name", ["$defs", "definitions", "properties", "required"])
def test_schemas_with_odd_parts(servers, name, odd):
    """They are counted, or refused."""
    tools = [{"name": "f", "input_schema": {"type": "object", name: odd}}]
    for kind in KINDS:
        r = servers[kind].client.post(COUNT, json={"messages": [RIVERS], "tools": tools})
        assert r.status_code in (200, 400), r.text


def test_last_message_with_a_call(server):
    call = {"type": "tool_use", "id": "x", "name": "train", "input": {}}
    body = body_of(messages=[RIVERS, {"role": "assistant", "content": [call]}], tools=TOOLS)
    assert "the result of the call" in error_of(server.client.post(PATH, json=body), 400)["message"]


def test_other_names_and_methods(servers):
    server = servers["own"]
    assert told(whole(server, "/messages")) == told(whole(server))
    assert count(server, "/messages/count_tokens") == count(server)
    assert error_of(server.client.get(PATH), 405)["type"] == "invalid_request_error"
    assert error_of(server.client.post(PATH, content=b"{}"), 415)["type"] == "invalid_request_error"
    large = json.dumps(body_of(system="x" * 2_100_000))
    r = server.client.post(PATH, content=large, headers={"Content-Type": "application/json"})
    assert error_of(r, 413)["type"] == "request_too_large"
    assert "param" in server.client.get("/v1/nothing").json()["error"]


def test_fields_without_an_effect(server):
    """Those of Anthropic's service, and any inside messages, blocks and tools."""
    text = {
        "type": "text",
        "text": RIVERS["content"],
        "cache_control": {"type": "ephemeral"},
        "citations": [],
    }
    more = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "messages": [{"role": "user", "content": [text], "id": "x"}],
        "tools": [{**t, "eager_input_streaming": True, "type": "custom"} for t in TOOLS],
    }
    assert told(whole(server, **more)) == told(whole(server, tools=TOOLS))


def test_silence_and_failure_of_a_stream(servers, monkeypatch):
    """Pings fill a silence, behind the first event; a failure is an event, and the last one."""
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.05)
    server = servers["own"]
    with Blocked(server) as blocked, server.client.stream("POST", PATH, json=body_of(stream=True)) as r:
        lines, seen = r.iter_lines(), []
        while seen.count("event: ping") < 4:
            seen.append(next(lines))
        assert seen[0] == "event: message_start"
        blocked.go()
        assert [line for line in lines if line][-1] == 'data: {"type":"message_stop"}'
    stuck = {"grammar": 'root ::= "Hello there " [a-z]{300} [b-a]', "max_tokens": 900}
    names = [e["type"] for e in frames(server, **stuck)]
    assert names[0] == "message_start" and names[-1] == "error" and "message_stop" not in names
    until(lambda: idle(server))


HEADERS = [{"x-api-key": "k"}, {"Authorization": "Bearer k"}]


@pytest.mark.parametrize("header", each(HEADERS, HEADERS[:1]))
def test_keys(batcher, header):
    """Both headers open every route; errors have the form of the route's API."""
    with running(settings(n_ctx=2048, api_key="k"), batcher) as s:
        del s.client.headers["Authorization"]
        wrong = {name: value + "x" for name, value in header.items()}
        for headers in ({}, wrong):
            refused = error_of(s.client.post(PATH, json=body_of(), headers=headers), 401)
            assert refused["type"] == "authentication_error" and "x-api-key" in refused["message"]
            r = s.client.get("/slots", headers=headers)
            assert r.status_code == 401 and r.json()["error"]["code"] == "invalid_api_key"
        assert s.client.post(PATH, json=body_of(max_tokens=1), headers=header).status_code == 200
        assert s.client.get("/slots", headers=header).status_code == 200
        both = {"Authorization": "Bearer wrong", "x-api-key": "k"}
        assert s.client.get("/slots", headers=both).status_code == 200


def test_a_named_chat_format(batcher):
    """It answers, with the one tool that must be called; what it cannot do is said."""
    with running(settings(n_ctx=2048, chat_format="chatml-function-calling"), batcher) as s:
        got = whole(s)
        assert got["content"][0]["text"] and told(streamed(s)) == told(got)
        more = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "train"}, "max_tokens": WHOLE}
        got = whole(s, **more)
        assert got["stop_reason"] == "tool_use" and got["content"][0]["input"]["city"]
        assert told(streamed(s, **more)) == told(got)
        begun = [RIVERS, {"role": "assistant", "content": "1."}]
        error = error_of(s.client.post(PATH, json=body_of(messages=begun)), 400)
        assert error["message"].startswith("messages: a chat format")
        error = error_of(s.client.post(COUNT, json={"messages": [RIVERS]}), 400)
        assert "cannot be counted" in error["message"]
