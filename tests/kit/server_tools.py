"""Servers for the tests: in this process, with access to the batcher, and in their own process."""

import os

# several servers and a client share few cores: threads that spin would slow each other tenfold
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import contextlib
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.server.settings import ServerSettings

PARSERS = pytest.mark.parametrize(  # uvicorn takes httptools where it is installed, as Ray installs it
    "parser",
    [
        "h11",
        pytest.param(
            "httptools",
            marks=pytest.mark.skipif(not importlib.util.find_spec("httptools"), reason="needs httptools"),
        ),
    ],
)
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
ENDLESS = {"max_tokens": 900, "logit_bias": {"0": -100, "2": -100}}  # neither of SmolLM2's ends


def post_head(path, length):
    """The bytes of a POST request before its JSON body of `length` bytes."""
    lines = f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def settings(**more):
    return ServerSettings(
        **{
            "model": str(smollm2("Q8_0")),
            "eagle": str(shipped_head()),
            "n_ctx": 1024,
            "n_parallel": 3,
            "threads": 2,
            **more,
        }
    )


def tiny(files, **more):
    """settings() of a tiny target and its head. files: their paths."""
    head = files[1] if len(files) > 1 else None
    return settings(**{"model": files[0], "eagle": head, "n_ctx": 256, "n_parallel": 2, "threads": 1, **more})


def batcher_of(given):
    """A batcher of these settings. Its costs are measured in the first load of a run, not in several."""
    from eagle3_llama.batching import Batcher, BatchSettings
    from eagle3_llama.runtime import cost_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_files, "LOADS", 1)
        return Batcher(BatchSettings(**given.batch()))


def app_of(given, batcher):
    """The application. What looks at each token of the vocabulary is made once for each batcher."""
    from eagle3_llama.server.http.app import create_app
    from eagle3_llama.server.prompt import choices

    kept, make = batcher.__dict__.setdefault("kept_sizes", {}), choices.PromptSize

    def size(base, n_ctx):
        if n_ctx not in kept:
            kept[n_ctx] = make(base, n_ctx)
        return kept[n_ctx]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "PromptSize", size)
        return create_app(given, batcher)


@contextlib.contextmanager
def running(given, batcher=None, parser="h11"):
    """A server of these settings: url, client (httpx), app, batcher, settings. parser: of HTTP.

    It has one child of each kind of sandbox: they take most of the time that a server takes to start.
    test_sandbox.py, and servers of process(), have as many as usual.
    """
    from eagle3_llama.server.http.connection_limits import connection_limit
    from eagle3_llama.server.http.process import listen_at, uvicorn_config

    own = batcher is None
    batcher = batcher or batcher_of(given)
    app = app_of(given, batcher)
    maker = app.state.server.choices
    library = maker._library  # None of a model without a template
    for sandbox in (maker._grammars, *((library._templates, library._answers) if library else ())):
        sandbox.CHILDREN = 1
    server = uvicorn.Server(uvicorn_config(app, connection_limit(given.max_connections), parser))
    listener = listen_at(dataclasses.replace(given, port=0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    headers = {"Authorization": f"Bearer {given.api_keys[0]}"} if given.api_keys else {}
    try:
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
            yield SimpleNamespace(
                url=url,
                client=client,
                app=app,
                batcher=batcher,
                settings=given,
                gate=app.state.server.gate,
                uvicorn=server,
            )
    finally:
        server.should_exit = True
        thread.join(10)
        if own:
            batcher.close()


def other(server, **more):
    """Another application for the same batcher."""
    return running(settings(n_parallel=2, **more), server.batcher)


@contextlib.contextmanager
def process(*args, env=None, files=None):
    """`python -m eagle3_llama.server` on a free port: url, process, lines (of stderr so far).

    files: number of files that it may open."""
    command = [
        *(["sh", "-c", f'ulimit -n {files} && exec "$0" "$@"'] if files else []),
        sys.executable,
        "-m",
        "eagle3_llama.server",
        "--model",
        smollm2("Q8_0"),
        "--port",
        0,
        "--n_ctx",
        512,
        "--n_parallel",
        2,
        *args,
    ]
    p = subprocess.Popen(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(p.stderr), daemon=True)
    reader.start()
    try:
        first = p.stdout.readline()
        found = re.search(r"http://\S+", first)
        yield SimpleNamespace(url=found and found[0], process=p, lines=lines, first=first)
    finally:
        if p.poll() is None:
            p.kill()
        p.wait(10)
        reader.join(5)


def until(true, seconds=180.0):
    """Waits for true(); the seconds are for a test that hangs."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def no_threads():
    """No new thread can be started: the system has no room for its stack."""
    usual = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(usual)


class Blocked:
    """The batcher does nothing until the end of the block, or go()."""

    def __init__(self, server):
        self._inside, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=server.batcher.inbox.run, args=(self._hold,))

    def _hold(self):
        self._inside.set()
        self._go.wait(60)

    def __enter__(self):
        self._thread.start()
        assert self._inside.wait(60), "the batcher is busy"
        return self

    def go(self):
        self._go.set()
        self._thread.join(60)

    def __exit__(self, *_):
        self.go()


def address(server):
    """(host, port)."""
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def rest(s):
    """All that still comes over a connection, until its end."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := s.recv(65536):
            data += part
    return data


def ask(client, text="Name three rivers.", path=CHAT, **more):
    """A chat request, or with another path what `more` says."""
    body = (
        {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0, **more}
        if path == CHAT
        else more
    )
    return client.post(path, json=body)


def events(response):
    """The JSON of a stream's events; [DONE] as None. Comments, which a slow machine gets, are left out."""
    said = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [None if text == "[DONE]" else json.loads(text) for text in said]


def metric(server, name, *labels):
    """The value of the one sample of /metrics with these labels, written as name="value"."""
    lines = (
        line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if line[0] != "#"
    )
    found = [
        value
        for said, value in lines
        if said.split("{")[0] == name and all(label in said for label in labels)
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def idle(server):
    """No request inside, no slot held."""
    return server.gate.inside == 0 and not any(s["busy"] for s in server.batcher.slots())


class Streams:
    """Endless answers in threads, each left open until the end of the block."""

    def __init__(self, server, n, **more):
        self.server, self.leave, self.texts = server, threading.Event(), [""] * n
        self.threads = [threading.Thread(target=self._read, args=(i, more), daemon=True) for i in range(n)]

    def _read(self, i, more):
        content = {
            "messages": [{"role": "user", "content": f"Tell story {i}."}],
            "stream": True,
            **ENDLESS,
            **more,
        }
        with (
            httpx.Client(base_url=self.server.url, timeout=30) as client,
            client.stream("POST", CHAT, json=content) as r,
        ):
            for line in r.iter_lines():
                self.texts[i] += line
                if self.leave.is_set():
                    return

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *_):
        self.leave.set()
