"""What went wrong, as OpenAI's error object and an HTTP status."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import EagleError, ErrorKind

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
_CONTEXT = re.compile(r"Requested tokens \((\d+)\) exceed context window of \d+")  # llama-cpp-python's words


class ApiError(Exception):
    """An answer other than 200. param: the field at fault; code: stable, for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong(field: str, said: str) -> ApiError:
    """A field whose value is well formed and still not possible."""
    return ApiError(400, f"{field}: {said}", field, "invalid_value")


def internal() -> ApiError:
    return ApiError(500, "the request failed inside the server; its log says more", code="internal_error")


def from_exception(e: BaseException, n_ctx: int, begun: bool, param: str | None = None) -> ApiError:
    """What a generation's failure is to its client. begun: whether tokens had been generated; param: the prompt's field.

    Before the first token, what llama-cpp-python's chat formats raise comes from the messages they were given.
    """
    if isinstance(e, ApiError):
        return e
    if (reason := getattr(e, "reason", None)) is not None:
        return _cancelled(reason)
    if isinstance(e, EagleError):
        return ApiError(_KINDS.get(e.kind, 500), str(e), code=e.kind.value)
    if isinstance(e, ValueError) and (found := _CONTEXT.search(str(e))):
        return ApiError(
            400, f"the prompt has {found[1]} tokens, the context {n_ctx}", param, "context_length_exceeded"
        )
    unsupported = isinstance(e, ValueError) and "not supported" in str(
        e
    )  # so llama-cpp-python says it, in one format after generating
    if (
        unsupported
        or isinstance(e, (ValueError, TypeError, LookupError, AttributeError, AssertionError))
        and not begun
    ):
        return ApiError(
            400, f"the request does not suit the model's chat format: {e!s:.300}", param, "chat_format"
        )
    return internal()


def _cancelled(reason: str) -> ApiError:
    if reason == "deadline":
        return ApiError(504, "the request took longer than the server allows", code="deadline")
    if reason == "shutdown":
        return ApiError(
            503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
        )
    return ApiError(499, "the request was cancelled", code="cancelled")


def from_validation(e: ValidationError, names: dict[str, None]) -> ApiError:
    """What is wrong with a body, with its field's name. names: all fields, to suggest one for an unknown."""
    error = _telling(e.errors(include_url=False, include_context=False, include_input=False))
    if error["type"] == "json_invalid":
        return ApiError(
            400,
            f"the body is not valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}",
            code="invalid_json",
        )
    *outer, last = error["loc"] or ("",)
    if error["type"] == "extra_forbidden":
        where = ".".join(filter(None, [_place(outer), str(last)]))[:200]
        near = difflib.get_close_matches(str(last), list(names), n=1)
        return ApiError(
            400,
            f"unknown field {where!r}" + (f", did you mean {near[0]}?" if near else ""),
            where,
            "unknown_field",
        )
    said, where = error["msg"].removeprefix("Value error, "), _place(error["loc"])
    return ApiError(400, f"{where}: {said}" if where else said, where or None, "invalid_value")


def _telling(errors: list[Any]) -> Any:
    """Of a union every member complains; the one that got furthest is what was meant."""
    same_field = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    return max(same_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))


def _place(loc: Sequence[int | str]) -> str:
    """('messages', 0, 'content', 'str') as messages[0].content; names of a union's members are left out."""
    out, before = "", None
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        elif before != "response_format" and not re.search(
            r"[\[\]() ]|^(str|int|float|bool|dict|constrained-\w+|literal|NamedTool|Named)$", part
        ):
            out += f".{part}" if out else part
        before = part
    return out[:200]
