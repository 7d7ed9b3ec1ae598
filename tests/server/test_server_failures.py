"""What the server says, logs and gives back when something in it or around it fails. On a tiny model."""

import contextlib
import json
import logging
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import tiny_models
from pydantic import ValidationError
from server_tools import (
    CHAT,
    JSON,
    PARSERS,
    Blocked,
    address,
    ask,
    idle,
    no_threads,
    post_head,
    rest,
    running,
    settings,
    until,
)
from tiny_models import BOS, EOS, PROMPT

from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.server.errors import internal
from eagle3_llama.server.http import connection_limits, stream
from eagle3_llama.server.jobs.job import Choice
from eagle3_llama.server.llama_server.slots_body import SlotFile

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": PROMPT, "logit_bias": {str(EOS): -100, str(BOS): -100}}
LARGE = {**ENDLESS, "max_tokens": 200, "logprobs": 20}  # its answer fits no socket's buffers


def tiny(files, **more):
    return settings(
        **{"model": files[0], "eagle": files[1], "n_ctx": 512, "n_parallel": 2, "threads": 1, **more}
    )


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    with running(tiny(files, slot_save_path=str(tmp_path_factory.mktemp("slots")))) as s:
        yield s


@contextlib.contextmanager
def sent(server, path=COMPLETIONS, **content):
    """A connection with small buffers on which this request has been sent, and of which nothing is read."""
    raw = json.dumps(content).encode()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(60)
        s.connect(address(server))
        until(lambda: server.uvicorn.server_state.connections)
        for connection in list(server.uvicorn.server_state.connections):
            own = connection.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        s.sendall(post_head(path, len(raw)) + raw)
        yield s


# -- failures inside --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, why", [("removed", "cannot be read any more"), ("replaced", "is another file than the one")]
)
def test_a_file_that_is_gone_is_no_client_s_fault(files, tmp_path, caplog, change, why):
    """The children that check grammars read the vocabulary when they start. Other requests are served."""
    model = shutil.copy(files[0], tmp_path / "model.gguf")
    body = {"path": COMPLETIONS, "prompt": PROMPT, "max_tokens": 4}
    with running(tiny((str(model), files[1]))) as s:
        model.unlink()
        if change == "replaced":
            tiny_models.target(model, n_vocab=400)
        with caplog.at_level(logging.INFO, "eagle3_llama.server"):
            for more in ({"json_schema": {"type": "object"}}, {"grammar": 'root ::= "x"'}):
                failed = ask(s.client, **{**body, "path": "/completion"}, **more)
                assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        assert "cannot start" in caplog.text and f"{model}" in caplog.text and why in caplog.text
        assert ask(s.client, **body).status_code == 200


def test_a_failure_before_the_answer_is_500(server, monkeypatch, caplog):
    with monkeypatch.context() as m, caplog.at_level(logging.INFO, "eagle3_llama.server"):
        m.setattr(server.batcher, "slots", lambda: 1 / 0)
        r = server.client.get("/slots", headers={"X-Request-Id": "mine"})
    assert r.status_code == 500 and r.json()["error"]["code"] == "internal_error"
    assert r.headers["x-request-id"] == "mine" and "ZeroDivisionError" not in r.text
    assert "request mine failed" in caplog.text and "ZeroDivisionError" in caplog.text
    assert server.client.get("/slots").status_code == 200


def test_a_failure_after_the_answer_has_begun_ends_the_connection(server, monkeypatch):
    """The client sees that the answer is not whole, and the slot is free."""
    with monkeypatch.context() as m:
        m.setattr(stream, "joined", lambda events: 1 / 0)
        body = {**ENDLESS, "max_tokens": 400, "stream": True}
        with (
            pytest.raises(httpx.RemoteProtocolError),
            server.client.stream("POST", COMPLETIONS, json=body) as r,
        ):
            assert r.status_code == 200
            r.read()
    until(lambda: idle(server))
    assert ask(server.client, path=COMPLETIONS, prompt=PROMPT, max_tokens=2).status_code == 200


def test_threads_that_run_out_and_come_back(server):
    body = {"path": COMPLETIONS, "prompt": PROMPT, "max_tokens": 2}
    assert ask(server.client, **body).status_code == 200
    with no_threads():
        for n in (1, 3):
            r = ask(server.client, **body, n=n)
            assert r.status_code == 503 and r.json()["error"]["code"] == "busy" and "retry-after" in r.headers
    until(lambda: idle(server) and not server.gate.jobs)
    assert server.gate.logprobs.held == 0
    assert ask(server.client, **body, n=3).status_code == 200


def test_no_thread_for_a_first_request(files):
    """The pool of threads is empty then."""
    with running(tiny(files)) as s:
        shared = s.app.state.server
        with no_threads():
            for _ in range(shared.tokenizing.most + 1):
                r = s.client.post("/tokenize", json={"content": "x"})
                assert r.status_code == 503 and r.json()["error"]["code"] == "busy"
        until(lambda: shared.tokenizing.inside == 0)
        assert s.client.post("/tokenize", json={"content": "x"}).status_code == 200


def test_an_engine_that_does_not_return(files, monkeypatch):
    """The deadline is said although the request's thread still waits for the engine."""
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.01)
    with running(tiny(files, timeout=0.2)) as s:
        with Blocked(s):
            assert ask(s.client, path=COMPLETIONS, **ENDLESS).status_code == 504
            with s.client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as r:
                *_, last = (line for line in r.iter_lines() if line)
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline"
            assert s.gate.inside == 2
        until(lambda: idle(s))


MARK = "Qx7-of-the-prompt"


def quoting():
    """Exceptions that quote what a client sent: pydantic's, Python's, and those that others led to."""
    try:
        SlotFile.model_validate({"filename": f"/{MARK}"})
    except ValidationError as e:
        yield e
    for kind in (ValueError, KeyError, RuntimeError, OSError):
        yield kind(MARK)
    yield UnicodeEncodeError("utf-8", MARK, 0, 1, MARK)
    led = ZeroDivisionError(MARK)
    led.__cause__ = TypeError(MARK)
    led.__cause__.__context__ = AttributeError(MARK)
    yield led
    yield EagleError(ErrorKind.NATIVE, MARK)


POSTS = [
    COMPLETIONS,
    CHAT,
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/completion",
    "/tokenize",
]
POSTS += [
    "/v1/responses/input_tokens",
    "/apply-template",
    "/detokenize",
    "/v1/embeddings",
    "/slots/0?action=save",
]


def test_nothing_of_a_request_is_in_the_log(server, monkeypatch, caplog, capfd):
    """Whatever is wrong with it, and whatever fails inside."""
    shared = server.app.state.server
    messages = [{"role": "user", "content": MARK}]
    wrong = [{MARK: 1}, {"prompt": {MARK: MARK}}, {"messages": MARK}, {"messages": messages, "n": MARK}]
    wrong += [
        {"messages": messages, "max_tokens": MARK, "input": MARK, "content": MARK, "filename": f"/{MARK}"}
    ]
    with caplog.at_level(logging.INFO, "eagle3_llama.server"):
        for path in POSTS:
            for body in wrong:
                assert server.client.post(path, json=body).status_code in (400, 501)
            assert server.client.post(path, content=f'{{"{MARK}', headers=JSON).status_code in (400, 501)
        assert server.client.get(f"/{MARK}?{MARK}={MARK}").status_code == 404
        assert server.client.get(f"/v1/responses/{MARK}/input_items?limit={MARK}").status_code == 400
        for e in quoting():
            with monkeypatch.context() as m:
                m.setattr(shared.choices, "completion", lambda body, e=e: raised(e))
                assert server.client.post(COMPLETIONS, json={"prompt": MARK}).status_code == 500
            with monkeypatch.context() as m:
                call = lambda body, e=e: [Choice(0, 0, lambda llm: raised(e))]
                m.setattr(shared.choices, "completion", call)
                m.setattr("eagle3_llama.server.jobs.job.from_exception", lambda *_: internal())
                assert server.client.post(COMPLETIONS, json={"prompt": MARK}).status_code == 500
            with monkeypatch.context() as m, contextlib.suppress(httpx.RemoteProtocolError):
                m.setattr(stream, "joined", lambda events, e=e: raised(e))
                server.client.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 3, "stream": True})
        until(lambda: idle(server))
    said = caplog.text + "".join(capfd.readouterr())
    assert MARK not in said
    assert said.count("Traceback") >= 3 * len(list(quoting())) and "ValidationError" in said
    assert "raise e" in said and "test_server_failures.py" in said


def raised(e):
    raise e


# -- clients ----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_is_499_in_the_log(server, caplog):
    raw = json.dumps({**ENDLESS, "max_tokens": 400}).encode()
    with caplog.at_level(logging.INFO, "eagle3_llama.server.access"), Blocked(server) as blocked:
        with socket.create_connection(address(server), timeout=60) as s:
            s.sendall(post_head(COMPLETIONS, len(raw)) + raw)
            until(lambda: server.batcher.waiting() == 1)
        until(lambda: all(job.gone for job in list(server.gate.jobs)))
        blocked.go()  # the line comes when the request has left the batcher
        until(lambda: any(json.loads(r.message).get("status") == 499 for r in caplog.records))
    until(lambda: idle(server))


@PARSERS
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read(files, monkeypatch, stream, parser):
    """It is disconnected, while its answer is being made or when that is done, and holds nothing."""
    monkeypatch.setattr(connection_limits, "UNREAD_SECONDS", 0.3)
    with running(tiny(files), parser=parser) as s, sent(s, **LARGE, stream=stream) as c:
        until(lambda: not s.uvicorn.server_state.connections)
        until(lambda: idle(s) and s.gate.logprobs.held == 0)
        head, _, got = rest(c).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and not got.endswith((b"0\r\n\r\n", b"}"))


@PARSERS
def test_answers_that_nobody_reads_have_room_together(files, monkeypatch, parser):
    """They are bytes in memory, until they have been read or the client has gone."""
    with running(tiny(files), parser=parser) as s:
        room = s.app.state.server.answers
        with sent(s, "/tokenize", content="x5 " * 100_000, with_pieces=True):
            until(lambda: room.held > 1_000_000)
            monkeypatch.setattr(room, "most", room.held)
            r = s.client.post("/tokenize", json={"content": "x5"})
            assert r.status_code == 503 and "answers that they do not read" in r.json()["error"]["message"]
        until(lambda: room.held == 0)
        assert s.client.post("/tokenize", json={"content": "x5"}).status_code == 200
        until(lambda: room.held == 0)


@PARSERS
def test_a_slow_reader_gets_all(files, monkeypatch, parser):
    """Reading little by little is reading."""
    monkeypatch.setattr(connection_limits, "UNREAD_SECONDS", 1.0)
    with running(tiny(files), parser=parser) as s, sent(s, **LARGE, stream=False) as c:
        until(lambda: s.uvicorn.server_state.total_requests == 1)
        data, pause = b"", threading.Event()
        while b"\r\n\r\n" not in data:
            data += c.recv(100)
        head, _, got = data.partition(b"\r\n\r\n")
        size = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-le"))
        for _ in range(20):
            pause.wait(0.1)  # together longer than the limit
            got += c.recv(4000)
        while len(got) < size:
            part = c.recv(65536)
            assert part, "cut off"
            got += part
        assert len(json.loads(got)["choices"][0]["logprobs"]["tokens"]) >= 200


def test_a_stream_that_is_long_over_time(files, monkeypatch):
    """Whatever holds it up, the server gives it up some time past its deadline."""
    timeout = 3600.0
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.01)
    monkeypatch.setattr(stream, "STALLED", 0.2 - timeout)
    with running(tiny(files, timeout=timeout)) as s:
        with Blocked(s), sent(s, **ENDLESS, stream=True) as c:
            until(lambda: s.batcher.waiting() == 1)
            until(lambda: not s.uvicorn.server_state.tasks)
            assert b"[DONE]" not in rest(c)
        until(lambda: idle(s))


# -- slot files -------------------------------------------------------------------------------------------


def save(server, name):
    return server.client.post("/slots/0?action=save", json={"filename": name})


def test_a_disk_without_space(server, tmp_path):
    """507, and nothing half-written is left. The limit on a file's size stands for the disk's."""
    folder = server.settings.slot_save_path
    ask(server.client, path=COMPLETIONS, prompt=PROMPT, max_tokens=2)
    until(lambda: idle(server))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        r = save(server, "full.bin")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    error = r.json()["error"]
    assert r.status_code == 507 and error["code"] == "no_space" and "the disk is full" in error["message"]
    assert folder not in error["message"]
    assert not list(server_files(server, "full"))
    assert save(server, "full.bin").status_code == 200


def server_files(server, name):
    from pathlib import Path

    return [p for p in Path(server.settings.slot_save_path).iterdir() if name in p.name]


def test_a_folder_with_too_many_files(files, tmp_path):
    """10,000 beside the one that is written. One that is there may be replaced."""
    for i in range(10_000):
        (tmp_path / f"{i}").touch()
    with running(tiny(files, slot_save_path=str(tmp_path))) as s:
        r = save(s, "one-more")
        assert r.status_code == 507 and r.json()["error"]["code"] == "slot_files_full"
        assert "10000" in r.json()["error"]["message"] and not (tmp_path / "one-more").exists()
        assert save(s, "7").status_code == 200
        (tmp_path / "8").unlink()
        assert save(s, "one-more").status_code == 200


# -- the process ------------------------------------------------------------------------------------------

STUCK = """
import sys, time
from eagle3_llama.runtime.engine import Engine
Engine.prefill = lambda *_, **__: time.sleep(3600)  # a native call that hangs
from eagle3_llama.server.http.process import serve
from eagle3_llama.server.settings import ServerSettings
serve(ServerSettings(model=sys.argv[1], port=0, n_ctx=256, n_parallel=1, threads=1, grace=0.6))
"""
EARLY = """
import signal, sys
from fastapi import FastAPI
from eagle3_llama.server.jobs.gate import Gate
from eagle3_llama.server.http.process import DrainingServer, listen_at, uvicorn_config
from eagle3_llama.server.settings import ServerSettings
settings = ServerSettings(model=sys.argv[1], port=0, grace=3600)
server = DrainingServer(uvicorn_config(FastAPI(), 9), settings, Gate(1, 1, None))
server.handle_exit(signal.SIGTERM, None)
server.run(sockets=[listen_at(settings)])
print("ended", server.gate.draining)
"""


def test_a_native_call_that_hangs_does_not_keep_the_process(files):
    """--grace is kept all the same, and the client is told."""
    p = subprocess.Popen([sys.executable, "-c", STUCK, files[0]], stdout=subprocess.PIPE, text=True)
    try:
        url = p.stdout.readline().split()[-1]
        seen = []
        body = {"prompt": PROMPT, "max_tokens": 5}
        ask_it = lambda: seen.append(httpx.post(url + COMPLETIONS, json=body, timeout=120).json())
        asking = threading.Thread(target=ask_it, daemon=True)
        asking.start()
        until(lambda: httpx.get(url + "/slots", timeout=60).json()[0]["busy"])
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 128 + signal.SIGTERM
        asking.join(60)
        assert seen[0]["error"]["code"] == "shutting_down"
    finally:
        p.kill()
        p.wait(60)


def test_a_signal_while_the_server_starts(files):
    done = subprocess.run(
        [sys.executable, "-c", EARLY, files[0]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "ended True", done.stderr
