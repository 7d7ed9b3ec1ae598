"""The routes of llama.cpp's own completions, the path that it shares with OpenAI's, and slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ...common.guarded_json import read_json
from ..body.fields import bounded
from ..http import openapi
from . import slots_routes
from .answer import LlamaCompletion, LlamaShape, LlamaStream
from .body import LlamaBody

if TYPE_CHECKING:
    from ..http.server import Server


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their bodies and answers."""
    own: Any = bounded(LlamaBody, server.settings)

    async def answered(request: Request, body: Any) -> Response:
        shape = LlamaShape(body, server.name)
        return await server.generate(request, body, False, shape, LlamaStream)

    @app.post("/completion", **openapi.streamed(own, LlamaCompletion, several=True))
    async def completion(request: Request) -> Response:
        """Continues a text, or several, in the form of llama.cpp's server."""
        return await answered(request, await server.bodies.read(request, own))

    @app.post("/completions", include_in_schema=False)
    async def completions(request: Request) -> Response:
        """The same, or /v1/completions for a body with `model`, which OpenAI's clients always send."""
        pick = lambda raw: server.completion_body if _names_model(raw) else own
        body = await server.bodies.read(request, own, pick)
        if isinstance(body, LlamaBody):
            return await answered(request, body)
        return await server.generate(request, body, False)

    return [own, LlamaCompletion, *slots_routes.add(app, server)]


def _names_model(raw: bytes) -> bool:
    if b'"model"' not in raw:
        return False
    try:
        body = read_json(raw)
    except ValueError:
        return False
    return isinstance(body, dict) and "model" in body
