"""The answers of /v1/responses that later requests of the same client may go on from."""

from __future__ import annotations

import collections
import json
import threading
from typing import Any

from ..web.errors import ApiError
from .shapes import dumps

MAX_STORED = 1024  # responses of one client


class ResponseStore:
    """Responses by client and id, each with its whole conversation. Safe to use from several threads.

    most: bytes of one client's responses, as JSON; 0: none are kept. A client that has more, or more than
    MAX_STORED, loses those that it has not used for longest.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[str, collections.OrderedDict[str, tuple[bytes, bytes]]] = {}
        self._sizes: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def keep(self, client: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keeps a response. items: its conversation, input and output, for the request that goes on."""
        entry = dumps(response), dumps(items)
        if sum(map(len, entry)) > self.most:
            return
        with self._lock:
            of = self._of.setdefault(client, collections.OrderedDict())
            of[response["id"]] = entry
            self._sizes[client] += sum(map(len, entry))
            while self._sizes[client] > self.most or len(of) > MAX_STORED:
                self._sizes[client] -= sum(map(len, of.popitem(last=False)[1]))

    def response(self, client: str, response_id: str) -> bytes:
        """The response as JSON. Raises ApiError 404."""
        return self._get(client, response_id, "response_id")[0]

    def items(self, client: str, response_id: str) -> list[dict[str, Any]]:
        """The conversation up to the end of this response. Raises ApiError 404."""
        return json.loads(self._get(client, response_id, "previous_response_id")[1])

    def inputs(self, client: str, response_id: str) -> list[dict[str, Any]]:
        """The conversation that this response answers. Raises ApiError 404."""
        response, items = map(json.loads, self._get(client, response_id, "response_id"))
        return items[: len(items) - len(response["output"])]

    def delete(self, client: str, response_id: str) -> None:
        """Raises ApiError 404."""
        with self._lock:
            of = self._of.get(client, collections.OrderedDict())
            entry = of.pop(response_id) if response_id in of else None
            self._sizes[client] -= sum(map(len, entry or ()))
        if entry is None:
            raise self._missing(response_id, "response_id")

    def _get(self, client: str, response_id: str, field: str) -> tuple[bytes, bytes]:
        with self._lock:
            of = self._of.get(client, collections.OrderedDict())
            if response_id in of:
                of.move_to_end(response_id)
                return of[response_id]
        raise self._missing(response_id, field)

    def _missing(self, response_id: str, field: str) -> ApiError:
        why = "it was never there, was not to be stored, or has given way to newer ones"
        if not self.most:
            why = "this server keeps none, because it was started with --response-store 0"
        message = f"{field}: there is no response {response_id!r:.100}: {why}. Send the whole conversation"
        return ApiError(404, message, field, "response_not_found")
