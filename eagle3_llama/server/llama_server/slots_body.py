"""The body of POST /slots/{id}, and what the routes of slots answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ..body.fields import Body


class SlotFile(Body):
    """POST /slots/{id}."""

    filename: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$",
            description="name of a file in --slot-save-path, without a folder",
        ),
    ]


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
