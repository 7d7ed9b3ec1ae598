"""The body of POST /slots/{id}."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
