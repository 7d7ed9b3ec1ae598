"""The OpenAPI document: the schemas of request bodies, of answers and of errors."""

from __future__ import annotations

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


class PredictionTokens(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: PredictionTokens
    prompt_tokens_details: CachedTokens


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = []
    function_call: dict[str, Any] = {}


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    logprobs: dict[str, Any] | None


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: dict[str, float] | list[dict[str, float]]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: dict[str, float] | list[dict[str, float]]


class AnthropicUsage(BaseModel):
    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    instructions: str | None
    tools: list[dict[str, Any]]
    usage: dict[str, Any]


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class AboutEagle(BaseModel):
    head: bool
    text: bool
    n_ctx: int
    n_parallel: int


class ModelMeta(BaseModel):
    vocab_type: int
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    context_window: int
    max_context_length: int
    meta: ModelMeta
    eagle: AboutEagle


class Props(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    tokens: list[int] | list[TokenPiece]


class Content(BaseModel):
    content: str


class Health(BaseModel):
    status: Literal["ok"]


class Slot(BaseModel):
    id: int
    busy: bool
    n_past: int
    request_id: str | None
    is_processing: bool
    n_ctx: int


class SlotAction(BaseModel):
    id_slot: int
    filename: str = ""
    n_erased: int = 0
    n_saved: int = 0
    n_written: int = 0
    n_restored: int = 0
    n_read: int = 0
    timings: dict[str, float] = {}


_ANSWERS: list[type[BaseModel]] = [
    Error,
    ChatCompletion,
    Completion,
    AnthropicMessage,
    AnthropicCount,
    AnthropicError,
    ResponseObject,
    Deleted,
    Model,
    ModelList,
    Props,
    Tokens,
    Content,
    Health,
    Slot,
    SlotAction,
]
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
    name: str, *statuses: int, body: type[BaseModel] | None = None, error: str = "Error"
) -> dict[str, Any]:
    """Arguments of a route that answers with the schema `name`. statuses: its errors, besides 401 and 403."""
    schema: dict[str, Any] = {"$ref": _REF + ("Slot" if name == "Slots" else name)}
    if name in ("Slots", "LlamaCompletion"):
        several = {"type": "array", "items": schema}
        schema = several if name == "Slots" else {"anyOf": [schema, several]}
    done = {"description": "done", "content": {"application/json": {"schema": schema}}}
    responses = {200: done, **_errors(statuses + (_BODY if body else ()), error)}
    extra = _request(body) if body else {"security": []} if name == "Health" else {}
    return {"response_model": None, "responses": responses, "openapi_extra": extra}


def streamed(body: type[BaseModel], name: str, *statuses: int, error: str = "Error") -> dict[str, Any]:
    """Arguments of a route that answers with one JSON body, or with events if the request sets `stream`."""
    out = answer(name, *statuses, 503, 504, body=body, error=error)
    about = "a chunk or event as JSON, or at the end of completions `[DONE]`; a failure is"
    about += ' `{"error": {...}}`, and an event `error` of a response'
    if error != "Error":
        about = "one of Anthropic's events as JSON; its `type` is also the event's name"
    data = {"type": "string", "description": about}
    # the schema of one event: before version 3.2, OpenAPI cannot describe a stream of events
    out["responses"][200]["content"]["text/event-stream"] = {
        "schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
    }
    return out


def text(about: str) -> dict[str, Any]:
    """Arguments of a route that answers with plain text."""
    done = {"description": about, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"response_model": None, "responses": {200: done, **_errors((), "Error")}}


def _errors(statuses: tuple[int, ...], name: str) -> dict[int, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + name}}}
    numbers = sorted({401, 403, *statuses})
    return {status: {"description": _ABOUT[status], "content": content} for status in numbers}


def _request(body: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + body.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def _without_422(document: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Removes FastAPI's 422 for wrong parameters. This server answers 400 instead, as OpenAI does."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)


def install(app: FastAPI, bodies: list[type[BaseModel]], keyed: bool) -> None:
    """Adds the schemas that routes refer to by name to app.openapi(). keyed: whether a key is needed."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=ABOUT)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            _without_422(document, schemas)
            for model in [*bodies, *_ANSWERS]:
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
