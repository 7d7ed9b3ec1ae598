"""OpenAI's client: chat completions and completions."""

import json

import openai
import pytest
from client_tools import DIGIT, NAMED, OSLO, RIVERS, TOOLS, WHOLE, call_of, fits, tool, written
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, Field
from server_tools import ENDLESS

OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def client(server):
    return client_of(server)


@pytest.fixture
def qwen(servers):
    return client_of(servers["qwen"])


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client, messages=RIVERS, **more):
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    given = {"max_tokens": 16, "temperature": 0, **more}
    return client.chat.completions.create(model="any", messages=asked, **given)


def joined(chunks):
    """A stream as one message: content, thoughts, calls (name, arguments), finish_reason, usage."""
    out = {"content": "", "thoughts": "", "calls": [], "finish_reason": None, "usage": None}
    for chunk in chunks:
        out["usage"] = chunk.usage or out["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            out["content"] += delta.content or ""
            out["thoughts"] += getattr(delta, "reasoning_content", None) or ""
            out["finish_reason"] = choice.finish_reason or out["finish_reason"]
            for call in delta.tool_calls or ():
                if call.id:
                    assert call.index == len(out["calls"])
                    out["calls"].append([call.function.name, ""])
                out["calls"][call.index][1] += call.function.arguments or ""
    return out


def calls_of(message):
    return [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]


def test_chat_stream_and_usage(client):
    more = {"logit_bias": ENDLESS["logit_bias"]}
    whole = ask(client, **more)
    told = joined(ask(client, stream=True, stream_options={"include_usage": True}, **more))
    assert told["content"] == whole.choices[0].message.content != ""
    assert told["finish_reason"] == whole.choices[0].finish_reason == "length"
    for usage in (whole.usage, told["usage"]):
        assert usage.completion_tokens == 16 and usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.total_tokens == usage.prompt_tokens + 16


def test_the_clients_own_sum_of_a_stream(client):
    more = {"temperature": 0, "extra_body": written("Hello there, you.")}
    user = [{"role": "user", "content": RIVERS}]
    with client.chat.completions.stream(model="any", messages=user, max_tokens=40, **more) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "Hello there, you."


def test_choices_stop_seed_and_bias(server, client):
    several = ask(client, n=2, temperature=0.9, seed=5)
    texts = [choice.message.content for choice in several.choices]
    assert len(texts) == 2 and texts == [
        ask(client, temperature=0.9, seed=seed).choices[0].message.content for seed in (5, 6)
    ]
    text = ask(client).choices[0].message.content
    word = text.split()[2]
    stopped = ask(client, stop=[word]).choices[0]
    assert stopped.message.content == text[: text.index(word)] and stopped.finish_reason == "stop"
    first = ask(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].token
    (token,) = server.client.post("/tokenize", json={"content": first}).json()["tokens"]
    assert not ask(client, logit_bias={str(token): -100}).choices[0].message.content.startswith(first)


def test_logprobs_have_bytes_and_a_fingerprint(client):
    more = {"logprobs": True, "top_logprobs": 2, "logit_bias": ENDLESS["logit_bias"]}
    whole = ask(client, **more)
    tokens = whole.choices[0].logprobs.content
    chunks = list(ask(client, stream=True, **more))
    parts = [choice.logprobs.content for c in chunks for choice in c.choices if choice.logprobs]
    assert [t.token for part in parts for t in part] == [t.token for t in tokens]
    assert len(tokens) == 16 and all(len(t.top_logprobs) == 2 for t in tokens)
    text = b"".join(bytes(t.bytes) for t in tokens).decode(errors="ignore")
    assert text.startswith(whole.choices[0].message.content[:-4])
    assert {c.system_fingerprint for c in (whole, *chunks)} == {whole.system_fingerprint} != {None}


def test_auto_finds_what_the_model_calls(qwen):
    """Written by the model after examples in the conversation, and by a grammar, streamed too."""
    earlier = []
    for city, day in (("Rome", 4), ("Paris", 7), ("Berlin", 9), ("Madrid", 2)):
        function = {"name": "train", "arguments": json.dumps({"city": city, "day": day})}
        earlier += [
            {"role": "user", "content": f"train {city} {day}"},
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        ]
    asked = [*earlier, {"role": "user", "content": "train Oslo 3"}]
    more = {"tools": TOOLS, "max_tokens": WHOLE}
    two = f"{call_of('train', city='Oslo', day=3)}\n{call_of('weather', city='Bergen', day=4)}"
    for extra in ({}, written(two)):
        choice = ask(qwen, asked, extra_body=extra, **more).choices[0]
        assert choice.finish_reason == "tool_calls" and not (choice.message.content or "").strip()
        calls = calls_of(choice.message)
        assert calls and all(fits(json.loads(arguments)) for _, arguments in calls)
        told = joined(ask(qwen, asked, stream=True, extra_body=extra, **more))
        assert told["calls"] == calls and told["finish_reason"] == "tool_calls"
    assert [name for name, _ in calls] == ["train", "weather"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_required_with_one_tool_and_several(client, n):
    tools = [tool(name) for name in ("weather", "train", "hotel")[:n]]
    more = {"tools": tools, "tool_choice": "required", "max_tokens": WHOLE, "parallel_tool_calls": False}
    choice = ask(client, OSLO, **more).choices[0]
    ((name, arguments),) = calls_of(choice.message)
    assert choice.finish_reason == "tool_calls" and name in ("weather", "train", "hotel")[:n]
    assert fits(json.loads(arguments)) and not choice.message.content
    assert joined(ask(client, OSLO, stream=True, **more))["calls"] == [[name, arguments]]


@pytest.mark.parametrize("name", ["weather", "train"])
def test_a_named_tool_is_called(client, name):
    """Whichever the question suggests; and once, as the request does not ask for several calls."""
    chosen = {"type": "function", "function": {"name": name}}
    more = {"tools": TOOLS, "tool_choice": chosen, "max_tokens": WHOLE}
    ((called, arguments),) = calls_of(ask(client, OSLO, **more).choices[0].message)
    assert called == name and fits(json.loads(arguments))
    assert joined(ask(client, OSLO, stream=True, **more))["calls"] == [[name, arguments]]


def test_a_call_that_is_cut_is_none(client):
    more = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 9}
    choice = ask(client, **more).choices[0]
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert joined(ask(client, stream=True, **more))["finish_reason"] == "length"


def test_allowed_tools(client):
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    more = {"tool_choice": allowed, "max_tokens": WHOLE, "parallel_tool_calls": False}
    ((name, arguments),) = calls_of(ask(client, OSLO, tools=TOOLS, **more).choices[0].message)
    assert name == "train" and fits(json.loads(arguments))


def test_calls_come_back(client):
    """As model_dump(), as the object, with fields of other servers, and with results as parts."""
    more = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": WHOLE, "parallel_tool_calls": False}
    message = ask(client, OSLO, **more).choices[0].message
    call = message.tool_calls[0]
    user = {"role": "user", "content": OSLO}
    dumped = message.model_dump()
    odd = {
        **message.model_dump(exclude_none=True),
        "reasoning": None,
        "reasoning_details": [{"type": "x"}],
        "tool_calls": [{**call.model_dump(), "index": 0, "parsed_arguments": {}}],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    parts = [{"type": "text", "text": "Rain.", "cache_control": {"type": "ephemeral"}}]
    answers = [
        ask(client, [user, echo, {**result, "content": content}], tools=TOOLS, tool_choice="none")
        for echo, content in ((dumped, "Rain."), (message, "Rain."), (odd, "Rain."), (dumped, parts))
    ]
    assert isinstance(message, ChatCompletionMessage)
    assert len({a.choices[0].message.content for a in answers}) == 1
    assert len({a.usage.prompt_tokens for a in answers}) == 1


def test_thoughts_are_apart_and_come_back(qwen):
    text = "<think>\nHm, so.\n</think>\n\nHello."
    message = ask(qwen, max_tokens=WHOLE, extra_body=written(text)).choices[0].message
    assert message.reasoning_content.strip() == "Hm, so." and message.content.strip() == "Hello."
    told = joined(ask(qwen, max_tokens=WHOLE, stream=True, extra_body=written(text)))
    assert told["thoughts"] == message.reasoning_content and told["content"].strip() == "Hello."
    user = {"role": "user", "content": RIVERS}
    assert ask(qwen, [user, message, user], extra_body=OFF).choices[0].message.content


def test_strict_schemas_keep_their_bounds(client):
    form = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT, "strict": True}}
    choice = ask(client, "Say 1000.", response_format=form, max_tokens=60).choices[0]
    assert 0 <= json.loads(choice.message.content)["n"] <= 9 and choice.finish_reason == "stop"

    class Digit(BaseModel):
        n: int = Field(ge=0, le=9)

    user = [{"role": "user", "content": "Say 1000."}]
    parsed = client.chat.completions.parse(
        model="any", messages=user, response_format=Digit, max_tokens=60, temperature=0
    )
    assert 0 <= parsed.choices[0].message.parsed.n <= 9


def test_effort_is_a_variable_of_the_template(qwen):
    """The value none asks for no thoughts, as the variable that Qwen3 knows does."""
    count = lambda **more: ask(qwen, max_tokens=1, **more).usage.prompt_tokens
    assert count(reasoning_effort="none") == count(extra_body=OFF) > count(reasoning_effort="high")


def test_fields_of_other_servers(client):
    plain = ask(client).choices[0].message.content
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "cache_prompt": True}
    assert ask(client, extra_body=extra).choices[0].message.content == plain
    extra = {"repetition_penalty": 1.3}
    assert (
        ask(client, extra_body=extra).choices[0].message.content
        == ask(client, extra_body={"repeat_penalty": 1.3}).choices[0].message.content
    )


def test_completions(client):
    """A list of prompts; echo with logprobs; a stream."""
    create = lambda **more: client.completions.create(model="any", max_tokens=6, temperature=0, **more)
    prompts = ["The sea is", "One, two, three,"]
    both = create(prompt=prompts)
    assert [c.text for c in both.choices] == [create(prompt=p).choices[0].text for p in prompts]
    echo = create(prompt=prompts[0], echo=True, logprobs=1).choices[0]
    assert echo.text == prompts[0] + both.choices[0].text
    assert "".join(echo.logprobs.tokens) == echo.text and len(echo.logprobs.token_logprobs) > 6
    chunks = create(prompt=prompts[0], stream=True)
    assert "".join(c.choices[0].text for c in chunks) == both.choices[0].text


def test_models(server, client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id and model.object == "model"
