"""Limits of what one client can use, and what other clients get meanwhile. On a tiny model."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_tools import CHAT, JSON, Blocked, ask, events, idle, metric, running, settings, until
from tiny_models import BOS, EOS, PROMPT

from eagle3_llama.server.body import fields
from eagle3_llama.server.http import body_reader
from eagle3_llama.server.prompt import choices

COMPLETIONS = "/v1/completions"
LONG = {
    "path": COMPLETIONS,
    "prompt": PROMPT,
    "max_tokens": 200,
    "logit_bias": {str(EOS): -100, str(BOS): -100},
}  # logprobs leave out <s>
TOOL = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    given = settings(
        model=files[0],
        eagle=files[1],
        n_ctx=512,
        n_parallel=2,
        threads=1,
        max_n=4,
        slot_save_limit=200_000,
        slot_save_path=str(tmp_path_factory.mktemp("slots")),
        template_timeout=20.0,
    )
    with running(given) as s:
        yield s


@pytest.fixture
def shared(server):
    return server.app.state.server


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as p:
        yield p


def post(server, path, content):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return client.post(path, json=content)


def held(monkeypatch, owner, name):
    """owner.name waits for `go`, after `begun`."""
    begun, go, work = threading.Event(), threading.Event(), getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda *args, **named: (begun.set(), go.wait(60), work(*args, **named))[2]
    )
    return begun, go


# -- logprobs ---------------------------------------------------------------------------------------------


def test_logprobs_of_long_answers(server, shared):
    """All of them, and the room they took is free afterwards."""
    r = ask(server.client, **LONG, logprobs=20)
    said = r.json()["choices"][0]["logprobs"]
    assert (
        r.status_code == 200
        and len(said["tokens"]) >= 200
        and all(len(top) >= 1 for top in said["top_logprobs"])
    )
    until(lambda: shared.gate.logprobs.held == 0)


def test_logprobs_take_room(server, shared, monkeypatch, pool):
    """Logprobs hold room until the answer is sent. A failure or a client that disconnects gives it back."""
    room, seen = shared.gate.logprobs, []
    size = choices.ENTRY_BYTES * 21 * 200
    monkeypatch.setattr(room, "most", 2 * size)
    go = threading.Event()
    pool.submit(server.batcher.inbox.run, lambda: go.wait(60))
    first = [
        pool.submit(
            post, server, COMPLETIONS, {k: v for k, v in LONG.items() if k != "path"} | {"logprobs": 20}
        )
        for _ in range(2)
    ]
    until(lambda: room.held == 2 * size)
    r = ask(server.client, **LONG, logprobs=20)
    assert (
        r.status_code == 503
        and r.json()["error"]["code"] == "busy"
        and "logprobs" in r.json()["error"]["message"]
    )
    plain = pool.submit(post, server, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})
    go.set()
    assert [f.result().status_code for f in first] == [200, 200] and plain.result().status_code == 200
    until(lambda: room.held == 0)
    with server.client.stream(
        "POST",
        COMPLETIONS,
        json={k: v for k, v in LONG.items() if k != "path"} | {"logprobs": 5, "stream": True},
    ) as r:
        seen.append(next(r.iter_lines()))
    until(lambda: idle(server) and room.held == 0)
    assert (
        ask(server.client, path=COMPLETIONS, prompt=PROMPT, logprobs=2, grammar="root ::= (").status_code
        == 400
        and room.held == 0
    )


def test_logprobs_that_can_never_fit(server, monkeypatch):
    monkeypatch.setattr(choices, "MAX_LOGPROBS", choices.ENTRY_BYTES * 6 * 50)
    r = ask(server.client, **LONG, logprobs=5)
    assert (
        r.status_code == 400
        and r.json()["error"]["param"] == "max_tokens"
        and "50" in r.json()["error"]["message"]
    )
    r = server.client.post(
        CHAT,
        json={
            "messages": [{"role": "user", "content": "x5"}],
            "logprobs": True,
            "top_logprobs": 5,
            "logit_bias": LONG["logit_bias"],
        },
    )
    assert (
        r.status_code == 200 and 50 <= len(r.json()["choices"][0]["logprobs"]["content"]) < 60
    )  # more where the last ends within a character


# -- keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colon", ['":', '" :', '"\n\t :', '\\\\":', '\\"" :'], ids=repr)
def test_bodies_with_many_keys(server, monkeypatch, colon):
    """They are counted before each unknown one becomes an error."""
    monkeypatch.setattr(body_reader, "MAX_KEYS", 1000)

    def body(n):
        keys = ",".join(f'"{i}{colon} 1' for i in range(n))
        return f'{{"prompt": [60], "max_tokens": 1, "x": {{{keys}}}}}'

    error = lambda n: server.client.post(COMPLETIONS, content=body(n), headers=JSON).json()["error"]
    assert "keys" in error(1000)["message"] and error(900)["code"] == "unknown_field"


def test_texts_with_many_colons(server, monkeypatch):
    """Only keys count."""
    monkeypatch.setattr(body_reader, "MAX_KEYS", 20)
    text = 'a": "b": \\": ' * 8
    body = {"prompt": text, "max_tokens": 1, "stop": ["x:", '":']}
    assert server.client.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize("name, most", [("logit_bias", fields.MAX_BIAS), ("metadata", 16)])
def test_dictionaries_are_counted_first(server, name, most):
    """Not after each of their keys has been found wrong."""
    for key in ("x{}", "{}"):
        body = {"prompt": [60], "max_tokens": 1, name: {key.format(i): "bad" for i in range(most + 1)}}
        error = server.client.post(COMPLETIONS, json=body).json()["error"]
        assert error["param"] == name and f"at most {most} are allowed" in error["message"]


# -- work outside the event loop --------------------------------------------------------------------------


def test_tokenising_has_a_gate(server, shared, monkeypatch, pool):
    """One at a time, some wait, the next are told to come again; other routes answer."""
    begun, go = held(monkeypatch, server.batcher.base, "tokenize")
    jobs = [
        pool.submit(post, server, "/tokenize", {"content": "x5 g8"}) for _ in range(shared.tokenizing.most)
    ]
    assert begun.wait(60)
    until(lambda: shared.tokenizing.inside == shared.tokenizing.most)
    for path, content in (("/tokenize", {"content": "x"}), ("/detokenize", {"tokens": [60]})):
        r = server.client.post(path, json=content)
        assert r.status_code == 503 and r.json()["error"]["code"] == "busy" and "retry-after" in r.headers
    assert (
        server.client.get("/health").status_code == 200
        and ask(server.client, path=COMPLETIONS, prompt=PROMPT, max_tokens=2).status_code == 200
    )
    go.set()
    assert {j.result().status_code for j in jobs} == {200}
    until(lambda: shared.tokenizing.inside == 0)


def test_two_prompts_are_tokenised_at_a_time(server, monkeypatch, pool):
    """In whatever thread. Those of requests that have gone meanwhile are not."""
    begun, go = [], threading.Event()
    tokenize = server.batcher.base.tokenizer_.tokenize

    def watched(text, *more):
        begun.append(text)
        go.wait(60)
        return tokenize(text, *more)

    monkeypatch.setattr(server.batcher.base.tokenizer_, "tokenize", watched)
    bodies = [{"prompt": f"x5 {i}", "max_tokens": 1} for i in range(8)]
    jobs = [pool.submit(post, server, COMPLETIONS, body) for body in bodies]
    until(lambda: server.gate.inside == 8 and len(begun) >= 2)
    go.wait(0.3)  # long enough for threads that nobody holds back
    assert len(begun) == 2
    for job in list(server.gate.jobs):
        job.cancel()
    go.set()
    assert {job.result().status_code for job in jobs} <= {200, 499}
    until(lambda: idle(server))
    assert len(begun) == 2


@pytest.mark.parametrize(
    "path, content, owner, name",
    [
        ("/tokenize", {"content": "x5"}, "choices.size", "check_special"),
        (COMPLETIONS, {"prompt": "x5", "max_tokens": 1}, "choices.size", "check_fits"),
        ("/detokenize", {"tokens": [60]}, "batcher.base", "detokenize"),
        (COMPLETIONS, {"prompt": "x" * 20_000}, "read_body", "parse"),
    ],
)
def test_the_event_loop_is_free(server, shared, monkeypatch, pool, path, content, owner, name):
    """While a text is looked at, others are answered."""
    at = body_reader if owner == "read_body" else shared
    for part in () if owner == "read_body" else owner.split("."):
        at = getattr(at, part)
    begun, go = held(monkeypatch, at, name)
    job = pool.submit(post, server, path, content)
    assert begun.wait(60)
    assert server.client.get("/health").status_code == 200
    go.set()
    assert job.result().status_code in (200, 400)


def test_bodies_have_room_together(server, shared, monkeypatch):
    room = shared.bodies.room
    monkeypatch.setattr(room, "most", 1000)
    assert server.client.post("/tokenize", json={"content": "x" * 900}).status_code == 200
    r = server.client.post("/tokenize", json={"content": "x" * 1100})
    assert r.status_code == 503 and "bodies" in r.json()["error"]["message"] and room.held == 0
    assert server.client.post("/tokenize", json={"content": 5}).status_code == 400 and room.held == 0


# -- grammars ---------------------------------------------------------------------------------------------


def test_a_named_tools_schema_is_converted_once(server, shared, monkeypatch):
    """In the sandbox, once for all choices and for the next request. This process converts no schema."""
    from llama_cpp import llama_grammar

    asked, made = [], []
    call, convert = shared.choices._grammars.call, llama_grammar.json_schema_to_gbnf
    monkeypatch.setattr(
        shared.choices._grammars, "call", lambda **request: (asked.append(request["do"]), call(**request))[1]
    )
    monkeypatch.setattr(
        llama_grammar, "json_schema_to_gbnf", lambda text, *more: (made.append(text), convert(text, *more))[1]
    )
    for _ in range(2):
        r = ask(
            server.client,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "go"}},
            n=3,
            max_tokens=40,
            temperature=0.5,
        )
        calls_made = [c["message"]["tool_calls"][0]["function"] for c in r.json()["choices"]]
        assert [c["name"] for c in calls_made] == ["go"] * 3 and all(
            json.loads(c["arguments"])["n"] in (1, 2) for c in calls_made
        )
    assert asked == ["convert"] and set(made) <= {"{}"}


def test_a_refused_schema_is_asked_about_once_a_request(server, shared, monkeypatch):
    asked, call = [], shared.choices._grammars.call
    monkeypatch.setattr(
        shared.choices._grammars, "call", lambda **request: (asked.append(request["do"]), call(**request))[1]
    )
    assert (
        ask(
            server.client,
            response_format={"type": "json_object", "schema": {"$ref": "https://example.org/x"}},
            n=4,
        ).status_code
        == 400
    )
    until(lambda: idle(server))
    assert asked == ["convert"]


# -- slot files -------------------------------------------------------------------------------------------


def test_slot_files_have_a_quota(server):
    """507 says how much there is; a file of the same name makes room for itself."""
    save = lambda name: server.client.post("/slots/0?action=save", json={"filename": name})
    for slot_prompt in (list(range(60, 160)), list(range(160, 60, -1))):  # both slots hold something
        ask(server.client, path=COMPLETIONS, prompt=slot_prompt, max_tokens=1)
    until(lambda: idle(server))
    size = save("a").json()["n_written"]
    n = server.settings.slot_save_limit // size
    assert n >= 1 and [save(f"x{i}").status_code for i in range(n)] == [200] * (n - 1) + [507]
    r = save("more")
    assert (
        r.json()["error"]["code"] == "slot_files_full"
        and str(server.settings.slot_save_limit) in r.json()["error"]["message"]
    )
    assert save("a").status_code == 200
    left = Path(server.settings.slot_save_path) / ".a.1.part"  # by a server that was killed
    left.write_bytes(bytes(server.settings.slot_save_limit))
    assert save("a").status_code == 507  # it may be another server's that writes now
    os.utime(left, (1, 1))
    assert save("a").status_code == 200 and not left.exists()


def test_metrics_of_what_did_not_end(files):
    """Requests that time out in the queue or before their first token count with the time they waited."""
    with running(
        settings(model=files[0], eagle=files[1], n_ctx=256, n_parallel=1, threads=1, timeout=0.3)
    ) as s:
        with Blocked(s):
            assert ask(s.client, path=COMPLETIONS, prompt=PROMPT).status_code == 504
        until(lambda: idle(s))
        for name in (
            "eagle3_queue_seconds",
            "eagle3_time_to_first_token_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:time_to_first_token_seconds",
        ):
            assert metric(s, f"{name}_count") == 1 and metric(s, f"{name}_sum") >= 0.3 / 2, name
        assert metric(s, "eagle3_tokens_total") == 0


def test_vllms_names(server):
    """The same numbers under both, with the model's name; positions count from 0."""
    before = {
        name: metric(server, name)
        for name in ("eagle3_tokens_total", "eagle3_prompt_tokens_total", "eagle3_reused_tokens_total")
    }
    assert (
        ask(
            server.client,
            path=COMPLETIONS,
            prompt=PROMPT,
            max_tokens=30,
            speculative={"n_max": 3},
            logit_bias=LONG["logit_bias"],
        ).status_code
        == 200
    )
    until(lambda: idle(server))
    after = {name: metric(server, name) for name in before}
    assert after["eagle3_tokens_total"] - before["eagle3_tokens_total"] >= 30
    model = f'model_name="{server.app.state.server.name}"'
    pairs = {
        "generation_tokens_total": "eagle3_tokens_total",
        "spec_decode_num_drafts_total": "eagle3_drafts_total",
        "spec_decode_num_draft_tokens_total": "eagle3_drafted_total",
        "spec_decode_num_accepted_tokens_total": "eagle3_accepted_total",
        "prefix_cache_hits_total": "eagle3_reused_tokens_total",
        "num_requests_running": "eagle3_slots_busy",
    }
    for theirs, ours in pairs.items():
        assert metric(server, f"vllm:{theirs}", model, 'engine="0"') == metric(server, ours), theirs
    assert (
        metric(server, "vllm:prompt_tokens_total")
        == after["eagle3_prompt_tokens_total"] + after["eagle3_reused_tokens_total"]
    )
    per_position = [
        metric(server, name, f'position="{i}"')
        for name, i in (
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", 0),
            ("eagle3_accepted_at_total", 1),
        )
    ]
    assert per_position[0] == per_position[1]
    assert metric(server, "vllm:request_success_total", 'finished_reason="length"') >= 1
    assert metric(server, "process_resident_memory_bytes") > 0 < metric(server, "process_cpu_seconds_total")


def test_streams_end_with_logprobs(server):
    with server.client.stream(
        "POST",
        COMPLETIONS,
        json={
            "prompt": PROMPT,
            "max_tokens": 5,
            "logprobs": 2,
            "stream": True,
            "logit_bias": LONG["logit_bias"],
        },
    ) as r:
        chunks = [e for e in events(r) if e]
    said = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(len(s["tokens"]) for s in said) >= 5 and all(
        len(s["tokens"]) == len(s["top_logprobs"]) for s in said
    )
