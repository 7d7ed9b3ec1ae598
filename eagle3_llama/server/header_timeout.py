"""Closes a connection whose request headers do not arrive in time. uvicorn itself has no such time limit."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS = 20.0  # from the connection, or from the first byte of a further request, to the end of the headers
_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the headers did not arrive in time","type":"invalid_request_error","param":null,'
    b'"code":"slow_headers"}}'
)


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # a class that uvicorn chooses
    """uvicorn's HTTP protocol with a time limit for headers."""

    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()
        else:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(SECONDS, self._give_up)

    def _forget(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _give_up(self) -> None:
        self._headers_due = None
        # an upgrade may have given the transport to another protocol
        ours = not self.transport.is_closing() and self.transport.get_protocol() is self
        if ours and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(_TOO_SLOW)
            self.transport.close()
