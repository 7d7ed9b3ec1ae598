"""Turns a job's events into an HTTP answer: one JSON body, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError
from ..jobs.job import Event, RequestJob, total_timings, total_usage
from .shapes import DONE, KEEP_ALIVE_COMMENT, dumps, event

KEEP_ALIVE = 10.0  # s without data until a stream sends a comment; proxies close idle connections after 60 s
STALLED = 30.0  # s past the deadline until the server disconnects a client that does not read
_OVER: Any = object()


async def respond(
    request: Request,
    job: RequestJob,
    shape: Any,
    *,
    stream: bool,
    include_usage: bool = False,
    report: bool = False,
    stream_class: type[EventStream] | None = None,
) -> Response:
    """Waits for the whole answer, or for the first events of a streamed answer.

    shape: Shape, or another with its `whole` and a stream_class of its own.

    A stream starts after KEEP_ALIVE seconds at the latest. A failure before that raises ApiError and becomes
    an HTTP status. The job is cancelled when the client disconnects, and when this function fails.
    """
    watch = asyncio.create_task(job.watch(request.receive))
    events = job.events()
    try:
        if stream:
            parts = with_silences(events)
            first = await anext(parts)
            kind = stream_class or EventStream
            return kind(job, shape, _chain(first, parts), watch, include_usage or report, report)
        completions = [(e.choice.index, e.chunk) async for batch in events for e in batch if e.chunk]
        more = total_report(job) if report else {}
        whole = lambda: shape.whole(completions, total_usage(job).body())
        encode = lambda: dumps({**whole(), **more} if more else whole())
        body = await asyncio.to_thread(encode)  # logprobs may be megabytes
        watch.cancel()
        return Response(body, media_type="application/json")
    except BaseException:
        watch.cancel()
        job.cancel()
        raise


def joined(events: list[Event]) -> list[Event]:
    """Joins neighbouring events of one choice whose chunks carry only text. Every event must have a chunk."""
    out: list[Event] = []
    for e in events:
        before = _text(out[-1]) if out and e.choice is out[-1].choice else None
        text = _text(e)
        if before is not None and text is not None:
            choice, text = e.chunk["choices"][0], before + text
            delta = {"delta": {"content": text}} if "delta" in choice else {"text": text}
            chunk = {**e.chunk, "choices": [{**choice, **delta}]}
            if "details" in chunk:
                tokens = out[-1].chunk["details"]["tokens"] + chunk["details"]["tokens"]
                chunk["details"] = {**chunk["details"], "tokens": tokens}
            positions, sources = out[-1].positions + e.positions, out[-1].sources + e.sources
            out[-1] = dataclasses.replace(e, chunk=chunk, positions=positions, sources=sources)
        else:
            out.append(e)
    return out


def _text(e: Event) -> str | None:
    """The text of a chunk that carries only text; None for any other chunk."""
    choice = e.chunk["choices"][0]
    if choice["finish_reason"] is not None or choice.get("logprobs") is not None:
        return None
    delta = choice.get("delta", {"content": choice.get("text")})
    return delta["content"] if delta.keys() == {"content"} else None


async def with_silences(events: AsyncIterator[list[Event]]) -> AsyncIterator[list[Event] | None]:
    """Yields the lists of `events`, and None after every KEEP_ALIVE seconds without one."""
    while True:
        task = asyncio.ensure_future(anext(events, _OVER))
        try:
            while not (await asyncio.wait({task}, timeout=KEEP_ALIVE))[0]:
                yield None
        finally:
            if not task.done():
                task.cancel()
        batch = task.result()
        if batch is _OVER:
            return
        yield batch


async def _chain(
    first: list[Event] | None, rest: AsyncIterator[list[Event] | None]
) -> AsyncIterator[list[Event] | None]:
    yield first
    async for batch in rest:
        yield batch


class EventStream(Response):
    """Sends all waiting events in one piece. A failure after the start is sent as an event with the error."""

    media_type = "text/event-stream"

    def __init__(
        self,
        job: RequestJob,
        shape: Any,
        events: AsyncIterator[list[Event] | None],
        watch: asyncio.Task[None],
        include_usage: bool,
        report: bool,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.job, self.shape, self.events, self.watch = job, shape, events, watch
        self.include_usage, self.report = include_usage, report

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # uvicorn runs each request in a task
        stalled = loop.call_later(max(0.0, self.job.seconds_left()) + STALLED, task.cancel)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._frames():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            stalled.cancel()
            self.watch.cancel()
            self.job.cancel()

    async def _frames(self) -> AsyncIterator[bytes]:
        if begin := await self._begin():
            yield begin
        try:
            async for batch in self.events:
                if batch is None:
                    yield KEEP_ALIVE_COMMENT
                    continue
                chunks = [e for e in batch if e.chunk]
                data = b"".join(self._frame(e) for e in (chunks if self.report else joined(chunks)))
                if data:
                    yield data
        except ApiError as e:
            self.job.failed = e
            yield self._failure(e)
            return
        yield await self._end()

    async def _begin(self) -> bytes:
        """The events before the first token."""
        return b""

    def _frame(self, e: Event) -> bytes:
        out = self.shape.chunk(e.choice.index, e.chunk)
        if self.include_usage:
            out["usage"] = None
        if self.report:
            out["eagle"] = {"positions": e.positions, "sources": e.sources}
        return event(out)

    def _failure(self, e: ApiError) -> bytes:
        return event(e.body())

    async def _end(self) -> bytes:
        return (event(self._last()) if self.include_usage else b"") + DONE

    def _last(self) -> dict[str, Any]:
        more = total_report(self.job) if self.report else {"timings": total_timings(self.job)}
        return {**self.shape.head, "choices": [], "usage": total_usage(self.job).body(), **more}


def total_report(job: RequestJob) -> dict[str, Any]:
    """The report beside a request's usage, if it has `report`: draft tokens by source, and timings."""
    used = total_usage(job)
    drafts = {what: used.by_source(what) for what in ("drafted", "accepted")}
    return {"eagle": drafts, "timings": total_timings(job)}
