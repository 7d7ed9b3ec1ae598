"""The FastAPI application: its routes and the state that they share."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ... import __version__
from ...batching.embedder import Embedder
from ...errors import EagleError
from ..anthropic.body import CountBody, MessagesBody
from ..anthropic.routes import add_messages
from ..body.chat import ChatBody
from ..body.completions import CompletionBody
from ..body.fields import bounded
from ..embeddings.routes import add_embeddings
from ..errors import ApiError, from_exception, wrong
from ..jobs.client_quota import Shares
from ..jobs.gate import Gate
from ..jobs.job import Choice, RequestJob
from ..jobs.work_queue import Room, Work
from ..llama_server import slot_files
from ..llama_server.routes import add_llama
from ..llama_server.slots_body import SlotFile
from ..metrics.own import CONTENT_TYPE, Metrics
from ..openai.models import ModelCard
from ..prompt.choices import Caller
from ..responses.routes import add_responses
from ..settings import ServerSettings
from ..tokens.routes import add_prompts
from . import openapi
from .access import Access, Record, error_response
from .body_reader import Bodies
from .health import add_health
from .held import MAX_ANSWERS, HeldResponse
from .left_out import HEADER as LEFT_OUT
from .shapes import Shape, dumps
from .stream import EventStream, respond
from .traces import keep_requests_out

MOST_THREADS = 32  # for all kinds of Work together, and for answers that are written
PAGE_POLICY = (
    "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server:
    """The state that the routes share."""

    def __init__(self, settings: ServerSettings, batcher: Any) -> None:
        self.settings, self.batcher = settings, batcher
        self.name = settings.model_alias or Path(settings.model).stem
        self.card = ModelCard(settings, batcher, self.name, int(time.time()))
        self.shares = Shares(batcher.serves_others)
        self.gate = Gate(settings.capacity, settings.n_parallel, self.shares)
        self.metrics = Metrics(batcher, self.name)
        self.bodies = Bodies(settings.most_body)
        self.preparing = Work(2, 2 * settings.capacity, "are being prepared")
        self.tokenizing = Work(1, 8, "tokenize texts")
        self.counting = Work(2, 2 * settings.capacity, "have their tokens counted")
        self.files = Work(1, 8, "save or restore slots")
        self.answers = Room(MAX_ANSWERS, "have answers that they do not read")
        self.caller = Caller(settings, batcher.base, self.name)
        self.chat_body, self.completion_body = bounded(ChatBody, settings), bounded(CompletionBody, settings)

    async def generate(
        self,
        request: Request,
        body: Any,
        chat: bool,
        shape: Any = None,
        stream_class: type[EventStream] = EventStream,
    ) -> Response:
        """Answers one completion request, whose body has been validated.

        shape, stream_class: the forms of the answer, whole and streamed, for another API than completions.
        """
        record: Record = request.scope["record"]
        record.stream = bool(body.stream)
        if self.settings.log_prompts:
            record.prompt = body.model_dump(include={"messages", "prompt"})
        prepare = self.caller.chat if chat else self.caller.completion
        choices = await self.preparing.run(prepare, body)  # in a thread: texts may be long
        job = self.job(record, choices, body, "messages" if chat else "prompt")
        return await respond(
            request,
            job,
            shape or self.shape(body, chat, record),
            stream=record.stream,
            stream_class=stream_class,
            include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            report=body.speculative is not None and body.speculative.report,
        )

    def job(self, record: Record, choices: list[Choice], body: Any, prompt_field: str) -> RequestJob:
        """Starts the choices of a request. Raises ApiError 400 or 503."""
        record.job = RequestJob(
            batcher=self.batcher,
            gate=self.gate,
            choices=choices,
            params=self.caller.params(body.speculative),
            timeout=self.settings.timeout,
            request_id=record.request_id,
            client=record.client,
            prompt_field=prompt_field,
        )
        return record.job

    def shape(self, body: Any, chat: bool, record: Record) -> Shape:
        """The form of a completion's answer."""
        return Shape(
            chat=chat,
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{record.request_id}",
            created=int(time.time()),
            model=self.name,
            stream=bool(body.stream),
            top_logprobs=getattr(body, "top_logprobs", None) or 0,
            legacy=bool(getattr(body, "functions", None)),
        )

    async def ask(self, work: Work, function: Any, *args: Any) -> Response:
        """Runs a blocking function and answers with its result as JSON. An EagleError becomes an ApiError."""
        try:
            return HeldResponse(await work.run(lambda: dumps(function(*args))), self.answers)
        except EagleError as e:
            raise from_exception(e, self.batcher.n_ctx, True) from e


def create_app(settings: ServerSettings, batcher: Any) -> FastAPI:
    """The application for one batcher, which the caller closes.

    app.state.server is its Server. Set server.gate.draining to refuse new requests.
    """
    keep_requests_out()
    server = Server(settings, batcher)
    embedder = Embedder(batcher, settings.embeddings) if settings.embeddings is not None else None

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # as many threads as there is work at once: who waits for a thread would wait out of turn
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS, "work"))
        server.caller.start()
        yield
        server.caller.close()
        if embedder is not None:
            embedder.close()

    # no docs_url and redoc_url: FastAPI's pages load scripts from other sites
    plain: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}  # see Access
    app = FastAPI(title="eagle3-llama", version=__version__, lifespan=lifespan, **plain)
    app.state.server = server
    _add_completions(app, server)
    add_messages(app, server)
    bodies: list[type[BaseModel]] = [*add_responses(app, server), *add_prompts(app, server)]
    bodies += [*add_embeddings(app, server, embedder), *add_llama(app, server)]
    _add_models(app, server)
    add_health(app, server)
    _add_state(app, server)
    _add_page(app)
    _add_shorter_paths(app)
    _add_errors(app)
    more: dict[str, Any] = {"metrics": server.metrics, "shares": server.shares}
    app.add_middleware(Access, settings=settings, draining=lambda: server.gate.draining, **more)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client sends a dozen headers of its own
            expose_headers=["X-Request-Id", "Retry-After", LEFT_OUT],
            allow_private_network=True,  # a server on loopback is one, for the pages of a public site
        )
    bodies += [server.chat_body, server.completion_body, SlotFile, MessagesBody, CountBody]
    openapi.install(app, bodies, bool(settings.api_keys))
    return app


def _add_completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", **openapi.streamed(server.chat_body, "ChatCompletion"))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await server.generate(request, await server.bodies.read(request, server.chat_body), True)

    @app.post("/v1/completions", **openapi.streamed(server.completion_body, "Completion"))
    async def completions(request: Request) -> Response:
        """Continues a text."""
        body = await server.bodies.read(request, server.completion_body)
        return await server.generate(request, body, False)


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", **openapi.answer("ModelList"))
    async def models() -> Response:
        """Lists the server's only model."""
        return _json({"object": "list", "data": [server.card.model]})

    @app.get("/v1/models/{model_id:path}", **openapi.answer("Model", 404))
    async def model(model_id: str) -> Response:
        """Describes the model of this name."""
        if model_id != server.name:
            message = f"there is no model {model_id[:100]!r}: this server has {server.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return _json(server.card.model)

    @app.get("/props", **openapi.answer("Props"))
    async def props() -> Response:
        """Describes the server and its model as llama.cpp's server does."""
        return _json(server.card.props)


def _add_state(app: FastAPI, server: Server) -> None:
    @app.get("/metrics", **openapi.text("Prometheus metrics"))
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(await asyncio.to_thread(server.metrics.text), media_type=CONTENT_TYPE)

    @app.get("/slots", **openapi.answer("Slots"))
    async def list_slots() -> Response:
        """Lists the slots with id, busy, n_past and request_id, and with llama.cpp's names for some."""
        more = lambda slot: {"is_processing": slot["busy"], "n_ctx": server.batcher.n_ctx}
        return _json([{**slot, **more(slot)} for slot in server.batcher.slots()])

    @app.post("/slots/{slot}", **openapi.answer("SlotAction", 404, 507, body=SlotFile))
    async def slot_action(request: Request, slot: int, action: str) -> Response:
        """Saves a slot to a file in --slot-save-path (save), restores it (restore) or empties it (erase)."""
        folder, n_slots = server.settings.slot_save_path, server.batcher.n_parallel
        save = functools.partial(slot_files.save, server.settings.slot_save_limit)
        doing = {"save": save, "restore": slot_files.restore}.get(action)
        if doing is None and action != "erase":
            raise wrong("action", f"it is {action[:40]!r}, expected save, restore or erase")
        if folder is None:
            message = "this server does not save slots: start it with --slot-save-path"
            raise ApiError(400, message, code="no_slot_save_path")
        body = await server.bodies.read(request, SlotFile) if doing is not None else None
        if not 0 <= slot < n_slots:
            message = f"there is no slot {slot!s:.20}: this server has the slots 0..{n_slots - 1}"
            raise ApiError(404, message, "slot", "no_such_slot")
        if body is None:
            return await server.ask(server.files, slot_files.erase, server.batcher, slot)
        client = request.scope["record"].client
        return await server.ask(server.files, doing, server.batcher, folder, slot, body.filename, client)


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        html = await asyncio.to_thread(page_html)
        headers = {
            "Content-Security-Policy": page_policy(html),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(html, headers=headers)


def page_html() -> bytes:
    """The page, with the library in it that shows Markdown: the page loads nothing else."""
    folder = importlib.resources.files(__package__) / "page"
    library = (folder / "markdown-it" / "markdown-it.min.js").read_bytes()
    script = b"<script>%s</script>" % library.partition(b"//# sourceMappingURL")[0]
    return (folder / "index.html").read_bytes().replace(b"<script>/* markdown-it */</script>", script)


def page_policy(html: bytes) -> str:
    """The page's Content-Security-Policy. It allows only the page's own scripts.

    So a script in a model's answer could not run, even if the page inserted the answer as HTML by mistake.
    """
    hashes = (
        base64.b64encode(hashlib.sha256(script).digest()).decode()
        for script in re.findall(rb"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    )
    return PAGE_POLICY.format(" ".join(f"'sha256-{h}'" for h in hashes) or "'none'")


def _add_shorter_paths(app: FastAPI) -> None:
    """Every route of /v1 also without it, as llama.cpp's server has them."""
    routes = [(r, set(r.methods or ())) for r in app.routes if isinstance(r, APIRoute)]
    taken = {(r.path, method) for r, methods in routes for method in methods}
    for route, methods in routes:
        path = route.path.removeprefix("/v1")
        if path != route.path and not any((path, method) in taken for method in methods):
            hidden: dict[str, Any] = {"response_model": None, "include_in_schema": False}
            app.add_api_route(path, route.endpoint, methods=list(methods), **hidden)


def _add_errors(app: FastAPI) -> None:
    # e is Any below: Starlette types a handler by Exception, and calls it with the class that it is added for
    async def api_error(request: Request, e: Any) -> Response:
        request.scope["record"].error = e.code
        return error_response(e, request.scope["path"])

    async def http_error(request: Request, e: Any) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(e.status_code)
        error = ApiError(e.status_code, str(e.detail), code=code, headers=dict(e.headers or {}))
        return await api_error(request, error)

    async def parameter_error(request: Request, e: Any) -> Response:
        first = e.errors()[0]
        return await api_error(request, wrong(str(first["loc"][-1]), first["msg"]))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, parameter_error)


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")
