"""The FastAPI application: the routes of each API, and what holds for all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ... import __version__
from ..anthropic import routes as anthropic
from ..embeddings import routes as embeddings
from ..errors import ApiError, wrong
from ..llama_server import routes as llama_server
from ..openai import routes as openai
from ..responses import routes as responses
from ..settings import ServerSettings
from ..tokens import routes as tokens
from . import chat_page, health, openapi
from .access import Access, error_response
from .left_out import HEADER as LEFT_OUT
from .server import Server
from .traces import keep_requests_out

# Each is a folder. Its add() adds the routes and returns the models of their bodies and answers.
APIS: tuple[Any, ...] = (openai, anthropic, responses, tokens, embeddings, llama_server)
MOST_THREADS = 32  # for all kinds of WorkQueue together, and for answers that are written


def create_app(settings: ServerSettings, batcher: Any) -> FastAPI:
    """The application for one batcher, which the caller closes.

    app.state.server is its Server. Set server.gate.draining to refuse new requests.
    """
    keep_requests_out()
    server = Server(settings, batcher)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # as many threads as there is work at once: who waits for a thread would wait out of turn
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS, "work"))
        server.choices.start()
        yield
        server.close()

    # no docs_url and redoc_url: FastAPI's pages load scripts from other sites
    plain: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}  # see Access
    app = FastAPI(title="eagle3-llama", version=__version__, lifespan=lifespan, **plain)
    app.state.server = server
    models = [model for api in (health, *APIS) for model in api.add(app, server)]
    chat_page.add(app)
    _add_shorter_paths(app)
    _add_errors(app)
    more: dict[str, Any] = {"metrics": server.metrics, "quota": server.quota}
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
    openapi.install(app, models, bool(settings.api_keys))
    return app


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
