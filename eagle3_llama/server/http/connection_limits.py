"""Limits on connections: how many there may be, and how long a client may take to send headers and to read.

uvicorn has none of these. A connection takes a file descriptor even if it never sends a byte and has no key.
Without descriptors the server can start no child process and open no file. Nor does uvicorn notice that a
client has left which has sent a further request before its first one was answered.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
import select
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ...errors import EagleError, ErrorKind
from ..errors import MAX_HEADERS, ApiError, headers_too_large

HEADER_SECONDS = 20.0  # from the connection, or a further request's first byte, to the end of the headers
UNREAD_SECONDS = 60.0  # a client that reads nothing for so long, while there is something to send, is cut off
REFUSAL_SECONDS = 1.0  # that a connection beyond the limit has to send its request, and to read its refusal
REFUSALS = 32  # connections beyond the limit that get an answer at once; further ones are closed without
SPARE = 128  # file descriptors for all else: child processes, files, the model, the backends' devices
LOOK_SECONDS = 1.0  # between two looks whether a client has left, of which nothing is read meanwhile
MAX_PIPELINED = 32  # requests that a client may send before it has the answer to the first
MOST, FEWEST = 4096, 16  # connections that the server chooses by itself


def connection_limit(wanted: int | None) -> int:
    """The number of connections to allow: `wanted`, or what this process's file descriptors suffice for.

    Raises EagleError BAD_ARGUMENT if they do not suffice.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = 1 << 20 if files == resource.RLIM_INFINITY else files - SPARE - REFUSALS
    if room < (wanted or FEWEST):
        needed = (wanted or FEWEST) + SPARE + REFUSALS
        message = (
            f"{wanted or FEWEST} connections need {needed} file descriptors, this process may open {files}"
        )
        mend = "raise the limit with `ulimit -n`" + (", or reduce --max-connections" if wanted else "")
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{message}: {mend}")
    return wanted or min(room, MOST)


def protocol(most: int, parser: str | None = None) -> type[Any]:
    """The protocol class of a server that allows `most` connections.

    parser: h11 or httptools; None: httptools where it is installed, as uvicorn chooses.
    """
    base: Any = AutoHTTPProtocol
    if parser is not None:
        base = importlib.import_module(f"uvicorn.protocols.http.{parser}_impl")
        base = base.H11Protocol if parser == "h11" else base.HttpToolsProtocol
    bases = (BoundedHeaders, ReadTimeouts, base) if hasattr(base, "on_header") else (ReadTimeouts, base)
    return type("Protocol", bases, {"most": most})


class ReadTimeouts:
    """Limits for one of uvicorn's HTTP protocols."""

    connections: set[Any]
    transport: Any
    loop: asyncio.AbstractEventLoop
    cycle: Any
    flow: Any
    conn: Any  # h11's
    most = MOST
    _headers_due: asyncio.TimerHandle | None = None
    _looks: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]  # of uvicorn's protocol
        beyond = len(self.connections) - self.most
        if beyond > REFUSALS:
            transport.abort()
        elif beyond > 0:
            self._refused = True
            self._headers_due = self.loop.call_later(REFUSAL_SECONDS, self._refuse)
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._refuse()
            return
        super().data_received(data)  # type: ignore[misc]
        if self._refused:
            return
        if self._busy():
            self._forget()
        else:
            self._expect_headers()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        for timer in (self._unread, self._looks):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)  # type: ignore[misc]
        self._tell_gone()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are no request. It would answer with plain text."""
        self._reject(_TOO_LONG if self._too_long() else _NO_HTTP)

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._watch_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._watch_reader()

    def _busy(self) -> bool:
        """True if an answer is being made."""
        return self.cycle is not None and not self.cycle.response_complete

    def _cycles(self) -> list[Any]:
        """The requests of this connection that have no whole answer yet."""
        return [self.cycle] if self._busy() else []

    def _tell_gone(self) -> None:
        for cycle in self._cycles():
            cycle.disconnected = True
            cycle.message_event.set()

    def _look_later(self) -> None:
        if self._looks is None and self.flow.read_paused and not self.transport.is_closing():
            self._looks = self.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Ends the connection if the client has left: the end is not read while further requests wait."""
        self._looks = None
        if self.flow.read_paused and not self.transport.is_closing() and _has_left(self.transport):
            self.transport.abort()
        self._look_later()

    def _too_long(self) -> bool:
        return len(self.conn.trailing_data[0]) > MAX_HEADERS

    def _reject(self, answer: bytes) -> None:
        if any(cycle.response_started for cycle in self._cycles()):
            self.transport.abort()
        else:
            self._tell_gone()
            self._refused = True
            self._leave_with(answer)

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _forget(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _give_up(self) -> None:
        self._headers_due = None
        # an upgrade may have given the transport to another protocol
        ours = not self.transport.is_closing() and self.transport.get_protocol() is self
        if ours and not self._busy():
            self.transport.write(_TOO_SLOW)
            self.transport.close()

    def _refuse(self) -> None:
        """Answers at the first byte or after REFUSAL_SECONDS."""
        if self._headers_due is not None:  # it has not been answered
            self._leave_with(_TOO_MANY)

    def _leave_with(self, answer: bytes) -> None:
        """Sends a last answer, and discards what else comes for REFUSAL_SECONDS.

        If the server closed the connection while the client still sends, TCP would reset it, and the client
        might never see the answer.
        """
        self._forget()
        self.flow.resume_reading()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._unread = self.loop.call_later(REFUSAL_SECONDS, self.transport.abort)

    def _waiting(self) -> int:
        """Number of bytes that wait for the client to read them; 0 while the server may add some."""
        adding = self._busy() and not self.flow.write_paused
        return 0 if adding else self.transport.get_write_buffer_size()

    def _watch_reader(self) -> None:
        """Aborts the connection if bytes wait and the client reads none of them within UNREAD_SECONDS.

        Closing it would not do: a transport closes when the client has read all.
        """
        if self._refused:
            return  # it is aborted in any case
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if unread := self._waiting():
            self._unread = self.loop.call_later(UNREAD_SECONDS, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        if self._waiting() >= unread:
            self.transport.abort()
        else:
            self._watch_reader()


class BoundedHeaders:
    """Limits for uvicorn's protocol with httptools, which keeps whatever comes; h11 has the first by itself.

    What it reads are lines while neither headers, nor a part of a body, nor the end of one are complete: a
    request's own, and those of the chunks of its body.
    """

    _unfinished = 0  # bytes of such lines
    url = b""
    _running: Any = None  # the request that is being answered; `cycle` is the one that came last

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)  # type: ignore[misc]  # of the protocol beside it
        if self._too_long() and not (self._refused or self.transport.is_closing()):  # type: ignore[attr-defined]
            self._reject(_TOO_LONG)  # type: ignore[attr-defined]

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        if len(self.pipeline) < MAX_PIPELINED:  # type: ignore[attr-defined]
            super().on_headers_complete()  # type: ignore[misc]
        else:
            raise ValueError("too many requests at once")  # then send_400_response() is called

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._unfinished = 0
        super().on_message_complete()  # type: ignore[misc]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":  # uvicorn would send it chunks, which it does not know
            cycle.chunked_encoding, cycle.expected_content_length = False, _AnyLength("inf")
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]

    def _cycles(self) -> list[Any]:
        waiting = [cycle for cycle, _ in self.pipeline]  # type: ignore[attr-defined]
        return [c for c in (self._running, *waiting) if c is not None and not c.response_complete]

    def _too_long(self) -> bool:
        return max(self._unfinished, len(self.url)) > MAX_HEADERS


class _AnyLength(float):
    """The bytes that are left of an answer whose end is the connection's: whatever is sent, it is right."""

    def __sub__(self, _: float) -> _AnyLength:
        return self

    def __ne__(self, _: object) -> bool:
        return False


def _has_left(transport: Any) -> bool:
    """True if the other side has closed the connection, even if bytes before its end have not been read."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def _raw(e: ApiError, reason: str) -> bytes:
    """A whole answer with this error, for a connection on which no request has been read."""
    body = json.dumps(e.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines = [
        f"HTTP/1.1 {e.status} {reason}",
        *(f"{k}: {v}" for k, v in (headers | e.headers).items()),
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


_TOO_SLOW = _raw(
    ApiError(408, "the headers did not arrive in time", code="slow_headers"), reason="Request Timeout"
)
_TOO_LONG = _raw(headers_too_large(), reason="Request Header Fields Too Large")
_NO_HTTP = _raw(ApiError(400, "this is no request of HTTP/1.1", code="invalid_http"), reason="Bad Request")
_TOO_MANY = _raw(
    ApiError(503, "too many connections: try again later", code="busy", headers={"Retry-After": "2"}),
    reason="Service Unavailable",
)
