"""Anthropic's client: messages, streams, tools, results, count_tokens."""

import anthropic
import pytest
from client_tools import NAMES, OSLO, PLACE, RIVERS, WHOLE, call_of, fits, written

TOOLS = [{"name": n, "description": f"Looks up the {n}.", "input_schema": PLACE} for n in NAMES]
ONE = {"disable_parallel_tool_use": True}


@pytest.fixture
def client(server):
    return client_of(server)


def client_of(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def given(messages=RIVERS, **more):
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    extra = {"temperature": 0, **more.pop("extra_body", {})}  # the client knows no temperature any more
    return {"model": "any", "messages": asked, "max_tokens": 16, "extra_body": extra, **more}


def ask(client, messages=RIVERS, **more):
    """The answer, which the client's own sum of the stream repeats."""
    whole = client.messages.create(**given(messages, **more))
    with client.messages.stream(**given(messages, **more)) as stream:
        told = "".join(stream.text_stream)
        final = stream.get_final_message()
    blocks = lambda message: [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
    assert blocks(final) == blocks(whole) and final.stop_reason == whole.stop_reason
    assert told == "".join(block.text for block in whole.content if block.type == "text")
    return whole


def test_messages_and_streams(client):
    message = ask(client, system="Be brief.")
    assert message.content[0].text and 0 < message.usage.output_tokens <= 16
    user = {"role": "user", "content": RIVERS}
    count = client.messages.count_tokens(model="any", messages=[user], system="Be brief.")
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    "chosen, names",
    [({"type": "any"}, NAMES), ({"type": "tool", "name": "hotel"}, ("hotel",))],
    ids=["any", "tool"],
)
def test_tools_are_enforced_and_results_come_back(client, chosen, names):
    more = {"tools": TOOLS, "max_tokens": WHOLE}
    message = ask(client, OSLO, tool_choice={**chosen, **ONE}, **more)
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.name in names and fits(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    user = {"role": "user", "content": OSLO}
    parts = [{"type": "text", "text": "Rain."}]
    marked = {**result, "content": parts, "cache_control": {"type": "ephemeral"}}
    echoes = [({"role": "assistant", "content": message.content}, result)]
    echoes += [({"role": "assistant", "content": [call.model_dump()]}, marked)]
    none = {"tools": TOOLS, "tool_choice": {"type": "none"}}
    answers = [ask(client, [user, echo, {"role": "user", "content": [r]}], **none) for echo, r in echoes]
    assert answers[0].content == answers[1].content and answers[0].content[0].text


def test_auto_finds_thoughts_texts_and_calls(servers):
    text = f"<think>\nHm.\n</think>\n\nI look. {call_of('train', city='Oslo', day=3)}"
    more = {"tools": TOOLS, "max_tokens": WHOLE, "extra_body": written(text)}
    message = ask(client_of(servers["qwen"]), OSLO, **more)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"city": "Oslo", "day": 3} and message.stop_reason == "tool_use"
