"""The routes of slots."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ..errors import ApiError, wrong
from ..http import openapi
from ..http.shapes import dumps
from . import slot_files
from .slots_body import Slot, SlotAction, SlotFile

if TYPE_CHECKING:
    from ..http.server import Server


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their bodies and answers."""

    @app.get("/slots", **openapi.answer(Slot, one=False, several=True))
    async def list_slots() -> Response:
        """Lists the slots with id, busy, n_past and request_id, and with llama.cpp's names for some."""
        more = lambda slot: {"is_processing": slot["busy"], "n_ctx": server.batcher.n_ctx}
        slots = [{**slot, **more(slot)} for slot in server.batcher.slots()]
        return Response(dumps(slots), media_type="application/json")

    @app.post("/slots/{slot}", **openapi.answer(SlotAction, 404, 507, body=SlotFile))
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

    return [SlotFile, Slot, SlotAction]
