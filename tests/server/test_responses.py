"""POST /v1/responses with OpenAI's client: items, events, tools, stored answers, formats, errors."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_tools import PLACE, openai_client, refused
from event_checks import response_event, response_of
from server_tools import Blocked, ask, idle, running, settings, until
from template_servers import chat_fixtures
from tiers import each

from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.http import stream
from eagle3_llama.server.responses import routes, store
from eagle3_llama.server.responses.store import MAX_STORED, ResponseStore

TOOLS = [
    {"type": "function", "name": name, "description": f"Looks up the {name}.", "parameters": PLACE}
    for name in ("weather", "train")
]
ARGUMENTS = '{"city": "Oslo", "day": 3}'
CALL = f'<tool_call>\n{{"name": "train", "arguments": {ARGUMENTS}}}\n</tool_call>'
OFF = {"chat_template_kwargs": {"enable_thinking": False}}  # no thoughts
KINDS = ["own", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct"]
KEYS = ("one", "two")


def own(**more):
    """Settings with the demo model's own template."""
    return settings(n_ctx=4096, template_timeout=20.0, api_key=KEYS, **more)


batcher, servers = chat_fixtures(4096, {kind: kind for kind in KINDS}, api_key=KEYS)


@pytest.fixture(scope="module")
def server(servers):
    return servers["Qwen-Qwen3-0.6B"]


def client_of(server, key=KEYS[0]):
    return openai_client(server, key)


def checked(response):
    """By OpenAI's model of it."""
    from openai.types.responses import Response

    return Response.model_validate(response.to_dict())


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def create(client, asked="Name three rivers.", *, extra=(), **more):
    """A response, checked by OpenAI's model of it."""
    given = {"model": "any", "temperature": 0, "max_output_tokens": 12, **more}
    out = client.responses.create(input=asked, extra_body={**OFF, **dict(extra)}, **given)
    return checked(out)


def streamed(client, asked="Name three rivers.", *, extra=(), **more):
    """(the events, the response at their end), checked by OpenAI's models and against each other."""
    given = {"model": "any", "temperature": 0, "max_output_tokens": 12, **more}
    told = client.responses.create(input=asked, stream=True, extra_body={**OFF, **dict(extra)}, **given)
    events = [response_event(e.to_dict()) for e in told]
    return events, response_of(events)


def written(text):
    """What makes the model write this text."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


def content(response):
    """The output without ids: thoughts, texts and calls."""
    texts = lambda item: "".join(part.text for part in item.content)
    calls = lambda item: (item.name, item.arguments) if item.type == "function_call" else texts(item)
    return [(item.type, calls(item)) for item in response.output]


@pytest.mark.parametrize("kind", each(KINDS, KINDS[:2]))
def test_a_text(servers, kind):
    """Its text is the chat's, whole and streamed; usage is the chat's, under this API's names."""
    s = servers[kind]
    chat = ask(s.client, max_tokens=8, **OFF).json()
    made = create(client_of(s), max_output_tokens=8)
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete" and made.output[0].content[0].annotations == []
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"] and made.usage.output_tokens == 8
    assert made.usage.input_tokens_details.cached_tokens > 0
    assert made.model == chat["model"] and made.created_at >= chat["created"]
    assert content(streamed(client_of(s), max_output_tokens=8)[1]) == content(made)
    with client_of(s).responses.stream(
        model="any", input="Name three rivers.", temperature=0, max_output_tokens=90, extra_body=OFF
    ) as told:
        *_, last = told
        if last.type == "response.completed":  # the client's own sum of the events
            assert told.get_final_response().output_text.startswith(made.output_text)


def test_items_are_messages(server, client):
    """The prompt is the chat's of the same messages, however they are written."""
    messages = [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Name three rivers."},
    ]
    chat = ask(server.client, messages=messages, max_tokens=12, **OFF).json()
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "And kind."}]},
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "index": 0}],
        },
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Name three"},
                {"type": "input_text", "text": " rivers."},
            ],
        },
    ]
    made = create(client, items, instructions="Be brief.")
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"] and made.instructions == "Be brief."


CALLED = ("function_call", ("train", ARGUMENTS))
WRITTEN = [
    (f"I look. {CALL}", [("message", "I look."), CALLED]),
    (f"<think>\nHm.\n</think>\n\n{CALL}", [("reasoning", "Hm.\n"), CALLED]),
    (CALL, [CALLED]),
    ("<think>\nHm, so.\n</think>\n\nHello.", [("reasoning", "Hm, so.\n"), ("message", "Hello.")]),
]


@pytest.mark.parametrize("text, expected", each(WRITTEN, WRITTEN[:2]))
def test_thoughts_texts_and_calls_are_items(client, text, expected):
    more = {"tools": TOOLS, "max_output_tokens": 200, "extra": {**written(text), "chat_template_kwargs": {}}}
    made = create(client, **more)
    bare = lambda response: [(k, v.strip() if k == "message" else v) for k, v in content(response)]
    assert made.status == "completed" and bare(made) == expected
    assert bare(streamed(client, **more)[1]) == expected
    thoughts = made.usage.output_tokens_details.reasoning_tokens
    assert (thoughts > 0) is (expected[0][0] == "reasoning") and thoughts < made.usage.output_tokens


def test_tools_of_a_namespace(server, client):
    """A call names its namespace, also where it comes back. What the server would run is left out."""
    space = {"type": "namespace", "name": "mcp__rail", "description": "Trains.", "tools": TOOLS}
    tools = [{"type": "web_search", "external_web_access": False}, space]
    more = {"tools": tools, "max_output_tokens": 200}
    text = CALL.replace('"train"', '"mcp__rail__train"')
    made = create(client, extra=written(text), **more)
    (call,) = made.output
    assert (call.type, call.name, call.namespace, call.arguments) == CALLED[:1] + (
        "train",
        "mcp__rail",
        ARGUMENTS,
    )
    assert content(streamed(client, extra=written(text), **more)[1]) == content(made)
    assert [tool.type for tool in made.tools] == ["namespace"] and made.tools[0].tools[1].name == "train"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "At nine."}
    stored = create(client, [result], previous_response_id=made.id, **{**more, "max_output_tokens": 4})
    asked = [{"role": "user", "content": "Name three rivers."}, call.to_dict(), result]
    body = {"input": asked, "tools": tools, "max_output_tokens": 4, **OFF}
    for told in (False, True):
        r = server.client.post("/v1/responses", json={**body, "stream": told})
        assert r.status_code == 200 and r.headers["x-left-out"] == "web_search"
    assert (
        stored.usage.input_tokens
        == server.client.post("/v1/responses", json=body).json()["usage"]["input_tokens"]
    )
    forced = create(client, tool_choice=TRAIN, **more).output
    assert (forced[0].name, forced[0].namespace) == ("train", "mcp__rail")


TRAIN = {"type": "function", "name": "train"}
CHOICES = [
    ("required", {"weather", "train"}),
    (TRAIN, {"train"}),
    ({"type": "allowed_tools", "mode": "required", "tools": [TRAIN]}, {"train"}),
]


CASES = [(kind, *choice) for kind in KINDS for choice in CHOICES]


@pytest.mark.parametrize("kind, chosen, names", each(CASES, [CASES[0], CASES[4], CASES[5]]))
def test_tools_are_enforced_and_their_results_come_back(servers, kind, chosen, names):
    client = client_of(servers[kind])
    more = {"tools": TOOLS, "tool_choice": chosen, "parallel_tool_calls": False, "max_output_tokens": 200}
    made = create(client, "What is it like in Oslo?", **more)
    (call,) = made.output
    arguments = json.loads(call.arguments)
    assert call.name in names and arguments["day"] <= 31 and made.status == "completed"
    assert content(streamed(client, "What is it like in Oslo?", **more)[1]) == content(made)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    asked = [{"role": "user", "content": "What is it like in Oslo?"}, call.to_dict(), result]
    whole = create(client, asked, tools=TOOLS, tool_choice="none")
    stored = create(client, [result], previous_response_id=made.id, tools=TOOLS, tool_choice="none")
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        {"role": "user", "content": "What is it like in Oslo?"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "Rain."},
    ]
    chat = ask(servers[kind].client, messages=messages, max_tokens=12, **OFF).json()
    assert whole.output_text == stored.output_text == chat["choices"][0]["message"]["content"] != ""
    assert whole.usage.input_tokens == stored.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_call_that_is_cut(client):
    """Its answer is incomplete. What a stream has sent of it is no call of the conversation."""
    more = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "train"}, "max_output_tokens": 9}
    made = create(client, **more)
    assert made.status == "incomplete" and not [i for i in made.output if i.type == "function_call"]
    last = streamed(client, **more)[1]
    assert [item.status for item in last.output] == ["incomplete"] * len(last.output)
    assert create(client, "Go on.", previous_response_id=last.id).output_text


@pytest.mark.parametrize("stop", each(["name", "slo"], ["slo"]))
def test_a_stop_string_within_a_call(client, stop):
    """It is like a limit there. The conversation goes on from the stored answer."""
    more = {"tools": TOOLS, "max_output_tokens": 200, "extra": {**written(CALL), "stop": stop}}
    whole = create(client, **more)
    _, told = streamed(client, **more)
    assert not [item for item in whole.output if item.type == "function_call"]
    for made in (whole, told):
        assert made.status == "incomplete" and {item.status for item in made.output} == {"incomplete"}
        assert create(client, "Go on.", previous_response_id=made.id, tools=TOOLS).output


def test_three_turns(server, client):
    """With previous_response_id: the texts are those of the whole history; nobody else sees the answers."""
    history, before = [], None
    for text in ("Name three rivers.", "And three lakes?", "Which is the longest?"):
        made = create(client, text, previous_response_id=before, instructions="Be brief.")
        history.append({"role": "user", "content": text})
        whole = create(client, history, instructions="Be brief.", store=False)
        assert made.output_text == whole.output_text and made.previous_response_id == before
        assert made.usage.input_tokens == whole.usage.input_tokens
        history += [item.to_dict() for item in made.output]
        before = made.id
    kept = checked(client.responses.retrieve(before))
    assert kept.to_dict() == made.to_dict()
    events = streamed(client, "Thanks.", previous_response_id=before)
    assert client.responses.retrieve(events[1].id).to_dict() == events[1].to_dict()
    other = client_of(server, KEYS[1])
    assert refused(lambda: other.responses.retrieve(before), 404)["code"] == "response_not_found"
    assert refused(lambda: create(other, previous_response_id=before), 404)["param"] == "previous_response_id"
    assert refused(lambda: other.responses.delete(before), 404)
    refused(lambda: client.responses.retrieve(whole.id), 404)  # store: false
    client.responses.delete(before)
    refused(lambda: client.responses.retrieve(before), 404)
    refused(lambda: create(client, previous_response_id=before), 404)


def test_the_store_is_bounded():
    """By bytes and by number. The one that was not used for longest goes."""
    kept = ResponseStore(1000)
    for i in range(5):
        kept.keep("a", {"id": f"r{i}", "text": "x" * 250}, [])
        kept.items("a", "r0")
    kept.keep("b", {"id": "r9"}, [{"n": 1}])
    assert [i for i in range(5) if found(kept, "a", f"r{i}")] == [0, 3, 4]
    kept.keep("a", {"id": "large", "text": "x" * 1000}, [])
    assert not found(kept, "a", "large") and found(kept, "a", "r0")
    assert kept.items("b", "r9") == [{"n": 1}] and not found(kept, "b", "r0")
    kept.delete("a", "r0")
    many = ResponseStore(1 << 30)
    for i in range(MAX_STORED + 1):
        many.keep("a", {"id": str(i)}, [])
    assert not found(many, "a", "0") and found(many, "a", "1")


def found(kept, client, response_id):
    try:
        return bool(kept.response(client, response_id))
    except ApiError as e:
        assert e.status == 404
        return False


def test_a_server_that_stores_nothing(batcher):
    with running(own(response_store=0), batcher) as s:
        client = client_of(s)
        made = create(client, store=True)
        assert made.output_text
        error = refused(lambda: create(client, previous_response_id=made.id), 404)
        assert "--response-store 0" in error["message"]


def test_formats_are_enforced(servers):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 9}},
        "required": ["n"],
    }
    odd = {**schema, "properties": {"n": {"type": "number", "multipleOf": 9}}}
    form = lambda schema, **more: {"format": {"type": "json_schema", "name": "x", "schema": schema, **more}}
    for kind in KINDS[:2]:
        client = client_of(servers[kind])
        made = create(client, "Say 1000.", text=form(schema), max_output_tokens=60)
        assert 3 <= json.loads(made.output_text)["n"] <= 9 and made.text.format.schema_ == schema
        assert content(streamed(client, "Say 1000.", text=form(schema), max_output_tokens=60)[1]) == content(
            made
        )
        error = refused(lambda: create(client, text=form(odd, strict=True)))
        assert error["param"] == "text.format" and error["message"].startswith("text.format: ")
        assert create(client, text=form(odd, strict=False)).output_text
        text = create(client, "A dog.", text={"format": {"type": "json_object"}}, max_output_tokens=9)
        assert text.output_text.lstrip().startswith("{")


def test_logprobs(client):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = create(client, extra={}, **more)
    (part,) = made.output[0].content
    assert "".join(t.token for t in part.logprobs) == part.text and part.logprobs
    assert {len(t.top_logprobs) for t in part.logprobs} == {2}
    events, last = streamed(client, **more)
    assert last.output[0].content[0].logprobs == part.logprobs
    deltas = [t.token for e in events if e.type == "response.output_text.delta" for t in e.logprobs]
    assert "".join(deltas) == part.text
    extra = {**written("<think>\nHm, so.\n</think>\n\nHello."), "chat_template_kwargs": {}}
    thought = create(client, extra=extra, max_output_tokens=200, **more).output[-1].content[0]
    assert "".join(t.token for t in thought.logprobs).strip() == thought.text.strip() == "Hello."
    last = streamed(client, extra=extra, max_output_tokens=200, **more)[1].output[-1].content[0]
    assert last.text == thought.text and last.logprobs[-1] == thought.logprobs[-1]


def test_fields_of_the_request_come_back(client):
    more = {"metadata": {"a": "b"}, "user": "u", "top_p": 0.5, "reasoning": {"effort": "low"}, "tools": TOOLS}
    made = create(client, truncation="auto", tool_choice="none", parallel_tool_calls=False, **more)
    assert made.metadata == {"a": "b"} and made.user == "u" and made.top_p == 0.5
    assert made.reasoning.effort == "low" and made.tools[0].name == "weather" and made.tool_choice == "none"
    assert made.truncation == "disabled" and made.parallel_tool_calls is False
    assert made.max_output_tokens == 12 and made.temperature == 0


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
LONG = {"role": "user", "content": "one two " * 5000}
ORPHAN = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    "param, word, body",
    [
        ("input[0].content[0]", "text alone", {"input": [IMAGE]}),
        ("input[0].type", "item_reference", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input[0]", "needs role", {"input": [{"content": "x"}]}),
        ("input", "no call 'c'", {"input": [ORPHAN]}),
        ("input", "empty", {"input": []}),
        ("input", "context", {"input": [LONG]}),
        ("tool_choice", "no web_search", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("tool_choice", "no tool 'no'", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}),
        ("tool_choice.type", "web_search", {"tool_choice": {"type": "web_search"}}),
        ("max_tokens", "max_output_tokens", {"max_tokens": 9}),
        ("instruction", "instructions", {"instruction": "x"}),
        ("text.formats", "format", {"text": {"formats": {}}}),
        ("text.format", "name and schema", {"text": {"format": {"type": "json_schema"}}}),
        ("background", "background", {"background": True}),
        ("conversation", "previous_response_id", {"conversation": "conv_1"}),
        ("max_output_tokens", "greater", {"max_output_tokens": 0}),
    ],
)
def test_what_is_refused(server, param, word, body):
    for path in ("/v1/responses", "/responses"):
        r = server.client.post(path, json={"model": "any", "input": "Hi", **body})
        error = r.json()["error"]
        assert r.status_code == 400 and error["param"] == param and word in error["message"], r.text
    until(lambda: idle(server))


def test_a_stream_that_fails(batcher, monkeypatch):
    """After it has begun: an event `error`, then response.failed."""
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.01)  # it begins although no token can come
    with running(own(timeout=0.5), batcher) as s, Blocked(s):
        r = s.client.post("/responses", json={"input": "Tell a story.", "stream": True})
    lines = r.text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [e["type"] for e in events] and names[-2:] == ["error", "response.failed"]
    assert [response_event(e).sequence_number for e in events] == list(range(len(events)))
    assert events[-2]["code"] == "deadline"
    assert events[-1]["response"]["error"]["code"] == "server_error"


def test_input_items(server, client, monkeypatch):
    """The conversation before the answer, in pages; each item can be sent again."""
    called = {"type": "function_call", "call_id": "c", "name": "train", "arguments": ARGUMENTS}
    result = {"type": "function_call_output", "call_id": "c", "output": "At nine."}
    first = create(client, [{"role": "user", "content": "When?"}, called, result])
    then = create(client, "And back?", previous_response_id=first.id)
    items = list(client.responses.input_items.list(then.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"] + [
        item.type for item in first.output
    ] + ["message"]
    assert items[0].content[0].text == "When?" and items[-1].content[0].text == "And back?"
    assert items[2].output == "At nine." and len({item.id for item in items}) == len(items)
    assert list(client.responses.input_items.list(then.id, limit=2)) == items[::-1]  # page by page
    with monkeypatch.context() as m:  # however large the items are, a page is not
        m.setattr(store, "MAX_PAGE_BYTES", 1)
        assert list(client.responses.input_items.list(then.id, order="asc")) == items
    again = [item.model_dump(exclude_none=True) for item in items]
    assert create(client, again).output_text == then.output_text
    url = f"/v1/responses/{first.id}/input_items"
    for query in ("limit=0", "limit=101", "order=up", "after=no"):
        r = server.client.get(f"{url}?{query}")
        assert r.status_code == 400 and r.json()["error"]["param"] == query.split("=")[0]
    for gone in (client_of(server, KEYS[1]).responses, client.responses):
        refused(lambda: gone.input_items.list(first.id if gone is not client.responses else "no"), 404)


def test_only_a_page_of_items_is_read():
    class Read(list):
        def __getitem__(self, i):
            seen.add(i)
            return super().__getitem__(i)

    seen, items = (
        set(),
        Read(json.dumps({"type": "message", "role": "user", "content": "x"}).encode() for _ in range(99)),
    )
    made = store.page("resp_a", items, 3, "asc", "msg_a_49")
    assert [item["id"] for item in made["data"]] == ["msg_a_50", "msg_a_51", "msg_a_52"] and made["has_more"]
    assert seen == {49, 50, 51, 52}
    for no in ("msg_a_99", "msg_b_4", "fc_a_4", "msg_a_-1", "msg_a_4.", "msg_a_" + "9" * 5000, "", "_"):
        with pytest.raises(ApiError, match="there is no item"):
            store.page("resp_a", items, 3, "asc", no)


def test_items_are_read_beside_the_event_loop(server, client, monkeypatch):
    """And whoever asks for them pays."""
    made, begun, go, charged = create(client), threading.Event(), threading.Event(), []
    held = lambda *args: (begun.set(), go.wait(60), store.page(*args))[2]
    monkeypatch.setattr(routes, "page", held)
    shares = server.app.state.server.quota
    monkeypatch.setattr(shares, "charge", lambda who, seconds: charged.append(who))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.client.get, f"/v1/responses/{made.id}/input_items")
        assert begun.wait(60) and server.client.get("/health").status_code == 200
        go.set()
        assert asked.result().json()["object"] == "list"
    assert charged.count("key 0") >= 2  # for the request, and for the thread


def test_nothing_can_be_cancelled(client):
    assert "has ended" in refused(lambda: client.responses.cancel(create(client).id))["message"]
    refused(lambda: client.responses.cancel("resp_no"), 404)


def test_routes_without_v1(server):
    made = server.client.post("/responses", json={"input": "Hi", "max_output_tokens": 4, **OFF}).json()
    path = f"/responses/{made['id']}"
    assert server.client.get(path).json() == made
    assert server.client.get(f"{path}?stream=true").status_code == 400
    gone = server.client.delete(f"/v1{path}").json()
    assert gone == {"id": made["id"], "object": "response", "deleted": True}
    assert server.client.get(path).status_code == 404


def test_a_named_chat_format(batcher):
    """llama-cpp-python's own: texts, and the named tool."""
    named = settings(n_ctx=4096, chat_format="chatml", api_key=KEYS)
    with running(named, batcher) as s:
        client = client_of(s)
        assert content(streamed(client)[1]) == content(create(client))
        assert create(client).output_text


def test_a_report(client):
    """`speculative.report` adds who drafted to the response."""
    extra = {"speculative": {"report": True}}
    assert "drafted" in create(client, extra=extra).to_dict()["eagle"]
    assert "drafted" in streamed(client, extra=extra)[1].to_dict()["eagle"]
