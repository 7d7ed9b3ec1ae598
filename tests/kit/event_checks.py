"""What the events of a stream must be in OpenAI's Responses and in Anthropic's Messages API.

The packages take a second to import, so it is not done to collect tests.
"""

import contextlib
import functools
import json

import pydantic

OFFICIAL = True  # whether Anthropic's models check its messages and events too
FIELDS = {  # of each kind of block
    "text": {"type", "text"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input"},
}


@functools.cache
def _adapter(package, name):
    if package == "openai":
        from openai.types import responses as types
    else:
        from anthropic import types
    return pydantic.TypeAdapter(getattr(types, name))


def response_event(event):
    """OpenAI's object of an event, given as a dictionary."""
    return _adapter("openai", "ResponseStreamEvent").validate_python(event)


def by_anthropic(name, value):
    """Checks a value by Anthropic's model of this name."""
    if OFFICIAL:
        _adapter("anthropic", name).validate_python(value)


def response_of(events):
    """The response at the end of a stream. Its events, as dictionaries or the client's objects, are checked
    by OpenAI's models, and against the response."""
    dicts = [e if isinstance(e, dict) else e.to_dict() for e in events]
    events = [response_event(e) for e in dicts]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}" and {e.response.id for e in events[:2]} == {last.id}
    check_items(events[2:-1], last.output)
    return last


def check_items(events, output):
    """The events of each item begin, grow and end it as it is in the response."""
    for i, item in enumerate(output):
        own = [e for e in events if e.output_index == i]
        assert (
            own[0].type == "response.output_item.added" and own[0].item.to_dict()["status"] == "in_progress"
        )
        assert own[-1].type == "response.output_item.done" and own[-1].item == item
        assert {e.item_id for e in own[1:-1]} == {item.id} == {own[0].item.id}
        deltas = "".join(e.delta for e in own if e.type.endswith(".delta"))
        done = next(e for e in own if e.type.endswith(("text.done", "arguments.done", "input.done")))
        if item.type == "function_call":
            assert deltas == done.arguments == item.arguments
        elif item.type == "custom_tool_call":
            assert deltas == done.input == item.input
        else:
            assert deltas == done.text == item.content[0].text
            kinds = [e.type for e in own if "content_part" in e.type]
            assert kinds == ["response.content_part.added", "response.content_part.done"]
    assert {e.output_index for e in events} == set(range(len(output)))


def check_message(message):
    """A whole message, as a dictionary: it has the fields that Anthropic's has, and no others."""
    about = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert set(message) == about and message["id"] and message["model"], message
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert all(set(block) == FIELDS[block["type"]] for block in message["content"]), message
    assert (message["stop_sequence"] is None) == (message["stop_reason"] != "stop_sequence")
    assert set(message["usage"]) == {"input_tokens", "cache_read_input_tokens", "output_tokens"}
    assert all(type(n) is int and n >= 0 for n in message["usage"].values()), message
    by_anthropic("Message", message)


def message_of(events):
    """A stream's message, put together from its events, as dictionaries. Their order and form is checked."""
    first, *found = [e for e in events if e["type"] != "ping"]
    for e in (first, *found):
        by_anthropic("RawMessageStreamEvent", e)
    assert first["type"] == "message_start" and found[-1] == {"type": "message_stop"}
    message, written, is_open = dict(first["message"]), "", False
    assert message["content"] == [] and message["stop_reason"] is None
    before = message["usage"]
    for e in found[:-2]:
        content = message["content"]
        if e["type"] == "content_block_start":
            assert e["index"] == len(content) and not is_open
            content.append(dict(e["content_block"]))
            written, is_open = "", True
            continue
        assert is_open and e["index"] == len(content) - 1
        block = content[-1]
        if e["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                with contextlib.suppress(json.JSONDecodeError):  # a call that was cut
                    block["input"] = json.loads(written or "{}")
        elif e["delta"]["type"] == "input_json_delta":
            written += e["delta"]["partial_json"]
        else:
            field = e["delta"]["type"].removesuffix("_delta")
            block[field] += e["delta"][field]
    end = found[-2]
    assert end["type"] == "message_delta" and not is_open
    assert prompt_tokens(before) == prompt_tokens(end["usage"])
    return {**message, **end["delta"], "usage": end["usage"]}


def prompt_tokens(usage):
    """All tokens of a prompt, by Anthropic's counts of it."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]
