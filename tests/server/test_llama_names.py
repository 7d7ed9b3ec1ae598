"""What llama.cpp's server has in OpenAI's routes, as its own tests ask for it."""

import inspect

import pytest
from server_tools import CHAT, ask, events, running, settings, tiny

from llama_cpp import Llama

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with running(settings()) as s:
        yield s


def refused(server, **body):
    r = server.client.post(CHAT if "messages" in body else COMPLETIONS, json=body)
    assert r.status_code == 400, r.text
    return r.json()["error"]


def test_json_schema(server):
    """The schema of an answer, by two names. OpenAI's needs no `name` of its own."""
    chat = lambda **more: ask(server.client, max_tokens=60, **more).json()["choices"][0]["message"]["content"]
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    text = chat(response_format=named)
    assert text.startswith("{")
    assert chat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}) == text
    assert chat(json_schema=SCHEMA) == text
    given = {"prompt": "The number is", "max_tokens": 60, "temperature": 0}
    post = lambda **more: ask(server.client, path=COMPLETIONS, **given, **more).json()["choices"][0]
    assert post(json_schema={"const": 42})["text"] == "42" and post(json_schema=SCHEMA)["text"][0] == "{"
    message = [{"role": "user", "content": "x"}]
    both = refused(server, messages=message, json_schema=SCHEMA, response_format=named)
    assert both["param"] == "json_schema" and "only one" in both["message"]
    rule = refused(server, messages=message, json_schema=SCHEMA, grammar='root ::= "a"')
    assert rule["param"] == "grammar" and "json_schema constrains" in rule["message"]
    odd = {"type": "array", "uniqueItems": True}
    for body in ({"messages": message}, {"prompt": "x"}):
        error = refused(server, json_schema=odd, **body)
        assert error["param"] == "json_schema" and "uniqueItems" in error["message"]


def test_two_messages_of_the_assistant_at_the_end(server):
    """Nobody knows what is to be answered. Before another's message they are as good as one."""
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    for more in ({}, {"continue_final_message": True}):
        error = refused(server, messages=[{"role": "user", "content": "x"}, *said], **more)
        assert error["param"] == "messages" and "both the assistant's" in error["message"]
    r = ask(server.client, messages=[*said, {"role": "user", "content": "x"}], max_tokens=2)
    assert r.status_code == 200
    r = server.client.post("/v1/responses", json={"input": [{"role": "user", "content": "x"}, *said]})
    assert r.status_code == 200  # one turn of several items


def test_a_prompt_that_is_too_long(server):
    n_ctx = server.batcher.n_ctx
    long, whole = "word " * 2000, "x" * (server.app.state.server.choices.size.most_bytes + 1)
    for text in (long, whole):  # the second is not even tokenized
        message = [{"role": "user", "content": text}]
        for path, body in (
            (CHAT, {"messages": message}),
            (CHAT, {"messages": message, "stream": True}),
            (COMPLETIONS, {"prompt": text}),
            ("/v1/responses", {"input": text}),
        ):
            error = server.client.post(path, json=body).json()["error"]
            assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == n_ctx, path
            assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > n_ctx
    error = server.client.post("/v1/messages", json={"messages": message, "max_tokens": 2}).json()
    assert error["error"]["type"] == "invalid_request_error"  # Anthropic's name


def test_a_slot_of_a_chat(server):
    for slot in (2, 0):
        assert ask(server.client, max_tokens=2, id_slot=slot).status_code == 200
        held = [s["n_past"] > 0 for s in server.client.get("/slots").json()]
        assert held[slot]
    assert ask(server.client, max_tokens=2, id_slot=-1).status_code == 200
    error = ask(server.client, id_slot=3).json()["error"]
    assert error["param"] == "id_slot" and "0..2" in error["message"]


def test_the_opposite_of_a_message_that_goes_on(server):
    """vLLM's clients send both names."""
    begun = [{"role": "user", "content": "Name three rivers."}, {"role": "assistant", "content": "1. The"}]
    text = lambda **more: ask(server.client, max_tokens=8, **more).json()["choices"][0]["message"]["content"]
    on = {"messages": begun, "continue_final_message": True}
    assert text(**on, add_generation_prompt=False) == text(**on)
    assert text(messages=begun, add_generation_prompt=False) == text(**on)
    assert text(add_generation_prompt=True) == text()
    count = lambda **more: server.client.post(f"{CHAT}/input_tokens", json=more).json()["input_tokens"]
    assert count(messages=begun, add_generation_prompt=False) == count(**on)
    for odd in (
        {**on, "add_generation_prompt": True},
        {"messages": begun[:1], "add_generation_prompt": False},
    ):
        error = refused(server, **odd)
        assert error["param"] == "add_generation_prompt" and "opposite" in error["message"]


def test_content_without_parts(server):
    """It is no text, as null and "" are."""
    told = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "", "refusal": None}]
    for role, path in (("user", CHAT), ("assistant", CHAT)):
        texts = []
        for content in ("", []):
            messages = [*told, {"role": "user", "content": "Rivers?"}, {"role": role, "content": content}]
            r = ask(server.client, path=path, messages=messages, max_tokens=4)
            assert r.status_code == 200, r.text
            texts.append(r.json()["choices"][0]["message"]["content"])
        assert texts[0] == texts[1]


def test_logprobs_that_are_true(server):
    """As vLLM takes it: those of the tokens, and one alternative."""
    given = {"path": COMPLETIONS, "prompt": "The sea is", "temperature": 0, "max_tokens": 4}
    told = lambda **more: ask(server.client, **given, **more).json()["choices"][0]["logprobs"]
    assert told(logprobs=True) == told(logprobs=1) and told(logprobs=1)["tokens"]
    assert told(logprobs=True, n_probs=3) == told(logprobs=3)
    assert told(logprobs=False) is None


def test_another_name_of_max_tokens(server):
    given = {"path": COMPLETIONS, "prompt": "The sea is", "temperature": 0}
    text = lambda **more: ask(server.client, **given, **more).json()["choices"][0]["text"]
    assert text(n_predict=5) == text(max_tokens=5) != text(n_predict=6)
    chat = lambda **more: server.client.post(
        CHAT, json={"messages": [{"role": "user", "content": "x"}], **more}
    )
    assert chat(n_predict=3, ignore_eos=True).json()["usage"]["completion_tokens"] == 3
    assert chat(n_predict=-1, max_completion_tokens=2).status_code == 200
    for wrong in (
        {"n_predict": 3, "max_tokens": 4},
        {"n_predict": 0},
        {"n_predict": 3, "max_completion_tokens": 4},
    ):
        assert chat(**wrong).json()["error"]["code"] == "invalid_value", wrong


def test_errors_name_the_field_that_was_given(server):
    """Of the names of max_tokens."""
    message, large = [{"role": "user", "content": "x"}], 1 << 24
    for name, body in (
        ("n_predict", {"prompt": "x", "n_predict": 0}),
        ("max_tokens", {"prompt": "x", "max_tokens": 0}),
        ("n_predict", {"prompt": ["x"] * 64, "n_predict": large, "logprobs": 20}),
        ("max_tokens", {"prompt": ["x"] * 64, "max_tokens": large, "logprobs": 20}),
        ("n_predict", {"messages": message, "n_predict": 3, "max_completion_tokens": 4}),
    ):
        error = refused(server, **body)
        text = f"{error['param']} {error['message']}"
        assert name in text and not ({"max_tokens", "n_predict"} - {name}) & set(
            text.replace(",", "").split()
        ), error


def test_settings_that_nobody_gave(server):
    """/completion tells them; they are llama-cpp-python's."""
    own = inspect.signature(Llama.generate).parameters
    r = server.client.post("/completion", json={"prompt": "x", "n_predict": 1}).json()
    told = r["generation_settings"]
    names = {("temperature" if name == "temp" else name): p.default for name, p in own.items()}
    names["mirostat"] = names.pop("mirostat_mode")
    same = {
        name: default for name, default in names.items() if name in told and name not in ("seed", "grammar")
    }
    assert len(same) == 11 and {name: told[name] for name in same} == same


@pytest.mark.parametrize("default", [-1, 50])
def test_until_the_slot_is_full(files, default):
    """n_predict: -1, whatever number requests get that name none."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with running(tiny(files, n_predict=default)) as s:
        for path, body in (
            (COMPLETIONS, {"prompt": "x", "n_predict": -1}),
            (COMPLETIONS, {"prompt": "x", "n_predict": -1, "stream": True}),
            (COMPLETIONS, {"prompt": "x", "n_predict": -1, "logprobs": 0}),
            (CHAT, {**chat, "n_predict": -1}),
            ("/completion", {"prompt": "x", "n_predict": -1}),
            ("/completion", {"prompt": "x", "max_tokens": -1}),
        ):
            options = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
            r = s.client.post(path, json={**body, **options, "ignore_eos": True, "temperature": 0})
            out = events(r)[-2] if options else r.json()
            told = out.get("usage") or {"total_tokens": out["tokens_evaluated"] + out["tokens_predicted"]}
            assert told["total_tokens"] >= s.batcher.n_ctx, (path, body)
        r = s.client.post(
            CHAT, json={**chat, "n_predict": -1, "max_completion_tokens": 2, "ignore_eos": True}
        )
        assert r.json()["usage"]["completion_tokens"] == 2
