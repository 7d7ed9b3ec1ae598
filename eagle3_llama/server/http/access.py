"""Middleware for every request: refusals, a request id, a log line, metrics, and JSON for any error."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import Match

from ...llama.usage import TokenUsage
from ..errors import FORMS, MAX_HEADERS, ApiError, headers_too_large, internal, shutting_down
from ..jobs.client_quota import ClientQuota
from ..jobs.job import RequestJob
from ..metrics.own import Metrics
from ..settings import ServerSettings
from .keys import Guard
from .shapes import dumps

log = logging.getLogger("eagle3_llama.server")
access_log = logging.getLogger("eagle3_llama.server.access")

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
LINGER, LINGER_BYTES = 1.0, 8_000_000  # seconds and bytes of an unread body to receive after the answer
PIECE = 1 << 16  # bytes of an answer that are sent at once; the next ones wait until these have been read


@dataclass
class Record:
    """The record of one request for the log and the metrics. Routes fill it in."""

    request_id: str
    method: str = "GET"
    client: str = ""  # the name of the key that it came with; "" if the server has none
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    job: RequestJob | None = None
    stream: bool = False
    error: str | None = None
    prompt: Any = None  # only with --log-prompts


class Access:
    """ASGI middleware. It stores the request's Record in scope["record"].

    draining: whether the server is shutting down.
    """

    def __init__(
        self,
        app: Any,
        settings: ServerSettings,
        metrics: Metrics,
        quota: ClientQuota,
        draining: Callable[[], bool],
    ) -> None:
        self.app, self.settings, self.metrics, self.quota = app, settings, metrics, quota
        self.guard, self.draining = Guard(settings), draining

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, scope = scope["method"], _as_routed(scope)
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        record = Record(asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex, method)
        scope["record"] = record
        has_body = "content-length" in headers or "transfer-encoding" in headers
        talk = _Talk(record, receive, send, unread=has_body)
        try:
            found = self.guard.key(headers)
            record.client = "" if found is None else self.settings.client_names[found]
            refused = self._refusal(scope, headers, found is not None)
            if refused is not None:
                record.error = refused.code
            elif method == "POST" or "/responses/" in scope["path"]:
                await self.quota.turn(record.client)
            app = self.app if refused is None else error_response(refused, scope["path"])
            await app(scope, talk.receive, talk.send)
        except Exception:
            log.exception("request %s failed", record.request_id)
            await talk.fail(internal(), scope)
        except asyncio.CancelledError:
            if not self.draining():
                raise
            await talk.fail(shutting_down(Connection="close"), scope)
        finally:
            if record.job is not None:
                record.job.release()  # the answer has been sent
            self._note(scope, record)

    def _refusal(self, scope: Any, headers: Headers, has_key: bool) -> ApiError | None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_HEADERS:
            return headers_too_large()
        return self.guard.refusal(scope["method"], scope["path"], headers, has_key)

    def _note(self, scope: Any, record: Record) -> None:
        job, seconds = record.job, time.monotonic() - record.started
        status = 499 if job is not None and job.gone else record.status or 499
        route = getattr(scope.get("route") or _route(scope), "path", "other")
        self.metrics.count(route, status, seconds, job)
        line = {
            "request_id": record.request_id,
            "method": record.method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
        }
        if job is not None:
            line |= _about(job) | {"stream": record.stream}
        if record.error is not None:
            line["error"] = record.error
        if record.client:
            line["client"] = record.client
        if self.settings.log_prompts and record.prompt is not None:
            line["input"] = record.prompt  # "prompt" is its time
        access_log.info(json.dumps(line))


def _as_routed(scope: Any) -> Any:
    """A copy in which HEAD is GET, whose body uvicorn leaves out, and paths have no slash at their end."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}


def _route(scope: Any) -> Any:
    """The route that a request would have reached, if it was refused before; None for an unknown path."""
    routes = scope["app"].router.routes if "app" in scope else ()
    return next((r for r in routes if r.matches(scope)[0] is not Match.NONE), None)


def _about(job: RequestJob) -> dict[str, Any]:
    spent, timings = job.spent(), job.timings.values()
    total = sum(spent, TokenUsage())
    out: dict[str, Any] = {
        "choices": len(job.choices),
        "prompt_tokens": job.prompt_tokens(),
        "completion_tokens": total.completion,
        "accepted": total.accepted,
        "rejected": total.drafted - total.accepted,
        "accepted_from": total.by_source("accepted"),
    }
    out |= {
        name: round(max((t[name] for t in timings), default=0.0), 4)
        for name in ("queued", "prompt", "generation")
    }
    return out | ({"error": job.failed.code} if job.failed is not None else {})


def error_response(e: ApiError, path: str) -> Response:
    """The error in the form of the API that the path belongs to."""
    return Response(
        dumps(FORMS.get(path, ApiError.body)(e)), e.status, e.headers, media_type="application/json"
    )


class _Talk:
    """Wraps receive and send of one request: records the status, adds the id, receives an unread body.

    If the server closes a connection while the client still sends, TCP resets it, and the client may never
    see the answer. So the server sends the answer first, then discards the rest of the body for LINGER s.
    """

    def __init__(self, record: Record, receive: Any, send: Any, unread: bool) -> None:
        self.record, self._receive, self._send, self.unread = record, receive, send, unread

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.unread = False
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            MutableHeaders(raw=message["headers"])["X-Request-Id"] = self.record.request_id
        elif self.unread and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            try:
                await asyncio.wait_for(self._drain(), LINGER)
            except asyncio.TimeoutError:
                pass
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        if len(body := message.get("body", b"")) > PIECE:
            *pieces, last = (body[at : at + PIECE] for at in range(0, len(body), PIECE))
            for piece in pieces:
                await self._send({**message, "body": piece, "more_body": True})
            message = {**message, "body": last}
        await self._send(message)

    async def fail(self, e: ApiError, scope: Any) -> None:
        """Answers with an error. If a part of an answer has been sent, uvicorn closes the connection."""
        if not self.record.status:
            self.record.error, self.unread = e.code, False
            await error_response(e, scope["path"])(scope, self.receive, self.send)

    async def _drain(self) -> None:
        size = 0
        while self.unread and size < LINGER_BYTES:
            size += len((await self.receive()).get("body", b""))
