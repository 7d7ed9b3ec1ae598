"""The server through the official openai client: what it says is what EagleLlama says."""

import asyncio
import json
import math
from typing import Literal

import pydantic
import pytest
from client_tools import openai_client, refused
from server_tools import CHAT, ENDLESS, ask, events, idle, metric, running, settings, until

from eagle3_llama import EagleLlama
from eagle3_llama.models import smollm2
from eagle3_llama.runtime.drafted import DRAFTERS
from eagle3_llama.server.http.stream import joined
from eagle3_llama.server.jobs.job import Choice, Event, Mailbox

WHOLE = 300  # tokens; no text of the schemas here is longer, whatever the model says
RIVERS = [{"role": "user", "content": "Name three rivers."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


@pytest.fixture(scope="module")
def server():
    with running(settings(max_n=4)) as s:
        yield s


@pytest.fixture(scope="module")
def client(server):
    return openai_client(server)


@pytest.fixture(scope="module")
def alone():
    """EagleLlama by itself, decoding plainly."""
    llm = EagleLlama(
        str(smollm2("Q8_0")), n_ctx=1024, n_threads=2, n_threads_batch=2, flash_attn=True, verbose=False
    )
    yield llm
    llm.close()


def chat(client, messages=RIVERS, **more):
    return client.chat.completions.create(
        model="any", messages=messages, **{"max_tokens": 24, "temperature": 0, **more}
    )


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.8, "seed": 3, "top_p": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 0.8, "seed": 4, "extra_body": {"min_p": 0.2, "top_k": 20, "repeat_penalty": 1.2}},
        {"temperature": 0.8, "seed": 5, "extra_body": {"mirostat_mode": 2, "mirostat_tau": 3.0}},
        {"temperature": 0, "logit_bias": {"260": -100, "28": 5}},
        {"temperature": 0, "stop": ["river", "2."]},
        {"temperature": 0.7, "seed": 6, "extra_body": {"speculative": {"n_max": 4}}},
        {"temperature": 0.7, "seed": 6, "extra_body": {"speculative": {"enabled": False}}},
        {"temperature": 0.7, "seed": 6, "extra_body": {"speculative": {"tree": "12x3x4"}}},
    ],
    ids=lambda m: ",".join(k for k in {**m, **m.get("extra_body", {})} if k not in ("seed", "extra_body")),
)
def test_the_text_is_eagle_llamas(client, alone, more):
    got = chat(client, **more)
    said = {
        k: v
        for k, v in {**more, **more.get("extra_body", {})}.items()
        if k not in ("extra_body", "speculative")
    }
    if "logit_bias" in said:
        said["logit_bias"] = {int(k): v for k, v in said["logit_bias"].items()}
    expected = alone.create_chat_completion(RIVERS, max_tokens=24, **said)["choices"][0]
    assert (
        got.choices[0].message.content == expected["message"]["content"]
        and got.choices[0].finish_reason == expected["finish_reason"]
    )
    details = got.usage.completion_tokens_details
    if more.get("extra_body", {}).get("speculative") == {"enabled": False}:
        assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    assert (
        got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
        and got.usage.completion_tokens <= 24
    )


def test_a_round_s_events_go_out_together():
    """Whoever reads a choice's events is woken once for all that a round brought."""

    async def run():
        mail, taken = Mailbox(), []
        reader = asyncio.create_task(mail.take())
        for event in "abc":
            mail.put_quietly(event)
            await asyncio.sleep(0)
            taken.append(reader.done())
        mail.wake()
        return taken, await asyncio.wait_for(reader, 5)

    assert asyncio.run(run()) == ([False] * 3, ["a", "b", "c"])


def test_streams_say_what_answers_say(client):
    whole = chat(client, temperature=0.8, seed=2, max_tokens=40)
    chunks = list(
        chat(
            client,
            temperature=0.8,
            seed=2,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant" and len({c.id for c in chunks}) == 1
    last = chunks[-1]
    assert not last.choices and last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_positions_sources_and_timings(server):
    """A chunk says where each of its tokens came from; together they are all tokens of the answer."""
    total = 0
    for seed in range(8):  # in none of so many texts might a draft be accepted by chance
        body = {
            "messages": RIVERS,
            "max_tokens": 32,
            "temperature": 0.5,
            "seed": seed,
            "stream": True,
            "logit_bias": ENDLESS["logit_bias"],
            "speculative": {"n_max": 4, "report": True},
        }
        with server.client.stream("POST", CHAT, json=body) as r:
            *chunks, last, done = events(r)
        positions, sources = ([x for c in chunks for x in c["eagle"][k]] for k in ("positions", "sources"))
        usage, timings, totals = last["usage"], last["timings"], last["eagle"]
        assert done is None and len(positions) == usage["completion_tokens"] == timings["tokens"]
        assert len(positions) >= 32  # more where the last one ends within a character
        details = usage["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        assert sum(k > 0 for k in positions) == accepted and max(positions) <= 4
        assert sources == ["head" if k > 0 else "target" for k in positions]  # n_max: the head alone
        assert totals["accepted"] == {**dict.fromkeys(DRAFTERS, 0), "head": accepted}
        assert sum(totals["drafted"].values()) == sum(details.values())
        for c in chunks:
            assert c["choices"][0]["delta"].get("content") or c["eagle"] == {"positions": [], "sources": []}
        assert timings["generation"] > 0 <= timings["queued"]
        total += accepted
        if total:
            break
    assert total > 0


def test_gathered_text_is_one_event():
    """Joins neighbouring texts of one choice. Roles, ends, logprobs and other choices stay unchanged."""
    one, two = Choice(0, 0, chat), Choice(1, 0, chat)

    def event(choice, delta=None, finish=None, logprobs=None, **said):
        said = said or {"delta": delta if isinstance(delta, dict) else {"content": delta}}
        return Event(
            choice,
            {"choices": [{"index": 0, "finish_reason": finish, "logprobs": logprobs, **said}]},
            [1],
            ["text"],
        )

    events = [
        event(one, {"role": "assistant"}),
        event(one, "Rhi"),
        event(one, "ne, "),
        event(two, "no"),
        event(one, "Po"),
        event(one, "", logprobs={}),
        event(one, "a"),
        event(one, "b"),
        event(one, "c"),
        event(one, {}, "stop"),
    ]
    out = joined(events)
    said = [(e.choice.index, e.chunk["choices"][0]["delta"], e.positions) for e in out]
    assert said == [
        (0, {"role": "assistant"}, [1]),
        (0, {"content": "Rhine, "}, [1, 1]),
        (1, {"content": "no"}, [1]),
        (0, {"content": "Po"}, [1]),
        (0, {"content": ""}, [1]),
        (0, {"content": "abc"}, [1, 1, 1]),
        (0, {}, [1]),
    ]
    completion = joined(
        [event(one, text="Rhi"), event(one, text="ne"), event(one, text=", Po", finish="length")]
    )
    assert [(e.chunk["choices"][0]["text"], e.chunk["choices"][0]["finish_reason"]) for e in completion] == [
        ("Rhine", None),
        (", Po", "length"),
    ]
    assert [len(e.positions) for e in completion] == [2, 1] and joined([]) == []
    assert [e.sources for e in completion] == [["text", "text"], ["text"]]


def test_choices_are_seeded_in_order(client, alone):
    """Choice i is the answer to seed + i, streamed or not."""
    expected = [
        alone.create_chat_completion(RIVERS, max_tokens=16, temperature=0.9, seed=20 + i)["choices"][0][
            "message"
        ]["content"]
        for i in range(3)
    ]
    got = chat(client, n=3, seed=20, temperature=0.9, max_tokens=16)
    assert [c.message.content for c in got.choices] == expected and [c.index for c in got.choices] == [
        0,
        1,
        2,
    ]
    assert (
        got.usage.completion_tokens <= 48
        and got.usage.prompt_tokens == chat(client, max_tokens=1).usage.prompt_tokens
    )
    texts = ["", "", ""]
    for c in chat(client, n=3, seed=20, temperature=0.9, max_tokens=16, stream=True):
        texts[c.choices[0].index] += c.choices[0].delta.content or ""
    assert texts == expected


def test_unseeded_requests_differ(client):
    assert (
        len({chat(client, temperature=1.5, max_tokens=16).choices[0].message.content for _ in range(3)}) > 1
    )


def test_tools(client):
    forced = {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": WHOLE,
    }
    messages = [{"role": "user", "content": "How will the weather be in Oslo in the next 3 days?"}]
    answer = chat(client, messages, **forced).choices[0]
    call = answer.message.tool_calls[0]
    assert (
        call.function.name == "weather"
        and answer.finish_reason == "tool_calls"
        and answer.message.content is None
    )
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    name, arguments, ids = "", "", set()
    for c in chat(client, messages, stream=True, **forced):
        for t in c.choices[0].delta.tool_calls or ():
            name, arguments, ids = (
                name + (t.function.name or ""),
                arguments + (t.function.arguments or ""),
                ids | {t.id},
            )
    assert name == "weather" and arguments == call.function.arguments and len(ids - {None}) == 1
    again = [*messages, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert chat(client, again, tools=[WEATHER]).choices[0].message.content is not None
    assert (
        chat(client, messages, **{**forced, "tool_choice": "required"})
        .choices[0]
        .message.tool_calls[0]
        .function.arguments
        == call.function.arguments
    )
    assert chat(client, messages, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls is None


def test_the_clients_own_stream_helper(client):
    """It joins the pieces of a call; names that came twice would be doubled."""
    with client.chat.completions.stream(
        model="any",
        messages=RIVERS,
        tools=[WEATHER],
        temperature=0,
        max_tokens=WHOLE,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ) as s:
        message = s.get_final_completion().choices[0].message
    assert (
        message.tool_calls[0].function.name == "weather"
        and json.loads(message.tool_calls[0].function.arguments)["days"] is not None
    )


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    age: Literal[1, 2, 3]


def test_the_clients_own_models(client):
    person = (
        client.chat.completions.parse(
            model="any", messages=RIVERS, response_format=Person, max_tokens=WHOLE, temperature=0
        )
        .choices[0]
        .message.parsed
    )
    assert isinstance(person, Person)


def test_json(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"enum": [1, 2, 3]}},
        "required": ["name", "age"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    person = json.loads(chat(client, response_format=wanted, max_tokens=WHOLE).choices[0].message.content)
    assert set(person) == {"name", "age"} and person["age"] in (1, 2, 3) and len(person["name"]) <= 10
    assert (
        chat(client, response_format={"type": "json_object"})
        .choices[0]
        .message.content.lstrip()
        .startswith("{")
    )
    either = chat(client, extra_body={"grammar": 'root ::= "yes" | "no"'}).choices[0]
    assert either.message.content in ("yes", "no") and either.finish_reason == "stop"


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": 'tree ::= "x"'}, "root"),
        ({"grammar": 'root ::= root "x"'}, "recursion"),
        ({"grammar": "root ::= [^\\x00-\\U0010FFFF]"}, "no token"),
        ({"grammar": "root ::= " + "(" * 60000}, "grammar"),
        ({"response_format": {"type": "json_object", "schema": {"$ref": "https://example.org/x"}}}, "schema"),
        (
            {
                "response_format": {
                    "type": "json_object",
                    "schema": {"type": "array", "items": {}, "minItems": 10**9},
                }
            },
            "schema",
        ),
        (
            {
                "tools": [{**WEATHER, "function": {"name": "w", "parameters": {"type": "sting"}}}],
                "tool_choice": "required",
            },
            "schema",
        ),
    ],
)
def test_grammars_that_cannot_be(server, bad, said):
    """400 with a reason, and the server goes on: llama.cpp itself would crash on most of these."""
    r = ask(server.client, **bad)
    assert r.status_code == 400 and said in r.json()["error"]["message"], r.text
    assert ask(server.client, max_tokens=4).status_code == 200


def test_chat_logprobs(client, alone):
    """The true ones: plain decoding's."""
    got = chat(client, max_tokens=6, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    expected = alone.create_chat_completion(
        RIVERS, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )["choices"][0]["logprobs"]["content"]
    assert [t.token for t in got] == [t["token"] for t in expected]
    assert all(
        abs(a.logprob - b["logprob"]) < 1e-3 and len(a.top_logprobs) == 3 for a, b in zip(got, expected)
    )
    assert all(math.isclose(max(top.logprob for top in t.top_logprobs), t.logprob) for t in got)  # greedy
    streamed = [
        t
        for c in chat(client, max_tokens=6, logprobs=True, stream=True)
        if c.choices[0].logprobs
        for t in c.choices[0].logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in got] and all(
        t.top_logprobs == [] for t in streamed
    )


def test_completions(client, alone):
    ask_for = {"model": "any", "max_tokens": 12, "temperature": 0}
    prompt = "Once upon a time"
    got = client.completions.create(prompt=prompt, logprobs=2, echo=True, **ask_for)
    expected = alone.create_completion(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    assert got.choices[0].text == prompt + expected and got.choices[0].logprobs.token_logprobs[0] is None
    assert (
        "".join(c.choices[0].text for c in client.completions.create(prompt=prompt, stream=True, **ask_for))
        == expected
    )
    two = client.completions.create(prompt=[prompt, "The sun"], n=2, seed=1, **ask_for)
    assert [c.index for c in two.choices] == [0, 1, 2, 3] and two.choices[0].text == two.choices[
        1
    ].text == expected != two.choices[2].text
    ids = alone.tokenize(prompt.encode(), add_bos=False, special=True)
    assert client.completions.create(prompt=ids, **ask_for).choices[0].text == expected
    usual = client.completions.create(
        prompt=prompt, model="any", temperature=0, logit_bias=ENDLESS["logit_bias"]
    )
    assert 16 <= usual.usage.completion_tokens <= 19  # more where the last one ends within a character


def test_models(client, server):
    model = client.models.list().data[0]
    assert (
        client.models.retrieve(model.id).id == model.id
        and "smollm2" in model.id.lower()
        and "/" not in model.id
    )
    assert model.eagle == {"head": True, "text": True, "n_ctx": 1024, "n_parallel": 3}
    error = refused(lambda: client.models.retrieve("gpt-4/../x"), 404)
    assert error["code"] == "model_not_found"


def test_tokens(server):
    tokens = server.client.post("/tokenize", json={"content": "Hello<|im_end|>"}).json()["tokens"]
    assert server.client.post("/detokenize", json={"tokens": tokens[:-1]}).json() == {"content": "Hello"}
    assert len(
        server.client.post("/tokenize", json={"content": "Hello<|im_end|>", "parse_special": False}).json()[
            "tokens"
        ]
    ) > len(tokens)
    assert server.client.post("/detokenize", json={"tokens": [49152]}).status_code == 400
    assert server.client.post("/detokenize", json={"tokens": []}).json() == {"content": ""}


def test_too_long_a_prompt(client):
    error = refused(lambda: chat(client, [{"role": "user", "content": "word " * 2000}]))
    assert error["code"] == "context_length_exceeded" and "1024" in error["message"]


def test_content_in_parts(client):
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Name three "}, {"type": "text", "text": "rivers."}],
        }
    ]
    assert chat(client, parts).choices[0].message.content == chat(client).choices[0].message.content
    brief = chat(client, [{"role": "developer", "content": "Be brief."}, *RIVERS])
    assert brief.choices[0].message.content is not None


def test_fields_that_change_nothing(client):
    same = chat(
        client,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        logprobs=False,
        parallel_tool_calls=False,
        prediction={"type": "content", "content": "x"},
        response_format={"type": "text"},
        extra_body={"safety_identifier": "x"},
    )
    assert same.choices[0].message.content == chat(client).choices[0].message.content
    few = chat(client, max_tokens=None, max_completion_tokens=3, logit_bias=ENDLESS["logit_bias"])
    assert 3 <= few.usage.completion_tokens <= 6  # more where the third ends within a character


def test_what_other_servers_add(client):
    """Clients send messages, calls and tools back with fields of whoever wrote them."""
    marked = [{"type": "text", "text": RIVERS[0]["content"], "cache_control": {"type": "ephemeral"}}]
    call = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c", "content": "1"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    same = [
        chat(client, [{"role": "user", "content": parts, **more}], extra_body=ignored)
        for parts, more, ignored in (
            (RIVERS[0]["content"], {}, {}),
            (marked, {"reasoning_details": [], "index": 0}, {"keep_alive": "5m", "cache_prompt": True}),
        )
    ]
    assert same[0].choices[0].message.content == same[1].choices[0].message.content
    assert same[0].system_fingerprint and same[0].system_fingerprint == same[1].system_fingerprint
    more = [{**tools[0], "cache_control": {}, "function": {**tools[0]["function"], "input_examples": []}}]
    assert chat(client, [*RIVERS, turn, told], tools=more, tool_choice="none").choices
    penalised = chat(client, extra_body={"repetition_penalty": 1.7})
    assert penalised.choices[0].message.content != same[0].choices[0].message.content
    assert penalised.choices == chat(client, extra_body={"repeat_penalty": 1.7}).choices
    both = {"repeat_penalty": 1.7, "repetition_penalty": 1.6}
    error = refused(lambda: chat(client, extra_body=both))
    assert "differs from repeat_penalty" in error["message"]


def test_metrics(server):
    drafted = {"max_tokens": 24, "logit_bias": ENDLESS["logit_bias"], "speculative": {"n_max": 3}}
    model = f'model="{server.app.state.server.name}"'
    for seed in range(8):  # in none of so many texts might a draft be accepted by chance
        assert ask(server.client, temperature=0.5, seed=seed, **drafted).status_code == 200
        if metric(server, "eagle3_accepted_at_total", model, 'position="1"') > 0:
            break
    assert metric(server, "eagle3_requests_total", model, 'route="/v1/chat/completions"', 'status="200"') >= 1
    for name in (
        "eagle3_rounds_total",
        "eagle3_tokens_total",
        "eagle3_drafted_total",
        "eagle3_time_to_first_token_seconds_count",
        "eagle3_time_per_token_seconds_count",
        "eagle3_kv_size",
    ):
        assert metric(server, name, model) > 0, name
    assert metric(server, "eagle3_accepted_at_total", model, 'position="1"') > 0
    until(lambda: idle(server))
    for what in ("drafted", "accepted"):
        by = [metric(server, f"eagle3_{what}_from_total", model, f'source="{s}"') for s in DRAFTERS]
        assert sum(by) == metric(server, f"eagle3_{what}_total", model) and by[0] > 0
    assert metric(server, "eagle3_waiting", model) == 0 <= metric(server, "eagle3_slots_busy", model)


def test_the_page(server):
    r = server.client.get("/")
    policy = r.headers["content-security-policy"]
    assert (
        r.status_code == 200
        and r.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in policy
    )
    assert "http:" not in policy and "https:" not in policy and "*" not in policy
