"""Reads request bodies, within a limit for one body and a limit for all together, and validates them."""

from __future__ import annotations

import asyncio
import codecs
import functools
import itertools
import re
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ..body.field_names import field_names
from ..errors import ApiError, from_validation
from ..jobs.work_queue import ByteBudget, WorkQueue

MAX_KEYS = 50_000
BODY_SECONDS = 30.0  # time that a client has to send its body
LARGE_BODY = 1 << 14  # bytes; validating a smaller body takes less than a millisecond
MAX_BODIES = 1 << 26  # bytes of all bodies that are being read or validated, if a single one is smaller

# A string without escapes; one that never ends takes all that is left, so that no byte is looked at twice.
_STRING = re.compile(rb'"[^"]*(?:"\s*(:)?|\Z)')
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # those of UTF-32 begin or end with two zeros
T = TypeVar("T", bound=BaseModel)


class BodyReader:
    """Reads and validates the bodies of all requests. most: bytes of a single one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.room = ByteBudget(max(MAX_BODIES, most), "send their bodies")
        self.checking = WorkQueue(
            1, 1 << 16, "have large bodies"
        )  # the room limits them before this number does

    async def read(
        self, request: Request, model: type[T], pick: Callable[[bytes], type[T]] | None = None
    ) -> T:
        """The body as `model`, or as what `pick` says of it. Raises ApiError 400, 408, 413, 415 or 503."""
        parts: list[bytes] = []
        try:
            await _receive(request, parts, self.room, self.most)
            raw = b"".join(parts)
            raw = raw.removeprefix(codecs.BOM_UTF8)
            check = lambda: parse(raw, model if pick is None else pick(raw))
            return check() if len(raw) < LARGE_BODY else await self.checking.run(check)
        finally:
            self.room.give_back(sum(map(len, parts)))


async def _receive(request: Request, parts: list[bytes], room: ByteBudget, most: int) -> None:
    """Appends the pieces of the body to `parts` and takes their sizes from `room`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # For this type, a browser asks for permission (CORS preflight) before it sends another site's body.
    if kind != "application/json":
        raise ApiError(415, "send the body as JSON, with Content-Type: application/json", code="content_type")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        message = f"the body is encoded ({encoding[:40]!r}): send it as it is, without Content-Encoding"
        raise ApiError(415, message, code="content_encoding")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise too_large(most)
    try:
        await asyncio.wait_for(_gather(request, parts, room, most), BODY_SECONDS)
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:.0f} s"
        raise ApiError(408, message, code="slow_body", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected", code="cancelled") from None


async def _gather(request: Request, parts: list[bytes], room: ByteBudget, most: int) -> None:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large(most)
        room.take(len(part))
        parts.append(part)


def too_large(most: int) -> ApiError:
    message = f"the body is larger than {most} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def parse(raw: bytes, model: type[T]) -> T:
    """A body's bytes as `model`. The ApiError of an invalid body names the field at fault."""
    if raw.startswith(_OTHER_MARKS) or raw[1:2] == b"\0" or raw[:1] == b"\0":
        raise ApiError(
            400, "the body is not valid JSON: it is UTF-16 or UTF-32, send UTF-8", code="invalid_json"
        )
    # pydantic would make an error object for each unknown key
    if raw.count(b":") > MAX_KEYS and _has_many_keys(raw):
        raise ApiError(400, f"the body has more than {MAX_KEYS} keys", code="invalid_value")
    try:
        return model.model_validate_json(raw)
    except ValidationError as e:
        raise from_validation(e, functools.partial(field_names, model)) from None


def _has_many_keys(raw: bytes) -> bool:
    """True if more strings than MAX_KEYS have a colon behind them, which only keys have."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is escaped ends no string
    keys = (found for found in _STRING.finditer(plain) if found[1])
    return next(itertools.islice(keys, MAX_KEYS, None), None) is not None
