"""The OpenAPI document: the schemas of request bodies, of answers and of errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

ABOUT = "OpenAI's and Anthropic's API for a llama.cpp model with an EAGLE head."
_REF = "#/components/schemas/"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Error(BaseModel):
    error: ErrorDetail


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


_ABOUT = {
    400: "the request is invalid; `param` names the field at fault",
    401: "the API key is missing or wrong",
    403: "the request comes from another site's page",
    404: "the named thing does not exist",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON",
    501: "the server was started without what the route needs",
    503: "the server is full or shutting down; the header Retry-After says when to try again",
    504: "the request took longer than the server's time limit",
    507: "the file cannot be written",
}
_BODY = (400, 408, 413, 415, 503)


def answer(
    model: type[BaseModel],
    *statuses: int,
    body: type[BaseModel] | None = None,
    error: type[BaseModel] = Error,
    one: bool = True,
    several: bool = False,
    keyless: bool = False,
) -> dict[str, Any]:
    """Arguments of a route. statuses: its errors, besides 401 and 403. one, several: answers, or a list.

    The document has those of the models that install() is given.
    """
    schema = _reference(model)
    kinds = [*[schema] * one, *[{"type": "array", "items": schema}] * several]
    schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    done = {"description": "done", "content": {"application/json": {"schema": schema}}}
    responses = {200: done, **_errors(statuses + (_BODY if body else ()), error)}
    extra = _request(body) if body else {"security": []} if keyless else {}
    return {"response_model": None, "responses": responses, "openapi_extra": extra}


EVENTS = (
    "a chunk or event as JSON, or at the end of completions `[DONE]`; a failure is"
    ' `{"error": {...}}`, and an event `error` of a response'
)


def streamed(
    body: type[BaseModel], model: type[BaseModel], *statuses: int, about: str = EVENTS, **more: Any
) -> dict[str, Any]:
    """Arguments of a route that answers with one JSON body, or with events if the request sets `stream`.

    about: the events. more: what answer() takes.
    """
    out = answer(model, *statuses, 503, 504, body=body, **more)
    data = {"type": "string", "description": about}
    # the schema of one event: before version 3.2, OpenAPI cannot describe a stream of events
    out["responses"][200]["content"]["text/event-stream"] = {
        "schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
    }
    return out


def text(about: str) -> dict[str, Any]:
    """Arguments of a route that answers with plain text."""
    done = {"description": about, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"response_model": None, "responses": {200: done, **_errors((), Error)}}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF + model.__name__}


def _errors(statuses: tuple[int, ...], model: type[BaseModel]) -> dict[int, Any]:
    content = {"application/json": {"schema": _reference(model)}}
    numbers = sorted({401, 403, *statuses})
    return {status: {"description": _ABOUT[status], "content": content} for status in numbers}


def _request(body: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(body)}}
    return {"requestBody": {"required": True, "content": content}}


def _without_422(document: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Removes FastAPI's 422 for wrong parameters. This server answers 400 instead, as OpenAI does."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)


def install(app: FastAPI, models: Iterable[type[BaseModel]], keyed: bool) -> None:
    """Adds the schemas that routes refer to to app.openapi(). keyed: whether a key is needed."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=ABOUT)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            _without_422(document, schemas)
            every: list[type[BaseModel]] = [Error, *models]
            for model in every:
                schema = model.model_json_schema(ref_template=_REF + "{model}")
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            if keyed:
                other = {"type": "apiKey", "in": "header", "name": "x-api-key"}
                schemes = {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": other}
                document["components"]["securitySchemes"] = schemes
                document["security"] = [{name: []} for name in schemes]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
