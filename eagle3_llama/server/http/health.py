"""The server's state: whether it lives, for a supervisor; whether it takes requests, for a
balancer; its counters, for Prometheus."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from ..errors import ApiError, shutting_down
from ..metrics.own import CONTENT_TYPE
from . import openapi
from .shapes import dumps

if TYPE_CHECKING:
    from .server import Server

_OK = dumps({"status": "ok"})


class Health(BaseModel):
    status: Literal["ok"]


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their answers."""

    @app.get("/metrics", **openapi.text("Prometheus metrics"))
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(await asyncio.to_thread(server.metrics.text), media_type=CONTENT_TYPE)

    @app.get("/health", **openapi.answer(Health, 503, keyless=True))
    async def health() -> Response:
        """Says whether the server works, also while it finishes its last requests. Needs no key."""
        _check_alive(server)
        return Response(_OK, media_type="application/json")

    @app.get("/ready", **openapi.answer(Health, 503, keyless=True))
    async def ready() -> Response:
        """Says whether the server takes a new request now. Needs no key."""
        _check_alive(server)
        if server.gate.draining:
            raise shutting_down()
        server.gate.check_room(1)
        return Response(_OK, media_type="application/json")

    return [Health]


def _check_alive(server: Server) -> None:
    if not server.batcher.alive():
        message = "the engine has stopped: start the server again; its log says why the engine stopped"
        raise ApiError(503, message, code="engine_ended")
