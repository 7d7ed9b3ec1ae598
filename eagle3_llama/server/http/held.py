"""Answers that take room until the client has read them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from ..jobs.work_queue import ByteBudget

MAX_ANSWERS = 1 << 28  # bytes of all such answers that have not been read yet


class HeldResponse(Response):
    """JSON whose bytes take room until they have been sent, or the client has gone.

    Access sends it in pieces, so that it has been sent when all but a piece has been read. Raises ApiError
    503 if there is no room.
    """

    media_type = "application/json"

    def __init__(self, body: bytes | str, room: ByteBudget) -> None:
        super().__init__(body)
        self._room, self._size = room, min(len(self.body), room.most)  # one alone always has room
        room.take(self._size)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._room.give_back(self._size)
