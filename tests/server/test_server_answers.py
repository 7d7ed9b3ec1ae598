"""What answers say at their edges: characters of several tokens, the context's end. On a tiny model."""

import itertools

import pytest
import tiny_models
from server_tools import CHAT, ask, events, running, settings, tiny
from tiny_models import PROMPT

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
N_CTX = 256
WORLD = {"grammar": 'root ::= "世"+', "logit_bias": {"2": -100}}  # a character is three tokens; no end


@pytest.fixture(scope="module")
def server(files):
    with running(settings(model=files[0], eagle=files[1], n_ctx=N_CTX, n_parallel=2, threads=1)) as s:
        yield s


def streamed(client, path, **body):
    """(text, finish reason) of a stream."""
    choices = [e["choices"][0] for e in events(ask(client, path=path, stream=True, **body)) if e is not None]
    texts = [c["text"] if path == COMPLETIONS else c["delta"].get("content") or "" for c in choices]
    return "".join(texts), choices[-1]["finish_reason"]


@pytest.mark.parametrize("n_prompt", [239, 240, 241])  # the context ends behind each byte of a character
def test_an_answer_that_the_context_cuts(server, n_prompt):
    body = {"prompt": [*PROMPT, *[60] * (n_prompt - len(PROMPT))], "max_tokens": 1000, **WORLD}
    choice = ask(server.client, path=COMPLETIONS, **body).json()["choices"][0]
    expected = "世" * ((N_CTX - n_prompt + 1) // 3), "length"
    assert (choice["text"], choice["finish_reason"]) == expected
    assert streamed(server.client, COMPLETIONS, **body) == expected


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_chat_that_the_context_cuts(server, more):
    body = {"text": "a" * (150 + more), "max_tokens": None, **WORLD}
    whole = ask(server.client, **body).json()
    text, n = whole["choices"][0]["message"]["content"], whole["usage"]["prompt_tokens"]
    assert text == "世" * ((N_CTX - n + 1) // 3) and whole["choices"][0]["finish_reason"] == "length"
    assert streamed(server.client, CHAT, **body) == (text, "length")


HALF = {"logit_bias": {str(3 + 0xE4): 100}}  # the first byte of a character, again and again


def body_for(path, most, **more):
    """A request for an answer of at most so many tokens, None for any number."""
    said = {
        CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": most},
        COMPLETIONS: {"prompt": "x", "max_tokens": 1000 if most is None else most},
        RESPONSES: {"input": "x", "max_output_tokens": most},
        MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": most or 1000},
    }
    return {"temperature": 0, **said[path], **more}


def told_usage(client, path, **body):
    """What an answer says of its tokens, whole or streamed."""
    r = client.post(path, json=body)
    assert r.status_code == 200, r.text
    if not body["stream"]:
        usage = r.json()["usage"]
    else:
        found = [e.get("response", e) for e in events(r) if e]
        usage = next(
            u for e in reversed(found) if (u := e.get("usage") or e.get("response", {}).get("usage"))
        )
    return usage.get("completion_tokens", usage.get("output_tokens"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_limits_count_tokens(server, path, stream):
    """Also where tokens never end a character, or the limit is within one."""
    given = WORLD if path != MESSAGES else {"grammar": 'root ::= "世世世"'}  # which has no biases
    kinds = [given, *([HALF] if path != MESSAGES else [])]
    options = {"stream_options": {"include_usage": True}} if stream and path in (CHAT, COMPLETIONS) else {}
    for kind, most in itertools.product(kinds, (1, 5)):
        body = body_for(path, most, stream=stream, **kind, **options)
        assert told_usage(server.client, path, **body) == most
        if path in (CHAT, COMPLETIONS):
            assert told_usage(server.client, path, n=2, **body) == 2 * most
            logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 1}
            assert told_usage(server.client, path, **logprobs, **body) == most


def test_the_servers_own_limit_counts_tokens(files):
    """In chats of llama-cpp-python's formats, too, which read on until a character may be whole."""
    for more in ({}, {"chat_format": "chatml"}):
        with running(tiny(files, max_tokens_cap=7, **more)) as s:
            for path in (CHAT, COMPLETIONS, RESPONSES):
                for most, stream in itertools.product((None, 5), (False, True)):
                    options = (
                        {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
                    )
                    body = body_for(path, most, stream=stream, **HALF, **options)
                    assert told_usage(s.client, path, **body) == (most or 7)


def test_a_suffix_that_the_model_cannot_use(server):
    """The middle is asked for with the vocabulary's tokens. Token 0 would be taken for text."""
    for more in ({}, {"stream": True}):
        r = ask(server.client, path=COMPLETIONS, prompt="def", suffix="end", max_tokens=4, **more)
        error = r.json()["error"]
        assert (
            r.status_code == 400 and error["param"] == "suffix" and "fill in the middle" in error["message"]
        )
    assert ask(server.client, path=COMPLETIONS, prompt="def", suffix="", max_tokens=4).status_code == 200


def test_a_suffix(tmp_path):
    able = str(tiny_models.target(tmp_path / "able.gguf", infills=(300, 301, 302)))
    with running(settings(model=able, eagle=None, n_ctx=N_CTX, n_parallel=1, threads=1)) as s:
        body = {"prompt": "def", "max_tokens": 8, "temperature": 0}
        got = ask(s.client, path=COMPLETIONS, suffix="end", **body).json()
        ids = [3 + byte for byte in "\u2581def".encode()], [3 + byte for byte in b"end"]
        plain = ask(
            s.client, path=COMPLETIONS, **{**body, "prompt": [1, 300, *ids[0], 301, *ids[1], 302]}
        ).json()
        assert got["choices"] == plain["choices"] and got["usage"]["prompt_tokens"] == 13
        r = ask(s.client, path=COMPLETIONS, suffix="end", echo=True, logprobs=1, **body)
        assert r.status_code == 400 and "echo" in r.json()["error"]["message"]


def test_a_stream_echoes(server):
    """As the whole answer does, with the logprobs of the prompt. What is reported of tokens stays theirs."""
    body = {
        "prompt": "x5 g8 b3",
        "max_tokens": 6,
        "temperature": 0,
        "echo": True,
        "speculative": {"report": True},
    }
    for more in ({}, {"logprobs": 2}):
        whole = ask(server.client, path=COMPLETIONS, **body, **more).json()["choices"][0]
        sent = events(ask(server.client, path=COMPLETIONS, stream=True, **body, **more))
        chunks = [e for e in sent if e is not None and e["choices"]]
        assert chunks[0]["choices"][0]["text"] == body["prompt"]
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
        assert chunks[0]["eagle"]["positions"] == []
        assert sum(len(c["eagle"]["positions"]) for c in chunks) == 6
        if more:
            parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
            for name in ("tokens", "text_offset", "token_logprobs"):
                assert [x for part in parts for x in part[name]] == whole["logprobs"][name], name


def test_the_bytes_of_tokens_in_chats(server):
    """A character of several tokens is in the bytes, which clients join."""
    body = {"text": "x", "max_tokens": 9, "logprobs": True, "top_logprobs": 20, **WORLD}
    choice = ask(server.client, **body).json()["choices"][0]
    streamed = events(ask(server.client, stream=True, **body))
    parts = [e["choices"][0]["logprobs"] for e in streamed if e is not None]
    for content in (choice["logprobs"]["content"], [t for part in parts if part for t in part["content"]]):
        assert (
            bytes(b for t in content for b in t["bytes"]).decode() == "世世世" == choice["message"]["content"]
        )
        assert [t["token"] for t in content] == [""] * 9
        for t in content:
            tops = [tuple(top["bytes"]) for top in t["top_logprobs"]]
            assert len(tops) == 20 and len(set(tops)) > 15  # those without a text too
            assert all(
                bytes(top["bytes"]).decode("utf-8", "ignore") == top["token"] for top in t["top_logprobs"]
            )


def test_timings(server):
    """Every answer has them, and each event of a stream that asks for them, by llama-server's names too."""
    body = {"text": "one two three", "max_tokens": 9, "temperature": 0, "logit_bias": {"2": -100}}
    for path, first in ((CHAT, {"role": "assistant", "content": None}), (COMPLETIONS, None)):
        given = body if path == CHAT else {**body, "prompt": "one two three"}
        whole = ask(server.client, path=path, **given).json()
        timings, usage = whole["timings"], whole["usage"]
        assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["predicted_n"] == timings["tokens"] >= usage["completion_tokens"] > 0
        assert timings["predicted_ms"] == pytest.approx(1e3 * timings["generation"]) and timings["prompt_ms"]
        for each in (False, True):
            sent = events(ask(server.client, path=path, stream=True, timings_per_token=each, **given))
            chunks = [e for e in sent if e is not None]
            told = (
                chunks[path == CHAT :] if each else chunks[-1:]
            )  # not a chat's first one, which has no token
            assert all(("timings" in c) is (c in told) for c in chunks)
            counts = [c["timings"]["predicted_n"] for c in chunks if "timings" in c]
            assert counts == sorted(counts) and counts[-1] == timings["tokens"]
            assert chunks[0]["choices"][0].get("delta") == first
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        last = events(ask(server.client, path=path, **usage, **given))[-2]
        assert last["choices"] == [] and last["timings"]["predicted_n"] == timings["tokens"]
        two = ask(server.client, path=path, n=2, **given).json()["timings"]
        assert [t["predicted_n"] for t in two] == [timings["tokens"]] * 2


def test_another_name_of_logprobs(server):
    body = {"text": "x", "max_tokens": 3, "temperature": 0, "logit_bias": {"2": -100}}
    for path, same in ((CHAT, {"logprobs": True, "top_logprobs": 4}), (COMPLETIONS, {"logprobs": 4})):
        given = body if path == CHAT else {**body, "prompt": "x"}
        expected, got = (ask(server.client, path=path, **given, **m).json() for m in (same, {"n_probs": 4}))
        assert got["choices"] == expected["choices"] and got["choices"][0]["logprobs"]


def test_an_answer_that_no_token_ends(server):
    ends = {"text": "x", "max_tokens": 7, "temperature": 0, "logit_bias": {"2": 100}}
    usages = [ask(server.client, ignore_eos=so, **ends).json()["usage"] for so in (False, True)]
    assert [u["completion_tokens"] >= 7 for u in usages] == [False, True]
    told = ask(server.client, ignore_eos=True, **{**ends, "max_tokens": 9, "grammar": 'root ::= "ab"'})
    choice = told.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
