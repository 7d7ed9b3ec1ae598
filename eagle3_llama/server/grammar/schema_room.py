"""What the schemas of one request share: the time that there is for them, and the marks in their grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ApiError, wrong
from .marks import Marks

MOST_CHARACTERS = 1 << 16
MOST_NODES = 1 << 16  # of one request; the grammar of so many could not be read in time
DEFS = ("$defs", "definitions")


@dataclass
class SchemaRoom:
    """What there is still time for. field: the request's, which errors name.

    characters: of patterns; a number takes as long as some of them. nodes: schemas inside schemas.
    """

    marks: Marks
    field: str = "response_format"
    characters: int = MOST_CHARACTERS
    nodes: int = MOST_NODES

    def take_node(self) -> None:
        """Raises ApiError 400 if there is no room for another one."""
        self.nodes -= 1
        if self.nodes < 0:
            raise self.too_many()

    def too_many(self) -> ApiError:
        return wrong(self.field, f"its schemas have more than {MOST_NODES} parts: leave some out")

    def check_defs(self, key: str, value: Any) -> None:
        """Raises ApiError 400 for `$defs` that are no object."""
        if not isinstance(value, dict):
            raise wrong(self.field, f"{key} of its schema is no object: name each schema that it defines")
