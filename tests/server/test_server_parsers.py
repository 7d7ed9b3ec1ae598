"""Limits on what a client sends, with both of the parsers that uvicorn may use. On a tiny model."""

import contextlib
import dataclasses
import gzip
import json
import socket
import threading

import pytest
from server_tools import CHAT, JSON, PARSERS, Blocked, address, post_head, rest, running, settings, until
from tiny_models import EOS, PROMPT

from eagle3_llama.server.http import body_reader, connection_limits

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": PROMPT, "logit_bias": {str(EOS): -100}}
GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MUCH = 40 * connection_limits.MAX_HEADERS


@pytest.fixture(scope="module", params=PARSERS.args[1])
def server(request, files):
    given = settings(model=files[0], eagle=files[1], n_ctx=256, n_parallel=2, threads=1)
    with running(given, parser=request.param) as s:
        s.parser = request.param
        yield s


def connect(server):
    return socket.create_connection(address(server), timeout=60)


def raw(server, data):
    with connect(server) as s:
        s.sendall(data)
        return rest(s)


def error_in(answer):
    """(status, code) of an answer that is an error in JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "begun, more",
    [
        (GET + b"X-Long: ", b"x" * 1000),
        (GET, b"".join(b"X-Header-%d: value\r\n" % i for i in range(50))),
        (b"GET /", b"x" * 1000),
        (GET + b"X-", b"x" * 1000),
        (
            post_head(CHAT, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"1;",
            b"x" * 1000,
        ),
    ],
    ids=["a long value", "many headers", "a long path", "a long name", "a chunk's extension"],
)
def test_headers_without_an_end(server, begun, more):
    """No connection may fill the memory. The server closes it while the client still sends."""
    with connect(server) as s:
        s.sendall(begun)
        with contextlib.suppress(ConnectionError):
            # What the system's buffers hold counts as sent, whether the server reads it or not.
            for _ in range(MUCH // len(more)):
                s.sendall(more)
        answer = rest(s)  # a server that reads on neither answers nor closes: this times out
    assert answer == b"" or error_in(answer) in ((431, "headers_too_large"), (413, "body_too_large"))
    assert server.client.get("/health").status_code == 200


def test_long_headers_are_fine(server):
    """True if they come at once or in pieces."""
    r = server.client.get("/health", headers={f"X-Header-{i}": "v" * 1000 for i in range(50)})
    assert r.status_code == 200
    with connect(server) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.sendall(GET + b"Connection: close\r\n")
        for i in range(50):
            s.sendall(b"X-Header-%d: %b\r\n" % (i, b"v" * 1000))
            threading.Event().wait(0.002)
        s.sendall(b"\r\n")
        assert rest(s).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("where", ["a value", "many", "the path", "the query"])
def test_headers_that_are_too_long(server, where):
    """Also where they come at once, and nothing is left unfinished."""
    much = b"x" * (connection_limits.MAX_HEADERS + 5000)
    request = {
        "a value": GET + b"X-Long: " + much,
        "many": GET + b"\r\n".join(b"X-%d: y" % i for i in range(9000)),
        "the path": GET.replace(b"/health", b"/" + much)[:-2],
        "the query": GET.replace(b"/health", b"/health?" + much)[:-2],
    }[where]
    assert error_in(raw(server, request + b"\r\n\r\n")) == (431, "headers_too_large")
    assert server.client.get("/health").status_code == 200


NO_HTTP = [
    b"\0\1\2\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"\x16\x03\x01\x02\0\1\0" + b"z" * 300,
]
NO_HTTP += [post_head(CHAT, 5).replace(b"5", b"5x") + b"{}", post_head(CHAT, 5).replace(b"5", b"9" * 5000)]
CHUNKED = post_head(CHAT, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize("sent", [*NO_HTTP, CHUNKED + b"zz\r\n{}\r\n"], ids=repr)
def test_what_is_no_http(server, sent):
    """In JSON, as all errors. An encrypted connection, garbage, lengths that are none."""
    assert error_in(raw(server, sent)) == (400, "invalid_http")
    assert server.client.get("/health").status_code == 200


# -- what HTTP allows -------------------------------------------------------------------------------------


def test_a_body_in_chunks(server):
    body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
    pieces = b"".join(b"1;x=y\r\n%c\r\n" % c for c in body) + b"0\r\nX-Trailer: t\r\n\r\n"
    head = CHUNKED.replace(CHAT.encode(), COMPLETIONS.encode())
    answer = raw(server, head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + pieces)
    assert answer.startswith(b"HTTP/1.1 200") and b"text_completion" in answer


@pytest.mark.parametrize("stream", [False, True])
def test_the_older_http(server, stream):
    """HTTP/1.0 knows no chunks: an answer ends with its length, or with the connection."""
    body = json.dumps({**ENDLESS, "max_tokens": 3, "stream": stream}).encode()
    head = (
        post_head(COMPLETIONS, len(body))
        .replace(b"HTTP/1.1", b"HTTP/1.0")
        .replace(b"Host: 127.0.0.1\r\n", b"")
    )
    head, _, said = raw(server, head + body).partition(b"\r\n\r\n")
    assert b" 200" in head and b"chunked" not in head.lower()
    if stream:
        assert said.startswith(b"data: {") and said.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(said)["object"] == "text_completion"


def test_a_body_that_is_announced(server):
    """The client waits until the server wants it, or learns before that it does not."""
    body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
    expect = lambda length: post_head(COMPLETIONS, length)[:-2] + b"Expect: 100-continue\r\n\r\n"
    with connect(server) as s:
        s.sendall(expect(len(body)))
        assert s.recv(65536).startswith(b"HTTP/1.1 100")
        s.sendall(body)
        assert s.recv(65536).startswith(b"HTTP/1.1 200")
    with connect(server) as s:
        s.sendall(expect(10**9))
        assert s.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd, gzip", "x"])
def test_bodies_that_are_encoded(server, encoding):
    body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
    headers = {**JSON, "Content-Encoding": encoding}
    r = server.client.post(COMPLETIONS, content=gzip.compress(body), headers=headers)
    error = r.json()["error"]
    assert (r.status_code, error["code"]) == (415, "content_encoding") and encoding in error["message"]
    same = server.client.post(COMPLETIONS, content=body, headers={**JSON, "Content-Encoding": "identity"})
    assert same.status_code == 200


@pytest.mark.parametrize(
    "encoding, status", [("utf-8-sig", 200), ("utf-16", 400), ("utf-16-le", 400), ("utf-32", 400)]
)
def test_marks_before_a_body(server, encoding, status):
    """A mark of UTF-8 is nothing. Other encodings are refused by name."""
    content = json.dumps({**ENDLESS, "max_tokens": 3}).encode(encoding)
    r = server.client.post(COMPLETIONS, content=content, headers=JSON)
    assert r.status_code == status
    if status == 400:
        assert "send UTF-8" in r.json()["error"]["message"] and r.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_asks_again_and_leaves(server, monkeypatch, stream, later):
    """It is noticed, although what it sent last is not read before its first answer has been sent."""
    monkeypatch.setattr(connection_limits, "LOOK_SECONDS", 0.05)
    body = json.dumps({**ENDLESS, "max_tokens": 3, "stream": stream}).encode()
    request = post_head(COMPLETIONS, len(body)) + body
    with Blocked(server) as blocked:
        with connect(server) as s:
            s.sendall(request + (b"" if later else request))
            until(lambda: server.batcher.waiting() == 1)
            if later:
                s.sendall(request)
                until(lambda: any(c.flow.read_paused for c in server.uvicorn.server_state.connections))
        until(lambda: not server.gate.jobs or all(job.gone for job in server.gate.jobs), 30)
        blocked.go()
    until(lambda: server.gate.inside == 0)
    assert server.client.get("/health").status_code == 200


def test_many_requests_at_once(server):
    """A client may send several before it has an answer. However many it sends, few are kept."""
    with connect(server) as s:
        s.sendall(GET + b"\r\n" + GET + b"\r\n" + GET + b"Connection: close\r\n\r\n")
        assert rest(s).count(b"HTTP/1.1 200") == 3
    with connect(server) as s, Blocked(server):
        body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
        s.sendall(post_head(COMPLETIONS, len(body)) + body)
        until(lambda: server.batcher.waiting() == 1)
        with contextlib.suppress(ConnectionError):
            s.sendall((GET + b"\r\n") * 2000)
        if server.parser == "httptools":  # h11 reads one after the other
            s.settimeout(20)
            rest(s)  # it is closed, although the first has no answer yet
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: "]
)
def test_headers_that_do_not_come(server, monkeypatch, sent):
    monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.1)
    with connect(server) as s:
        s.sendall(sent)
        answer = rest(s)
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "slow_headers"


def test_further_requests_of_a_connection(server, monkeypatch):
    """Their headers have as long; an answer may take longer."""
    body = json.dumps({**ENDLESS, "max_tokens": 3}).encode()
    request = post_head(COMPLETIONS, len(body)) + body
    with connect(server) as patient, Blocked(server) as blocked:
        patient.sendall(request)
        until(lambda: server.batcher.waiting() == 1)
        monkeypatch.setattr(connection_limits, "HEADER_SECONDS", 0.1)
        with connect(server) as slow:
            assert rest(slow).startswith(b"HTTP/1.1 408")  # so long has the other waited
        blocked.go()
        assert patient.recv(65536).startswith(b"HTTP/1.1 200")
        patient.sendall(b"GET /heal")
        assert b"HTTP/1.1 408" in rest(patient)


def test_bodies_that_are_too_large(server):
    """Bodies are refused by their length before they are sent, or by counting. The client sees the answer."""
    assert raw(server, post_head(CHAT, 2_000_001)).startswith(b"HTTP/1.1 413")
    for content in (b" " * 2_000_001, (b" " * 100_000 for _ in range(50)), b" " * 6_000_000):
        r = server.client.post(CHAT, content=content, headers=JSON)
        assert r.status_code == 413 and r.json()["error"]["code"] == "body_too_large"
    assert server.client.post(CHAT, content=b" " * 1_999_999, headers=JSON).status_code == 400
    assert raw(server, post_head(CHAT, -5)).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("n_ctx, most", [(1024, 2_000_000), (31_250, 2_000_000), (40_000, 2_560_000)])
def test_bodies_follow_the_context(server, n_ctx, most):
    """One that fills a slot fits, by its length and by counting; a byte more does not."""
    body = b'{"content": "river"}'
    given = dataclasses.replace(server.settings, n_ctx=n_ctx)
    with running(given, server.batcher, server.parser) as s:
        for size, status in ((most, 200), (most + 1, 413)):
            padded = body + b" " * (size - len(body))
            for content in (padded, (padded[i : i + 100_000] for i in range(0, size, 100_000))):
                assert s.client.post("/tokenize", content=content, headers=JSON).status_code == status


def test_a_body_that_does_not_come(server, monkeypatch):
    monkeypatch.setattr(body_reader, "BODY_SECONDS", 0.2)
    assert raw(server, post_head(CHAT, 100) + b"{").startswith(b"HTTP/1.1 408")
