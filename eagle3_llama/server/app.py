"""The HTTP application: routes, and what they share."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib.resources
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from .. import __version__
from ..errors import EagleError
from . import documents, slots
from .access import Access, Record, error_response
from .answers import respond
from .body import Bodies
from .calls import Caller
from .errors import ApiError, from_exception, wrong
from .generation import Gate, Job
from .metrics import CONTENT_TYPE, Metrics
from .schema import ChatBody, CompletionBody, DetokenizeBody, SlotFile, TokenizeBody, bounded
from .settings import ServerSettings
from .shapes import Shape, dumps
from .work import Work

PAGE_POLICY = (
    "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server:
    """What the routes share."""

    def __init__(self, settings: ServerSettings, batcher: Any) -> None:
        self.settings, self.batcher = settings, batcher
        self.name = settings.model_alias or batcher.model_name
        self.created = int(time.time())
        self.gate = Gate(settings.capacity, settings.n_parallel)
        self.metrics = Metrics(batcher, self.name)
        self.bodies = Bodies()
        self.preparing = Work(2, 2 * settings.capacity, "are being prepared")
        self.tokenizing = Work(1, 8, "tokenise texts")
        self.files = Work(1, 8, "save or restore slots")
        self.caller = Caller(settings, batcher.base, self.name)
        self.chat_body, self.completion_body = bounded(ChatBody, settings), bounded(CompletionBody, settings)

    async def generate(self, request: Request, body: Any, chat: bool) -> Response:
        """One completion request, from its checked body to its answer."""
        record: Record = request.scope["record"]
        record.stream = bool(body.stream)
        if self.settings.log_prompts:
            record.prompt = body.model_dump(include={"messages", "prompt"})
        choices = await self.preparing.run(
            self.caller.chat if chat else self.caller.completion, body
        )  # texts may be long
        params, asked = self.caller.params(body.speculative), "messages" if chat else "prompt"
        record.job = job = Job(
            self.batcher, self.gate, choices, params, self.settings.timeout, record.request_id, asked
        )
        shape = Shape(
            chat,
            f"{'chatcmpl' if chat else 'cmpl'}-{record.request_id}",
            int(time.time()),
            self.name,
            record.stream,
            getattr(body, "top_logprobs", None) or 0,
            bool(getattr(body, "functions", None)),
        )
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        report = body.speculative is not None and body.speculative.report
        return await respond(request, job, shape, record.stream, usage, report)

    def model(self) -> dict[str, Any]:
        about = {
            "head": self.settings.eagle is not None,
            "n_ctx": self.batcher.n_ctx,
            "n_parallel": self.batcher.n_parallel,
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "eagle3-llama",
            "eagle": about,
        }

    async def ask(self, work: Work, function: Any, *args: Any) -> Response:
        """The JSON of what a blocking call returns; its EagleErrors are the client's."""
        try:
            return Response(await work.run(lambda: dumps(function(*args))), media_type="application/json")
        except EagleError as e:
            raise from_exception(e, self.batcher.n_ctx, True) from e

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        if body.parse_special:
            self.caller.size.check_special(body.content, "content")
        return {
            "tokens": self.batcher.base.tokenize(body.content.encode(), body.add_special, body.parse_special)
        }

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        if max(body.tokens, default=0) >= self.caller.n_vocab:
            raise wrong("tokens", f"the model's are 0..{self.caller.n_vocab - 1}")
        return {
            "content": (self.batcher.base.detokenize(body.tokens) if body.tokens else b"").decode(
                "utf-8", "replace"
            )
        }


def create_app(settings: ServerSettings, batcher: Any) -> FastAPI:
    """The application for one batcher, which the caller closes. app.state.server is its Server: gate.draining refuses new requests."""
    server = Server(settings, batcher)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.caller.start()
        yield
        server.caller.close()

    no_pages = {"docs_url": None, "redoc_url": None}  # theirs load scripts from outside
    app = FastAPI(title="eagle3-llama", version=__version__, lifespan=lifespan, **no_pages)
    app.state.server = server
    _add_completions(app, server)
    _add_models(app, server)
    _add_state(app, server)
    _add_page(app)
    _add_errors(app)
    app.add_middleware(Access, settings=settings, metrics=server.metrics)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client has a dozen of its own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    documents.install(
        app,
        [server.chat_body, server.completion_body, TokenizeBody, DetokenizeBody, SlotFile],
        settings.api_key is not None,
    )
    return app


def _add_completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", **documents.streamed(server.chat_body, "ChatCompletion"))
    async def chat_completions(request: Request) -> Response:
        """An answer to a conversation."""
        return await server.generate(request, await server.bodies.read(request, server.chat_body), True)

    @app.post("/v1/completions", **documents.streamed(server.completion_body, "Completion"))
    async def completions(request: Request) -> Response:
        """A text gone on with."""
        return await server.generate(
            request, await server.bodies.read(request, server.completion_body), False
        )


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", **documents.answer("ModelList"))
    async def models() -> Response:
        """The one model there is."""
        return _json({"object": "list", "data": [server.model()]})

    @app.get("/v1/models/{model_id:path}", **documents.answer("Model", 404))
    async def model(model_id: str) -> Response:
        """The model, by its name."""
        if model_id != server.name:
            raise ApiError(
                404, f"there is no model {model_id[:100]!r}, only {server.name!r}", "model", "model_not_found"
            )
        return _json(server.model())

    @app.post("/tokenize", **documents.answer("Tokens", body=TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text."""
        return await server.ask(
            server.tokenizing, server.tokenize, await server.bodies.read(request, TokenizeBody)
        )

    @app.post("/detokenize", **documents.answer("Content", body=DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids; bytes that are no text become U+FFFD."""
        return await server.ask(
            server.tokenizing, server.detokenize, await server.bodies.read(request, DetokenizeBody)
        )


def _add_state(app: FastAPI, server: Server) -> None:
    @app.get("/health", **documents.answer("Health", 503))
    async def health() -> Response:
        """Whether new requests are taken and can be served; needs no key."""
        if not server.gate.draining and not server.batcher.alive():
            raise ApiError(
                503,
                "no request can be served any more: start the server again; its log says why",
                code="engine_ended",
            )
        if server.gate.draining:
            raise ApiError(
                503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
            )
        return _json({"status": "ok"})

    @app.get("/metrics", **documents.text("Prometheus metrics"))
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(await asyncio.to_thread(server.metrics.text), media_type=CONTENT_TYPE)

    @app.get("/slots", **documents.answer("Slots"))
    async def list_slots() -> Response:
        """Slots: id, busy, n_past, request_id."""
        return _json(server.batcher.slots())

    @app.post("/slots/{slot}", **documents.answer("SlotAction", 404, 507, body=SlotFile))
    async def slot_action(request: Request, slot: int, action: str) -> Response:
        """Saves a slot's state to a file of --slot-save-path (action=save), or restores it (action=restore)."""
        doing = {
            "save": functools.partial(slots.save, server.settings.slot_save_limit),
            "restore": slots.restore,
        }.get(action)
        if doing is None:
            raise wrong("action", f"it is {action[:40]!r}, expected save or restore")
        if server.settings.slot_save_path is None:
            raise ApiError(
                400, "this server keeps no files: start it with --slot-save-path", code="no_slot_save_path"
            )
        body = await server.bodies.read(request, SlotFile)
        if not 0 <= slot < server.batcher.n_parallel:
            raise ApiError(
                404,
                f"there is no slot {slot!s:.20}, only 0..{server.batcher.n_parallel - 1}",
                "slot",
                "no_such_slot",
            )
        return await server.ask(
            server.files, doing, server.batcher, server.settings.slot_save_path, slot, body.filename
        )


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        file = importlib.resources.files(__package__) / "page" / "index.html"
        html = await asyncio.to_thread(file.read_bytes)
        headers = {
            "Content-Security-Policy": page_policy(html),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(html, headers=headers)


def page_policy(html: bytes) -> str:
    """A policy under which the page's own scripts run and no other, should a model's words ever be taken for HTML."""
    hashes = (
        base64.b64encode(hashlib.sha256(script).digest()).decode()
        for script in re.findall(rb"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    )
    return PAGE_POLICY.format(" ".join(f"'sha256-{h}'" for h in hashes) or "'none'")


def _add_errors(app: FastAPI) -> None:
    def answer(request: Request, e: ApiError) -> Response:
        request.scope["record"].error = e.code
        return error_response(e)

    async def api_error(request: Request, e: ApiError) -> Response:
        return answer(request, e)

    async def http_error(request: Request, e: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(e.status_code)
        return answer(
            request, ApiError(e.status_code, str(e.detail), code=code, headers=dict(e.headers or {}))
        )

    async def parameter_error(request: Request, e: RequestValidationError) -> Response:
        first = e.errors()[0]
        name = str(first["loc"][-1])
        return answer(request, wrong(name, first["msg"]))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, parameter_error)


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")
