"""Tracebacks without the messages of exceptions, which may quote what a client sent.

pydantic's have the value at fault, those of Python the text that could not be encoded or the key that was not
there. What the log needs is where it happened.
"""

from __future__ import annotations

import logging
import traceback

from ...errors import EagleError

# loggers that write tracebacks of what happens in a request
_LOGGERS = ("eagle3_llama.server", "uvicorn.error", "asyncio", "concurrent.futures")
MOST_FRAMES = 40  # that one exception shows: a recursion without an end has a thousand


def trace_of(e: BaseException) -> str:
    """The place where an exception was raised, and the way to it: files, lines and types, but no values."""
    parts, seen = list[str](), set[int]()
    at: BaseException | None = e
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        frames = "".join(traceback.format_tb(at.__traceback__, -MOST_FRAMES))
        parts.append(f"Traceback (most recent call last):\n{frames}{_name(at)}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\n\nwhich led to this:\n\n".join(reversed(parts))


def _name(e: BaseException) -> str:
    kind = f" ({e.kind.value})" if isinstance(e, EagleError) else ""
    return f"{type(e).__module__}.{type(e).__qualname__}{kind}: its message may quote a request"


class _WithoutMessages(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            e = record.exc_info[1]
            record.exc_info, record.exc_text = None, None if e is None else trace_of(e)
        return True


_filter = _WithoutMessages()


def keep_requests_out() -> None:
    """From now on tracebacks in the log have no messages. May be called again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_filter)
