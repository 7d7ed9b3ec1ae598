"""Whether the server lives, and whether it takes requests: two questions, for a supervisor and a balancer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import Response

from ..errors import ApiError, shutting_down
from . import openapi
from .shapes import dumps

if TYPE_CHECKING:
    from .app import Server

_OK = dumps({"status": "ok"})


def add_health(app: FastAPI, server: Server) -> None:
    @app.get("/health", **openapi.answer("Health", 503))
    async def health() -> Response:
        """Whether the server works, also while it finishes its last requests. Needs no key."""
        _check_alive(server)
        return Response(_OK, media_type="application/json")

    @app.get("/ready", **openapi.answer("Health", 503))
    async def ready() -> Response:
        """Whether the server takes a new request now. Needs no key."""
        _check_alive(server)
        if server.gate.draining:
            raise shutting_down()
        server.gate.check_room(1)
        return Response(_OK, media_type="application/json")


def _check_alive(server: Server) -> None:
    if not server.batcher.alive():
        message = "the engine has stopped: start the server again; its log says why the engine stopped"
        raise ApiError(503, message, code="engine_ended")
