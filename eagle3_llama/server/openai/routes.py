"""The routes of OpenAI's completions, and those that describe the model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ..errors import ApiError
from ..http import openapi
from ..http.shapes import dumps
from .answers import ChatCompletion, Completion, Model, ModelList, Props
from .models import ModelCard

if TYPE_CHECKING:
    from ..http.server import Server


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their bodies and answers."""
    card = ModelCard(server.settings, server.batcher, server.name, int(time.time()))

    @app.post("/v1/chat/completions", **openapi.streamed(server.chat_body, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await server.generate(request, await server.bodies.read(request, server.chat_body), True)

    @app.post("/v1/completions", **openapi.streamed(server.completion_body, Completion))
    async def completions(request: Request) -> Response:
        """Continues a text."""
        body = await server.bodies.read(request, server.completion_body)
        return await server.generate(request, body, False)

    @app.get("/v1/models", **openapi.answer(ModelList))
    async def models() -> Response:
        """Lists the server's only model."""
        return _json({"object": "list", "data": [card.model]})

    @app.get("/v1/models/{model_id:path}", **openapi.answer(Model, 404))
    async def model(model_id: str) -> Response:
        """Describes the model of this name."""
        if model_id != server.name:
            message = f"there is no model {model_id[:100]!r}: this server has {server.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return _json(card.model)

    @app.get("/props", **openapi.answer(Props))
    async def props() -> Response:
        """Describes the server and its model as llama.cpp's server does."""
        return _json(card.props)

    return [server.chat_body, server.completion_body, ChatCompletion, Completion, Model, ModelList, Props]


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")
