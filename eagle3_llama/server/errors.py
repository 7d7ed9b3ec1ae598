"""Errors as HTTP answers: a status and OpenAI's error object."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from ..common.sampling_budget import SlowGrammar
from ..errors import EagleError, ErrorKind, Portable

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KINDS = {
    ErrorKind.BAD_ARGUMENT: 400,
    ErrorKind.BAD_VALUE: 400,
    ErrorKind.BAD_FILE: 400,
    ErrorKind.TRUNCATED: 400,
    ErrorKind.UNSUPPORTED: 400,
    ErrorKind.MEMORY: 503,
    ErrorKind.NO_SPACE: 507,
}
_CONTEXT = re.compile(r"Requested tokens \((\d+)\) exceed context window of \d+")  # llama-cpp-python's error


TOO_LONG = "context_length_exceeded"
MAX_HEADERS = 1 << 16  # bytes of a request's line and headers
LONGEST_NAME = 64  # characters of an unknown field that is compared with the known ones


class ApiError(Portable):
    """An answer other than 200. param: the field at fault. code: a name for programs that does not change."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        sizes: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}
        self.sizes = sizes or {}  # numbers that llama.cpp's server has in an error, for programs

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        if self.code == TOO_LONG:
            kind = "exceed_context_size_error"  # llama.cpp's name; OpenAI's is the code
        about = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": {**about, **self.sizes}}


# the bodies of the errors of routes that have a form of their own; their API puts them here
FORMS: dict[str, Callable[[ApiError], dict[str, Any]]] = {}


def too_long(message: str, param: str | None, n_prompt: int, n_ctx: int) -> ApiError:
    """The error of a prompt that no slot has room for. n_prompt: its tokens, or the fewest it can have."""
    sizes = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    return ApiError(400, f"{message}: shorten the prompt", param, TOO_LONG, sizes=sizes)


def wrong(field: str, message: str) -> ApiError:
    """The error of a field that has the right type, but a value that this server cannot accept."""
    return ApiError(400, f"{field}: {message}", field, "invalid_value")


def internal() -> ApiError:
    message = "the request failed because of an error inside the server; see the server's log"
    return ApiError(500, message, code="internal_error")


def headers_too_large() -> ApiError:
    message = f"the request's line and headers have more than {MAX_HEADERS} bytes"
    return ApiError(431, message, code="headers_too_large", headers={"Connection": "close"})


def shutting_down(**headers: str) -> ApiError:
    headers = {"Retry-After": "5", **headers}
    return ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)


def deadline_passed() -> ApiError:
    return ApiError(504, "the request took longer than the server's time limit", code="deadline")


def from_exception(e: BaseException, n_ctx: int, begun: bool, param: str | None = None) -> ApiError:
    """The error that a client gets when its generation fails.

    begun: whether tokens had been generated. Before the first token, exceptions of llama-cpp-python's chat
    formats are caused by the messages. param: the field that holds the prompt.
    """
    if isinstance(e, ApiError):
        return e
    if (reason := getattr(e, "reason", None)) is not None:
        return _cancelled(reason)
    if isinstance(e, ValueError) and (found := _CONTEXT.search(str(e))):
        message = f"the prompt has {found[1]} tokens, the context has room for {n_ctx}"
        return too_long(message, param, int(found[1]), n_ctx)
    if isinstance(e, EagleError):
        if isinstance(e, SlowGrammar):
            return ApiError(400, str(e), code="refused")
        if e.kind is ErrorKind.NATIVE and "grammar" in str(e):  # llama.cpp's, while it samples
            message = f"the answer cannot follow the grammar or schema to its end: {e}"
            return ApiError(400, message, code="refused")
        return ApiError(_KINDS.get(e.kind, 500), str(e), code=e.kind.value)
    # one of llama-cpp-python's chat formats raises this after it has generated
    unsupported = isinstance(e, ValueError) and "not supported" in str(e)
    by_messages = isinstance(e, (ValueError, TypeError, LookupError, AttributeError, AssertionError))
    if unsupported or by_messages and not begun:
        message = f"the model's chat format cannot process this request: {e!s:.300}"
        return ApiError(400, message, param, "chat_format")
    return internal()


def _cancelled(reason: str) -> ApiError:
    if reason == "deadline":
        return deadline_passed()
    if reason == "shutdown":
        return shutting_down()
    return ApiError(499, "the request was cancelled", code="cancelled")


def from_validation(e: ValidationError, names: Callable[[Sequence[int | str]], Iterable[str]]) -> ApiError:
    """The error of an invalid body. names: the fields of the object at a place, to suggest one of them."""
    error = _telling(e.errors(include_url=False, include_context=False, include_input=False))
    if error["type"] == "json_invalid":
        message = f"the body is not valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}"
        return ApiError(400, message, code="invalid_json")
    *outer, last = error["loc"] or ("",)
    if error["type"] == "extra_forbidden":
        where = ".".join(filter(None, [_place(outer), str(last)]))[:200]
        near = _similar(str(last), names(outer))
        message = f"unknown field {where!r}" + (f", did you mean {near[0]}?" if near else "")
        return ApiError(400, message, where, "unknown_field")
    message, where = error["msg"].removeprefix("Value error, "), _place(error["loc"])
    if not where and (named := re.match(r"(\w+): ", message)):  # the error names several fields together
        return ApiError(400, message, named[1], "invalid_value")
    if error["type"] == "union_tag_invalid":  # it repeats the tag, however long
        tag, found, rest = message.rpartition("' found using")
        message = tag[:80] + found + rest
    return ApiError(400, f"{where}: {message}" if where else message, where or None, "invalid_value")


def _similar(name: str, known: Iterable[str]) -> list[str]:
    """The one of the known names that is most like this one, if any is. A long name is like none of them."""
    if len(name) > LONGEST_NAME:
        return []
    return difflib.get_close_matches(name, [n for n in known if n != name], n=1)


def _telling(errors: list[Any]) -> Any:
    """The most helpful of pydantic's errors for the first wrong field.

    For a union, pydantic reports an error for each member. The member whose check got furthest is the one
    that the client meant.
    """
    same_field = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    return max(same_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))


# the name of a union's member in a place of pydantic's
_MEMBER = re.compile(
    r"[\[\]() ]|^(str|int|float|bool|dict|constrained-\w+|literal|NamedTool|Named|ToolChoice|PromptObject)$"
)


def _place(loc: Sequence[int | str]) -> str:
    """The place as text, without union members: ('messages', 0, 'content', 'str') is messages[0].content"""
    out, before = "", None
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        elif before != "response_format" and not _MEMBER.search(part):
            out += f".{part}" if out else part
        before = part
    return out[:200]
