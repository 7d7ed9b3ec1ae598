"""Sessions of agents as they send them: over HTTP each request is answered, prompts found."""

import json

import pytest
from agent_bodies import SESSIONS, TURNS, codex
from client_tools import call_of, written
from event_checks import message_of, prompt_tokens, response_of

FOUND = 0.6  # of all prompts' tokens: a template may show a history otherwise after a user's new words
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def events(server, path, body):
    """The events of a stream, and its headers."""
    r = server.client.post(path, json=body)
    assert r.status_code == 200, r.text
    lines = [line.removeprefix("data: ") for line in r.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"], r.headers


def counted(path, told):
    """(tokens of the prompt, those of them that were found)."""
    if path == "/v1/responses":
        usage = response_of(told).usage
        return usage.input_tokens, usage.input_tokens_details.cached_tokens
    if path == "/v1/messages":
        usage = message_of(told)["usage"]
        return prompt_tokens(usage), usage["cache_read_input_tokens"]
    usage = told[-1]["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session(servers, name):
    path, body_of = SESSIONS[name]
    more = {"max_output_tokens": 8} if path == "/v1/responses" else {"max_tokens": 8, "stream": True}
    more |= {"stream_options": {"include_usage": True}} if path == "/v1/chat/completions" else {}
    counts = []
    for turn in range(TURNS):
        told, headers = events(servers["qwen"], path, body_of(turn) | more)
        counts.append(counted(path, told))
        assert ("web_search" in headers.get("x-left-out", "")) is (path != "/v1/chat/completions")
    prompts, found = (sum(part) for part in zip(*counts[1:]))
    assert found >= FOUND * prompts, counts


def test_codexs_first_request_and_its_second(servers):
    """A call of a namespace's tool names its namespace, and comes back with its result."""
    said = call_of("multi_agent_v1__spawn_agent", cmd="look")
    body = codex(0) | {"max_output_tokens": 100, **OFF}
    told, headers = events(servers["qwen"], "/v1/responses", body | written(said))
    first = response_of(told)
    (call,) = first.output
    assert (call.type, call.name, call.namespace) == ("function_call", "spawn_agent", "multi_agent_v1")
    assert json.loads(call.arguments) == {"cmd": "look"} and headers["x-left-out"] == "web_search"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is done."}
    then = body | {"input": [*body["input"], call.to_dict(), result]} | written("So it is.")
    second = response_of(events(servers["qwen"], "/v1/responses", then)[0])
    assert second.output_text == "So it is."
    before = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 0.9 * before
