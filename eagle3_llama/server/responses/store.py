"""The answers of /v1/responses that later requests of the same client may go on from."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import ApiError
from ..http.shapes import dumps

MAX_STORED = 1024  # responses of one client


class Stored(NamedTuple):
    """A response as JSON, and its conversation: the JSON of each item, of which n_inputs were asked with."""

    response: bytes
    items: tuple[bytes, ...]
    n_inputs: int

    @property
    def size(self) -> int:
        return len(self.response) + sum(map(len, self.items))


class ResponseStore:
    """Responses by client and id, each with its whole conversation. Safe to use from several threads.

    most: bytes of one client's responses, as JSON; 0: none are kept. A client that has more, or more than
    MAX_STORED, loses those that it has not used for longest.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[str, collections.OrderedDict[str, Stored]] = {}
        self._sizes: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def keep(self, client: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keeps a response. items: its conversation, input and output, for the request that goes on."""
        n_inputs = len(items) - len(response.get("output", ()))
        entry = Stored(dumps(response), tuple(map(dumps, items)), n_inputs)
        if entry.size > self.most:
            return
        with self._lock:
            of = self._of.setdefault(client, collections.OrderedDict())
            of[response["id"]] = entry
            self._sizes[client] += entry.size
            while self._sizes[client] > self.most or len(of) > MAX_STORED:
                self._sizes[client] -= of.popitem(last=False)[1].size

    def response(self, client: str, response_id: str) -> bytes:
        """The response as JSON. Raises ApiError 404."""
        return self._get(client, response_id, "response_id").response

    def items(self, client: str, response_id: str) -> list[dict[str, Any]]:
        """The conversation up to the end of this response. Raises ApiError 404."""
        stored = self._get(client, response_id, "previous_response_id")
        return json.loads(b"[%b]" % b",".join(stored.items))

    def inputs(self, client: str, response_id: str) -> Sequence[bytes]:
        """The JSON of each item of the conversation that this response answers. Raises ApiError 404."""
        stored = self._get(client, response_id, "response_id")
        return stored.items[: stored.n_inputs]

    def delete(self, client: str, response_id: str) -> None:
        """Raises ApiError 404."""
        with self._lock:
            of = self._of.get(client, collections.OrderedDict())
            entry = of.pop(response_id) if response_id in of else None
            self._sizes[client] -= entry.size if entry is not None else 0
        if entry is None:
            raise self._missing(response_id, "response_id")

    def _get(self, client: str, response_id: str, field: str) -> Stored:
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
