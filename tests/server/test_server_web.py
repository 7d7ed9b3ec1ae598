"""What browsers, proxies and clients' libraries expect of HTTP. On a tiny model."""

import base64
import hashlib
import json
import re
import socket

import httpx
import pytest
from paths import ROOT
from server_tools import CHAT, JSON, Blocked, address, ask, idle, running, tiny, until
from tiny_models import EOS, PROMPT

from eagle3_llama import EagleError
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.server.http import stream

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": PROMPT, "logit_bias": {str(EOS): -100}}
# as openai-node 6 sends them
OPENAI_JS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,"
    "x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


@pytest.fixture(scope="module")
def server(files):
    with running(tiny(files)) as s:
        yield s


def connect(server):
    return socket.create_connection(address(server), timeout=60)


def all_of(s):
    data = b""
    while part := s.recv(65536):
        data += part
    return data


# -- browsers ---------------------------------------------------------------------------------------------


def test_openais_client_in_a_browser(files):
    with running(tiny(files, cors_origin=("https://good.example",))) as s:
        asked = {
            "Origin": "https://good.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": OPENAI_JS,
        }
        r = s.client.options(CHAT, headers=asked)
        assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "https://good.example"
        assert set(OPENAI_JS.split(",")) <= {
            h.strip().lower() for h in r.headers["access-control-allow-headers"].split(",")
        }
        assert s.client.options(CHAT, headers={**asked, "Origin": "https://evil.example"}).status_code == 400
        assert (
            s.client.get("/slots", headers={"Host": "good.example"}).status_code == 200
        )  # behind a proxy that hands its name on


@pytest.mark.parametrize(
    "host, fine",
    [
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("[::1", False),
        ("127.0.0.1", True),
        ("localhost:99", True),
        ("[::1]:80", True),
    ],
)
def test_another_sites_name(server, host, fine):
    """A site that gives its name this machine's address cannot read what needs no key."""
    for path in ("/slots", "/metrics", "/v1/models", "/"):
        r = server.client.get(path, headers={"Host": host})
        assert r.status_code == (200 if fine else 403), path
        assert fine or r.json()["error"]["code"] == "host"
    assert server.client.get("/health", headers={"Host": host}).status_code == 200


def test_with_a_key_any_name_is_fine(files):
    with running(tiny(files, api_key="k")) as s:
        assert s.client.get("/slots", headers={"Host": "models.example"}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "chrome-extension://abcdefghijklmnop",
        "moz-extension://0f0c1a2b-1111-2222-3333-444455556666",
        "app://obsidian.md",
        "app://-",
        "tauri://localhost",
        "capacitor://localhost",
        "vscode-webview://1q2w3e",
        "https://good.example",
    ],
)
def test_applications_and_extensions(server, origin):
    """They may be allowed as sites are. A page of a public site asks before it reaches loopback."""
    given = tiny((server.settings.model, server.settings.eagle), cors_origin=(origin,))
    with running(given, server.batcher) as s:
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Private-Network": "true",
        }
        r = s.client.options(CHAT, headers=asked)
        assert r.status_code == 200 and r.headers["access-control-allow-private-network"] == "true"
        assert r.headers["access-control-allow-origin"] == origin
        r = s.client.get("/v1/models", headers={"Origin": origin})
        assert r.status_code == 200 and r.headers["access-control-allow-origin"] == origin
        assert s.client.options(CHAT, headers={**asked, "Origin": "https://evil.example"}).status_code != 200


def test_the_page_is_one_small_file_that_loads_nothing():
    """test_server_page.py has what it does in a browser."""
    html = (ROOT / "eagle3_llama/server/http/page/index.html").read_text()
    assert len(html.encode()) < 60_000
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|\son\w+=\"|@import|<link[^>]+stylesheet",
        html,
    )


def test_the_page_has_its_library_within(server):
    """As it was published, with its licences; and the policy allows the page's scripts alone."""
    folder = ROOT / "eagle3_llama/server/http/page/markdown-it"
    library, licences = (folder / "markdown-it.min.js").read_text(), (folder / "LICENSE").read_text()
    answer = server.client.get("/")
    scripts = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    assert len(scripts) == 3 and library.startswith(scripts[1]) and len(scripts[1]) > 0.99 * len(library)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    policy = answer.headers["content-security-policy"]
    assert re.findall(r"'sha256-(.+?)'", policy) == hashes and "sourceMappingURL" not in answer.text
    for name in ("markdown-it", "entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"):
        assert name in licences


# -- what clients look for first ---------------------------------------------------------------------------


def test_clients_find_the_size_of_the_context(server):
    """In the names of several servers. A request has this much, not all of the cache."""
    (model,) = server.client.get("/v1/models").json()["data"]
    names = "context_length", "max_model_len", "context_window", "max_context_length"
    assert [model[name] for name in names] == [256] * 4
    meta = model["meta"]
    assert (meta["n_ctx"], meta["n_ctx_train"], meta["n_vocab"], meta["n_embd"]) == (256, 1024, 320, 64)
    assert meta["n_params"] > 1000 and meta["size"] > 1000
    props = server.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256 and props["total_slots"] == 2
    assert props["model_path"] == "target.gguf" and props["model_alias"] == model["id"]
    assert (props["bos_token"], props["eos_token"], props["chat_template"]) == ("<s>", "</s>", "")


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/health/", "/v1/models", "/health", "/slots/", "/props/", "/"]
)
def test_a_slash_at_the_end_and_head(server, path):
    r = server.client.get(path, follow_redirects=False)
    assert r.status_code == 200
    head = server.client.head(path)
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == r.headers["content-type"]
    assert server.client.head(CHAT).status_code == 405 and server.client.head("/none/").status_code == 404


def test_a_slash_changes_nothing_else(server):
    body = {"prompt": PROMPT, "max_tokens": 2}
    assert server.client.post(COMPLETIONS + "/", json=body).status_code == 200
    with running(tiny((server.settings.model, None), api_key="k"), server.batcher) as s:
        with httpx.Client(base_url=s.url) as stranger:
            assert [stranger.get(p).status_code for p in ("/health/", "/v1/models/", "//")] == [200, 401, 401]
            assert stranger.head("/health").status_code == 200 and stranger.head("/props").status_code == 401


@pytest.mark.parametrize(
    "path, body, field, hint",
    [
        (CHAT, {"strict": True}, "strict", None),
        (CHAT, {"temprature": 1}, "temprature", "temperature"),
        (CHAT, {"schema": {}}, "schema", "json_schema"),
        (CHAT, {"response_format": {"type": "json_object", "strict": True}}, "response_format.strict", None),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}},
            "response_format.json_schema.shema",
            "schema",
        ),
        (CHAT, {"contents": ""}, "contents", None),
        (COMPLETIONS, {"prompt": "x", "prmpt": "x"}, "prmpt", "prompt"),
        (COMPLETIONS, {"prompt": "x", "messages": []}, "messages", None),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_hints_are_fields_of_the_same_object(server, path, body, field, hint):
    """A hint that names the refused field, or one of another object, leads nowhere."""
    body = body if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}], **body}
    error = server.client.post(path, json=body).json()["error"]
    assert error["code"] == "unknown_field" and error["param"] == field
    assert error["message"].partition("did you mean ")[2] == (f"{hint}?" if hint else "")


# -- slow ones --------------------------------------------------------------------------------------------


def test_streams_are_kept_alive(server, monkeypatch):
    """Comments while nothing comes, then what comes; and a failure is an event then."""
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.01)
    with (
        Blocked(server) as blocked,
        server.client.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 5, "stream": True}) as r,
    ):
        lines = r.iter_lines()
        assert r.status_code == 200 and [next(lines) for _ in range(4)] == [
            ": keep-alive",
            "",
            ": keep-alive",
            "",
        ]
        blocked.go()
        said = [line for line in lines if line.startswith("data: ")]
    assert said[-1] == "data: [DONE]" and len(said) > 1
    with (
        Blocked(server),
        server.client.stream(
            "POST",
            CHAT,
            json={"messages": [{"role": "user", "content": "x"}], "stream": True, "grammar": "root ::= ("},
        ) as r,
    ):
        *comments, last = [line for line in r.iter_lines() if line]
    if comments:
        assert set(comments) == {": keep-alive"} and json.loads(last[6:])["error"]["code"] == "refused"
    until(lambda: idle(server))


def test_failures_before_a_silence_have_a_status(server):
    r = ask(server.client, stream=True, grammar="root ::= (")
    assert r.status_code == 400 and r.json()["error"]["code"] == "refused"


# -- what is asked for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_there_is_room_for(files, name):
    """As many as there is room for, and `length`."""
    with running(tiny(files, max_tokens_cap=7)) as s:
        for n in (8, 10**6, 10**30):
            r = ask(s.client, **{"max_tokens": None, name: n}, logit_bias=ENDLESS["logit_bias"])
            assert r.status_code == 200 and r.json()["choices"][0]["finish_reason"] == "length", r.text
            assert (
                7 <= r.json()["usage"]["completion_tokens"] <= 10
            )  # more where the last ends within a character
    with running(tiny(files)) as s:
        r = ask(s.client, path=COMPLETIONS, **ENDLESS, max_tokens=10**6)
        assert (
            r.status_code == 200
            and r.json()["choices"][0]["finish_reason"] == "length"
            and r.json()["usage"]["total_tokens"] <= 257
        )


def test_wrong_parameters_are_400_in_openais_form(server):
    for content in (
        {"messages": [], "max_tokens": 1},
        {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        {"mesages": []},
    ):
        r = server.client.post(CHAT, json=content, headers=JSON)
        assert r.status_code == 400 and set(r.json()["error"]) == {"message", "type", "param", "code"}
        assert r.json()["error"]["type"] == "invalid_request_error"
    assert "422" not in {
        s
        for methods in server.client.get("/openapi.json").json()["paths"].values()
        for m in methods.values()
        for s in m["responses"]
    }


# -- the engine -------------------------------------------------------------------------------------------


def test_health_of_a_batcher_that_has_died(files, monkeypatch):
    with running(tiny(files)) as s:
        assert s.client.get("/health").status_code == 200
        monkeypatch.setattr(stream, "KEEP_ALIVE", 0.01)
        with (
            Blocked(s) as blocked,
            s.client.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 200, "stream": True}) as r,
        ):
            monkeypatch.setattr(s.batcher, "_has_work", lambda: 1 / 0)
            blocked.go()
            *_, last = (line for line in r.iter_lines() if line)
        s.batcher._thread.join(60)
        assert "error" in json.loads(last[6:])
        r = s.client.get("/health")
        assert r.status_code == 503 and r.json()["error"]["code"] == "engine_ended"
        assert (
            ask(s.client, path=COMPLETIONS, prompt=PROMPT).status_code == 500
            and s.client.get("/metrics").status_code == 200
        )
        until(lambda: s.gate.inside == 0)


@pytest.mark.parametrize(
    "name, said",
    [("chatmll", "did you mean chatml"), ("chat_template.tools", "no chat format"), ("zzz", "known are")],
)
def test_a_chat_format_that_there_is_not(files, name, said):
    with pytest.raises(EagleError, match=said):
        Batcher(BatchSettings(files[0], chat_format=name, n_ctx=64, n_parallel=1))
    with Batcher(BatchSettings(files[0], chat_format="chatml", n_ctx=64, n_parallel=1)) as b:
        assert b.alive()
