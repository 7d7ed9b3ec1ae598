"""The server under pressure: limits, keys, clients that leave, deadlines, shutdown."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from server_tools import (
    CHAT,
    ENDLESS,
    JSON,
    Streams,
    address,
    ask,
    events,
    idle,
    other,
    post_head,
    process,
    running,
    settings,
    until,
)
from tiers import each

from eagle3_llama.errors import EagleError
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.server.errors import FORMS
from eagle3_llama.server.http.keys import OPEN_ROUTES
from eagle3_llama.server.settings import is_loopback


@pytest.fixture(scope="module")
def server():
    with running(settings(n_parallel=2, max_queue=2, max_n=3, timeout=20)) as s:
        yield s


def raw(server, data, seconds=60.0):
    """What the server answers to these bytes."""
    with socket.create_connection(address(server), timeout=seconds) as s:
        s.sendall(data)
        return s.recv(65536)


# -- who may come in --------------------------------------------------------------------------------------


def test_the_key(server):
    with other(server, api_key="s3cret") as s, httpx.Client(base_url=s.url) as stranger:
        assert stranger.get("/health").json() == stranger.get("/ready").json() == {"status": "ok"}
        paths = [
            (r.path.replace("{slot}", "0").replace("{model_id:path}", "x"), m)
            for r in s.app.routes
            for m in r.methods - {"HEAD"}
        ]
        assert len(paths) >= 11
        wrong = [
            "Bearer s3cre",
            "Bearer s3cret2",
            "s3cret",
            "Basic !",
            "Basic czNjcmU=",
            "Bearer \xff",
            "Bearer",
            "",
        ]
        for path, method, given in [
            *((p, m, None) for p, m in [*paths, ("/none", "GET")]),
            *(("/v1/models", "GET", w) for w in wrong),
        ]:
            r = stranger.request(
                method, path, headers={} if given is None else {"Authorization": given.encode("latin-1")}
            )
            if path in OPEN_ROUTES:
                continue
            error = r.json()["error"]
            of_anthropic = path in FORMS
            told = error["type"] if of_anthropic else error["code"]
            assert r.status_code == 401, (path, given)
            assert told == ("authentication_error" if of_anthropic else "invalid_api_key"), (path, given)
        assert "Basic" in stranger.get("/").headers["www-authenticate"]
        assert (
            stranger.get("/", auth=("", "s3cret")).status_code
            == 200
            == s.client.get("/v1/models").status_code
        )


def test_passwords_that_a_browser_sends(server, monkeypatch):
    """With the key as a password, another site's page changes nothing: a browser adds it by itself."""
    erase = "/slots/0?action=erase"  # 400: this server saves none
    with other(server, api_key="s3cret", cors_origin=("https://good.example",)) as s:
        for scheme, given in (("Basic", base64.b64encode(b"me:s3cret").decode()), ("Bearer", "s3cret")):
            for origin, own in (
                ("https://evil.example", False),
                ("null", False),
                ("http://localhost:1", False),  # another program's page
                (f"{s.url}.evil.example", False),
                (s.url, True),
                ("https://good.example", True),
                (None, True),
            ):
                headers = {"Authorization": f"{scheme} {given}"} | ({"Origin": origin} if origin else {})
                r = s.client.post(erase, headers=headers)
                assert r.status_code == (400 if own or scheme == "Bearer" else 403), (scheme, origin)
                assert s.client.get("/slots", headers=headers).status_code == 200
                gone = s.client.delete("/v1/responses/no", headers=headers)
                assert gone.status_code == (404 if own or scheme == "Bearer" else 403)


def test_pages_without_an_origin(server):
    """A file's page, or one in a sandbox, which any site can make: allowed with * alone, and said so."""
    with pytest.raises(EagleError, match="--cors-origin null lets in any site"):
        settings(cors_origin=("null",))
    assert server.client.get("/v1/models", headers={"Origin": "null"}).status_code == 403
    with other(server, cors_origin=("*",)) as s:
        r = s.client.get("/v1/models", headers={"Origin": "null"})
        assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "*"


def test_other_sites(server):
    """CORS is off. Without a key, another site's page is refused even if the browser sends its request."""
    page = {"Origin": "https://evil.example"}
    r = server.client.get("/v1/models", headers=page)
    assert r.status_code == 403 and "access-control-allow-origin" not in r.headers
    assert server.client.get("/v1/models", headers={"Origin": server.url}).status_code == 200
    assert server.client.options(
        CHAT, headers={**page, "Access-Control-Request-Method": "POST"}
    ).status_code in (403, 405)
    r = server.client.post(CHAT, content=json.dumps({"messages": []}), headers={"Content-Type": "text/plain"})
    assert r.status_code == 415
    with other(server, cors_origin=("https://good.example",)) as s:
        good = {"Origin": "https://good.example"}
        assert (
            s.client.get("/v1/models", headers=good).headers["access-control-allow-origin"]
            == "https://good.example"
        )
        asked = {
            **good,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        assert s.client.options(CHAT, headers=asked).status_code == 200
        assert s.client.get("/v1/models", headers=page).status_code == 403


@pytest.mark.parametrize(
    "given, said",
    [
        ({"host": "0.0.0.0"}, "--api-key"),
        ({"host": "example.org"}, "--api-key"),
        ({"host": "::"}, "--api-key"),
        ({"api_key": " x"}, "--api-key"),
        ({"api_key": ""}, "--api-key"),
        ({"port": 70000}, "--port"),
        ({"n_parallel": 0}, "--n-parallel"),
        ({"n_parallel": True}, "--n-parallel"),
        ({"timeout": float("nan")}, "--timeout"),
        ({"max_tokens_cap": 0}, "--max-tokens-cap"),
        ({"model": "/none.gguf"}, "/none.gguf"),
        ({"slot_save_path": "/dev/null/slots"}, "--slot-save-path"),
        ({"cors_origin": ("example.org/x",)}, "--cors-origin"),
        ({"cors_origin": ("https://",)}, "--cors-origin"),
        ({"cors_origin": ("chrome-extension://abc/page.html",)}, "--cors-origin"),
        ({"cors_origin": ("file://x",)}, "known are.*chrome-extension://"),
    ],
)
def test_settings_are_checked(given, said):
    with pytest.raises(EagleError, match=said):
        settings(**given)
    assert is_loopback("127.0.0.9") and is_loopback("::1") and not is_loopback("10.0.0.1")


def test_a_key_makes_a_public_address_fine():
    s = settings(host="0.0.0.0", api_key="s3cret")
    assert s.host == "0.0.0.0" and s.api_key == "s3cret" and "s3cret" not in repr(s)
    with pytest.raises(EagleError, match="--api-key"):
        dataclasses.replace(s, api_key=None)


# -- sizes and ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", ["NaN", "1e999", -1, 11, "true", '"1"', "[]"]),
        ("top_p", [-0.1, 1.1]),
        ("max_tokens", [0, -1, "true", 1.5, '"9"']),
        ("n", [0, 4, "2.0"]),
        ("stop", [json.dumps(["x"] * 257), json.dumps("x" * 4097), 5]),
        ("seed", [1 << 64, "1.5", '"x"']),
        ("top_logprobs", [21, 3]),
        ("logprobs", ['"yes"', 1]),
        ("logit_bias", ['{"x": 1}', '{"5": 101}', '{"99999": 1}', '{"-1": 1}', "[]"]),
        (
            "messages",
            ["[]", "{}", '"x"', "null", '[{"role": "user"}, 5]', '[{"role": "boss", "content": ""}]'],
        ),
        ("model", [5, json.dumps("x" * 600)]),
        ("grammar", ['""', json.dumps("x" * 70000), 5]),
        ("response_format", ['{"type": "xml"}', '{"type": "json_schema"}', "5"]),
        (
            "tools",
            [
                "5",
                '[{"type": "function"}]',
                json.dumps([{"type": "function", "function": {"name": "f"}}] * 2049),
            ],
        ),
        ("tool_choice", ['"required"', '{"type": "function", "function": {"name": "none"}}', '"maybe"']),
        ("stream_options", ["5", '{"include_usage": 1}']),
        (
            "speculative",
            [
                '{"n_max": 64}',
                '{"tree": "axb"}',
                '{"tree": "99x99x99"}',
                '{"p_min": 0.5}',
                '{"n_max": 2, "tree": "8x3x3"}',
                "true",
            ],
        ),
        ("mirostat_mode", [3]),
        ("repeat_penalty", [0]),
        ("top_k", [1 << 40]),
        ("min_p", [2]),
        ("user", [5]),
    ],
)
def test_every_parameter_has_a_range(server, name, values):
    """400, with the field's name in the message and in param."""
    for value in values:
        rest = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        rest.pop(name, None)
        text = json.dumps(rest)[:-1] + f', "{name}": {value}}}'
        r = server.client.post(CHAT, content=text, headers=JSON)
        error = r.json()["error"]
        assert r.status_code == 400 and error["param"].startswith(name) and name in error["message"], (
            value,
            r.text,
        )


def test_unknown_fields(server):
    error = ask(server.client, temprature=1).json()["error"]
    assert (
        "temprature" in error["message"]
        and "did you mean temperature?" in error["message"]
        and error["param"] == "temprature"
    )
    assert "n_max" in ask(server.client, speculative={"nmax": 1}).json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe\x00",
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1e5",
        b'"x"',
    ],
)
def test_bodies_that_are_no_json_object(server, content):
    r = server.client.post(CHAT, content=content, headers=JSON)
    assert r.status_code in (400,) and set(r.json()["error"]) == {"message", "type", "param", "code"}


def test_paths_and_methods(server):
    assert server.client.get("/none").json()["error"]["code"] == "not_found"
    r = server.client.get(CHAT)
    assert (
        r.status_code == 405
        and r.json()["error"]["code"] == "method_not_allowed"
        and r.headers["allow"] == "POST"
    )


def test_answers_do_not_wait_for_acknowledgements(server):
    """With Nagle's algorithm each would take 40 ms."""
    server.client.get("/health")
    sockets = [c.transport.get_extra_info("socket") for c in server.uvicorn.server_state.connections]
    assert sockets and all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


# -- many requests, and little time -----------------------------------------------------------------------


def test_a_full_queue(server):
    """Two run, two wait; the next is told to come again, and is served once there is room."""
    with Streams(server, 4):
        until(lambda: server.gate.inside == 4)
        r = ask(server.client)
        assert (
            r.status_code == 503
            and r.json()["error"]["code"] == "queue_full"
            and 1 <= int(r.headers["retry-after"]) <= 60
        )
        until(lambda: server.batcher.waiting() == 2)
        assert ask(server.client, n=2).status_code == 503
        assert server.client.get("/health").status_code == 200
    until(lambda: idle(server))
    assert ask(server.client, max_tokens=2).status_code == 200


def test_deadlines(server):
    """504 before the answer has begun; an event with the error afterwards."""
    with other(server, timeout=0.5) as s:
        r = ask(s.client, **ENDLESS)
        assert r.status_code == 504 and r.json()["error"]["code"] == "deadline"
        until(lambda: idle(s))
        assert ask(s.client, max_tokens=1).status_code in (200, 504)
    content = {"messages": [{"role": "user", "content": "x"}], "stream": True, **ENDLESS}
    short, long = 0.0, None
    for _ in range(20):  # until this machine gets as far as a token, and not as far as the context's end
        timeout = 0.5 if not short and long is None else 2 * short if long is None else (short + long) / 2
        with other(server, timeout=timeout) as s:
            with s.client.stream("POST", CHAT, json=content) as r:
                *chunks, last = events(r) if r.status_code == 200 else [None]
            until(lambda: idle(s))
        if chunks and last is not None:
            break
        short, long = (short, timeout) if chunks else (timeout, long)
    assert chunks and last["error"]["code"] == "deadline"
    assert ask(server.client, max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave(server, stream):
    """Running, waiting or about to start: all is free long before their answers would have ended."""
    content = json.dumps(
        {"messages": [{"role": "user", "content": "Tell a story."}], "stream": stream, **ENDLESS}
    ).encode()
    head = post_head(CHAT, len(content))
    tokens = lambda: server.batcher.snapshot()["tokens"]
    for far in (lambda: True, lambda: server.batcher.waiting() == 2, lambda: tokens() > before + 4):
        before = tokens()
        connections = [socket.create_connection(address(server)) for _ in range(4)]
        for c in connections:
            c.sendall(head + content)
        until(lambda: server.gate.inside == 4)
        until(far)
        for c in connections:
            c.close()
        until(lambda: idle(server))
        assert tokens() - before < ENDLESS["max_tokens"]  # of four such answers
    assert ask(server.client, max_tokens=2).status_code == 200
    until(lambda: not server.gate.jobs)  # the last one's thread may end after its answer is read


def test_one_requests_trouble_is_its_own(server):
    """An answer beside requests that fail, leave and are cut short is the answer alone."""
    alone = ask(server.client, max_tokens=40).json()["choices"][0]["message"]["content"]
    got = []
    reader = threading.Thread(
        target=lambda: got.append(ask(httpx.Client(base_url=server.url, timeout=60), max_tokens=40))
    )
    reader.start()
    for more in (
        {"grammar": "root ::= ["},
        {"messages": [{"role": "user", "content": "word " * 2000}]},
        {"response_format": {"type": "json_object", "schema": {"$ref": "x"}}},
    ):
        assert ask(server.client, **more).status_code in (400, 503)
    with Streams(server, 1):
        until(lambda: server.gate.inside == 2 or got)
    reader.join()
    assert got[0].json()["choices"][0]["message"]["content"] == alone
    until(lambda: idle(server))


# -- templates --------------------------------------------------------------------------------------------

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


TEMPLATES = {
    "loop": (LOOP, 0.3, "longer than 0.3 s"),
    "memory": ("{{ 'x' * 2000000000 }}", 60, "memory|too large"),
    "no function": ("{{ messages[0].content.nothing() }}", 60, "nothing|callable|function"),
    "refusal": ("{{ raise_exception('no such role') }}", 60, "no such role"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", 60, "too deep"),
}
CHEAP = [TEMPLATES[name] for name in ("loop", "no function", "refusal")]  # test_sandbox.py has others


@pytest.mark.parametrize("template, seconds, said", each(TEMPLATES.values(), CHEAP, ids=TEMPLATES))
def test_a_hostile_template(server, template, seconds, said):
    """400; and a request that needs no template is served."""
    before = server.batcher.base.metadata["tokenizer.chat_template"]
    server.batcher.base.metadata["tokenizer.chat_template"] = template
    try:
        with other(server, template_timeout=seconds) as s:
            s.app.state.server.choices._library._templates.start()
            r = ask(s.client)
            assert r.status_code == 400 and r.json()["error"]["param"] == "messages", r.text
            assert re.search(said, r.json()["error"]["message"]), r.text
            assert s.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            assert ask(s.client).status_code == 400  # the next child is like the first
    finally:
        server.batcher.base.metadata["tokenizer.chat_template"] = before


def test_texts_that_are_hard_to_tokenise(server, monkeypatch):
    """Texts that cannot fit, and masses of special tokens, are refused before they are tokenized."""
    tokenized, tokenize = [], server.batcher.base.tokenize
    monkeypatch.setattr(
        server.batcher.base,
        "tokenize",
        lambda text, *more, **named: (tokenized.append(len(text)), tokenize(text, *more, **named))[1],
    )
    for path, content in (
        (CHAT, {"messages": [{"role": "user", "content": " " * 1_900_000}]}),
        ("/v1/completions", {"prompt": "a" * 1_900_000}),
    ):
        assert server.client.post(path, json=content).json()["error"]["code"] == "context_length_exceeded"
    r = server.client.post("/tokenize", json={"content": "<|im_end|>" * 150_000})
    assert r.status_code == 400 and r.json()["error"]["param"] == "content" and not tokenized
    assert len(
        server.client.post("/tokenize", json={"content": "a < b " * 20_000}).json()["tokens"]
    ) == 60_001 and tokenized == [120_000]


# -- the process ------------------------------------------------------------------------------------------


def story(url, **more):
    content = {
        "messages": [{"role": "user", "content": "xyzzy plugh"}],
        "stream": True,
        "temperature": 0,
        **more,
    }
    return httpx.stream("POST", url + CHAT, json=content, timeout=30)


def test_sigterm_drains():
    """The running answer is finished, new ones are refused, and the process ends well."""
    with process("--model", os.path.relpath(smollm2("Q8_0")), "--eagle", shipped_head(), "--grace", 20) as p:
        assert p.url and p.first.startswith("serving")
        assert (
            ask(httpx.Client(base_url=p.url, timeout=30), grammar='root ::= "yes"').json()["choices"][0][
                "message"
            ]["content"]
            == "yes"
        )
        with (
            story(p.url, max_tokens=60, logit_bias=ENDLESS["logit_bias"]) as r,
            httpx.Client(base_url=p.url) as client,
        ):
            lines = r.iter_lines()
            next(lines)
            p.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").status_code == 200  # it still answers
            refused = ask(client)
            assert (
                refused.status_code == 503
                and refused.json()["error"]["code"] == "shutting_down"
                and "retry-after" in refused.headers
            )
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]" and p.process.wait(60) == 0
    said = [json.loads(line) for line in p.lines]
    assert {"health", "completions"} <= {
        line["route"].rsplit("/")[-1] for line in said
    } and "xyzzy" not in "".join(p.lines)


def test_sigint_drains_and_a_second_signal_ends_at_once():
    """Long before the answer or --grace would end."""
    with process("--grace", 3600, "--n_ctx", 4096) as p:
        with story(p.url, max_tokens=4000, logit_bias=ENDLESS["logit_bias"]) as r:
            lines = r.iter_lines()
            next(lines)
            p.process.send_signal(signal.SIGINT)
            with httpx.Client(base_url=p.url, timeout=60) as client:
                until(lambda: client.get("/ready").status_code == 503)
                assert client.get("/health").status_code == 200  # it still answers
            assert p.process.poll() is None and next(lines) is not None
            p.process.send_signal(signal.SIGINT)
            seen = []
            with contextlib.suppress(httpx.HTTPError):
                seen.extend(line for line in lines if line)
        assert "data: [DONE]" not in seen
        assert p.process.wait(60) in (0, 128 + signal.SIGTERM)  # the latter if a thread still uses the model
    assert "Traceback" not in "".join(p.lines)


def test_an_empty_file_is_no_key():
    with process("--api-key-file", "/dev/stdin", env={"EAGLE3_API_KEY": "k"}) as p:
        assert p.process.wait(60) == 2


@pytest.mark.thorough  # test_server_failures.py has one that is quick
def test_grace_is_kept():
    """What is not finished by then gets an error, and the process ends."""
    with process("--grace", 1, env={"EAGLE3_API_KEY": "k"}) as p:
        with httpx.stream(
            "POST",
            p.url + CHAT,
            json={
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                **ENDLESS,
                "max_tokens": 450,
            },
            headers={"Authorization": "Bearer k"},
            timeout=30,
        ) as r:
            lines = r.iter_lines()
            next(lines)
            p.process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert json.loads(last[6:])["error"]["code"] == "shutting_down"
        assert p.process.wait(60) == 0


REFUSED = [
    (["--host", "0.0.0.0"], "--api-key"),
    (["--model", "none.gguf"], "none.gguf"),
    (["--host", "203.0.113.7", "--api_key", "k"], "cannot listen"),
    (["--n_parallel", "0"], "--n-parallel"),
    (["--chat-format", "chatmll"], "did you mean chatml?"),
]


@pytest.mark.parametrize("args, said", each(REFUSED, REFUSED[:3]))
def test_refusals_at_start_are_one_line(args, said):
    env = {k: v for k, v in os.environ.items() if k != "EAGLE3_API_KEY"}
    module = ["eagle3_llama.cli", "serve"] if "--model" in args else ["eagle3_llama.server"]
    done = subprocess.run(
        [sys.executable, "-m", *module, "--model", str(smollm2("Q8_0")), *args],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_mailboxes_lose_nothing():
    """Items of many threads, taken in batches, each in its thread's order."""
    from eagle3_llama.server.jobs.job import Mailbox

    async def collect():
        box, got = Mailbox(), []
        threads = [
            threading.Thread(target=lambda t=t: [box.put((t, i)) for i in range(2000)]) for t in range(4)
        ]
        for t in threads:
            t.start()
        while len(got) < 8000:
            got += await asyncio.wait_for(box.take(), 10)
        return got

    got = asyncio.run(collect())
    assert all([i for u, i in got if u == t] == list(range(2000)) for t in range(4))
