"""File descriptors: there may be none for a moment, and connections leave enough of them for all else."""

import collections
import contextlib
import itertools
import json
import os
import resource
import signal
import socket

import httpx
import pytest
from server_tools import CHAT, PARSERS, address, ask, post_head, process, rest, running, settings, until
from tiers import each

from eagle3_llama.errors import EagleError
from eagle3_llama.models import smollm2
from eagle3_llama.server.http import connection_limits as limits

COMPLETIONS = "/v1/completions"
KINDS = ("template", "grammar", "schema")
NUMBERS = itertools.count()
linux = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux's prlimit and /proc")


def children(pid):
    """The sandboxes' processes of a server."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                if (
                    stat.read().rpartition(")")[2].split()[1] == str(pid)
                    and b"sandbox.child" in cmdline.read()
                ):
                    found.append(int(entry))
    return found


def settled(pid):
    """Waits until all four children are there, and no pipe is open that only their start needs.

    A process that is being started has more open than later; a limit set then would leave too much. A pipe
    of which the server has both ends belongs to its event loop: uvloop has two of them.
    """

    def of(process):
        """The pipes of its descriptors, without what it says to those who look on."""
        for fd in set(os.listdir(f"/proc/{process}/fd")) - {"1", "2"}:
            with contextlib.suppress(OSError):  # it may be closed meanwhile
                if (file := os.readlink(f"/proc/{process}/fd/{fd}")).startswith("pipe:"):
                    yield file

    def done():
        found = children(pid)
        single = {pipe for pipe, ends in collections.Counter(of(pid)).items() if ends == 1}
        return len(found) == 4 and single == {pipe for child in found for pipe in of(child)}

    until(done)


def kill_children(pid):
    killed = children(pid)
    for child in killed:
        os.kill(child, signal.SIGKILL)
    until(lambda: not set(killed) & set(children(pid)))


@contextlib.contextmanager
def no_descriptors(pid):
    """The process can open nothing until the end of the block, but for one connection to ask through."""
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = [fd for fd in range(usual[0]) if fd not in used]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[1], usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


def wants(what, client):
    """A request that needs a child of the sandbox for templates or of the one for grammars."""
    i = next(NUMBERS)  # the server remembers grammars and schemas
    if what == "template":
        return ask(client, max_tokens=1)
    prompt = {"path": COMPLETIONS, "prompt": "x", "max_tokens": 4}  # needs no template
    if what == "grammar":
        return ask(client, **prompt, grammar=f'root ::= "{i}"')
    schema = {"type": "object", "properties": {"n": {"enum": [i]}}, "required": ["n"]}
    return ask(client, response_format={"type": "json_object", "schema": schema}, max_tokens=40)


@linux
@pytest.mark.parametrize("what", each(KINDS, ["template"]))
def test_descriptors_that_run_out_and_come_back(what):
    """What needs a child process is told to come again, and is served once there are descriptors."""
    with process("--threads", 1) as p, httpx.Client(base_url=p.url, timeout=120) as client:
        for kind in KINDS:
            assert wants(kind, client).status_code == 200
        settled(p.process.pid)
        with no_descriptors(p.process.pid):
            kill_children(p.process.pid)
            for _ in range(4):  # more often than there are children
                r = wants(what, client)
                assert r.status_code == 503 and r.json()["error"]["code"] == "busy", r.text
                assert "retry-after" in r.headers
        for kind in KINDS:
            assert wants(kind, client).status_code == 200
        settled(p.process.pid)


@linux
def test_idle_connections_leave_descriptors_for_all_else():
    """More of them than the process may open files. Nobody is hindered who has a connection."""
    with process("--threads", 1, files=200) as p, httpx.Client(base_url=p.url, timeout=120) as client:
        assert wants("template", client).status_code == 200
        with contextlib.ExitStack() as idle:
            for _ in range(250):
                with contextlib.suppress(OSError):  # the server closes most of them at once
                    idle.enter_context(socket.create_connection(address(p), timeout=60))
            kill_children(p.process.pid)
            for what in KINDS:
                assert wants(what, client).status_code == 200
            assert len(os.listdir(f"/proc/{p.process.pid}/fd")) < 200
        until(lambda: len(os.listdir(f"/proc/{p.process.pid}/fd")) < 60)
        with httpx.Client(base_url=p.url, timeout=120) as another:
            until(lambda: another.get("/health").status_code == 200)


@PARSERS
def test_connections_beyond_the_limit(files, parser):
    """They are told so, whether they have sent a request or not. The others and later ones are served."""
    given = settings(model=files[0], eagle=None, n_ctx=256, n_parallel=1, threads=1, max_connections=3)
    with running(given, parser=parser) as s, contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(address(s), timeout=60))
        assert s.client.get("/health").status_code == 200
        held = [connect() for _ in range(2)]
        until(lambda: len(s.uvicorn.server_state.connections) == 3)
        with httpx.Client(base_url=s.url, timeout=60) as another:
            r = another.get("/health")
            assert r.status_code == 503 and r.json()["error"]["code"] == "busy" and "retry-after" in r.headers
            r = another.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 1_000_000}]})
            assert r.status_code == 503
        silent = connect()
        assert silent.recv(65536).startswith(b"HTTP/1.1 503")
        held[0].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200")
        held[1].close()
        until(lambda: len(s.uvicorn.server_state.connections) <= 2)
        with httpx.Client(base_url=s.url, timeout=60) as another:
            assert another.get("/health").status_code == 200


@PARSERS
def test_far_more_connections_than_the_limit(files, parser):
    """Only some of them get an answer; all are closed, and nothing of them is left."""
    given = settings(model=files[0], eagle=None, n_ctx=256, n_parallel=1, threads=1, max_connections=2)
    with running(given, parser=parser) as s, contextlib.ExitStack() as stack:
        many = []
        for _ in range(3 * limits.REFUSALS):
            many.append(stack.enter_context(socket.create_connection(address(s), timeout=60)))
        answers = [rest(c) for c in many[2:]]  # they ask nothing, and their time ends
        assert all(a == b"" or a.startswith(b"HTTP/1.1 503") for a in answers) and any(answers)
        for c in many:
            c.close()
        until(lambda: not s.uvicorn.server_state.connections)
        assert s.client.get("/health").status_code == 200


@PARSERS
def test_a_client_that_does_not_read_a_whole_answer(files, monkeypatch, parser):
    """It is disconnected while the rest of the answer waits in the server."""
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.1)
    given = settings(model=files[0], eagle=None, n_ctx=512, n_parallel=1, threads=1)
    with running(given, parser=parser) as s:
        content = json.dumps({"prompt": "x5", "max_tokens": 400, "logprobs": 20, "n": 4}).encode()
        with socket.socket() as c:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.connect(address(s))
            state = s.uvicorn.server_state
            until(lambda: state.connections)
            for connection in state.connections:
                own = connection.transport.get_extra_info("socket")
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            c.sendall(post_head(COMPLETIONS, len(content)) + content)
            until(lambda: not state.connections)
        assert state.total_requests == 0  # none whose answer has been sent whole
        assert s.client.get("/health").status_code == 200


def test_the_limit_comes_from_the_system(monkeypatch):
    files = 1024
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, 4096))
    assert limits.connection_limit(None) == 1024 - limits.SPARE - limits.REFUSALS
    assert limits.connection_limit(500) == 500
    with pytest.raises(EagleError, match="2160 file descriptors.*1024.*ulimit -n.*--max-connections"):
        limits.connection_limit(2000)
    files = 1 << 20
    assert limits.connection_limit(None) == limits.MOST
    files = resource.RLIM_INFINITY
    assert limits.connection_limit(None) == limits.MOST and limits.connection_limit(9999) == 9999
    files = 150
    with pytest.raises(EagleError, match="ulimit -n"):
        limits.connection_limit(None)


def test_too_few_descriptors_are_refused_at_the_start():
    with process("--model", smollm2("Q8_0"), files=100) as p:
        assert p.process.wait(120) == 2
    said = "".join(p.lines)
    assert said.startswith("error: ") and "ulimit -n" in said and said.count("\n") == 1
