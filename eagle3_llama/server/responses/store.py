"""The answers of /v1/responses that later requests may go on from, and how a client sees what is stored."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from ..errors import ApiError, wrong
from ..http.shapes import dumps

MAX_STORED = 1024  # responses of one client
MAX_PAGE, MAX_PAGE_BYTES = 100, 1 << 20  # items of a page; bytes from which on it has no further one
_NAMES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_NAMES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "additional_tools": "at"}


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


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    instructions: str | None
    tools: list[dict[str, Any]]
    usage: dict[str, Any]


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(
    response_id: str, items: Sequence[bytes], limit: int, order: str, after: str | None
) -> dict[str, Any]:
    """At most `limit` items, the newest first if order is desc. after: the id of the item before them.

    items: the JSON of each. What is on no page is not read. Raises ApiError 400 if there is no such item.
    """
    shown = lambda i: _shown(f"{response_id.partition('_')[2]}_{i}", json.loads(items[i]))
    step = -1 if order == "desc" else 1
    at = len(items) - 1 if step < 0 else 0
    if after is not None:
        number = after[:100].rpartition("_")[2]
        before = int(number) if number.isascii() and number.isdecimal() else len(items)
        if before >= len(items) or shown(before)["id"] != after:
            raise wrong("after", f"there is no item {after!r:.100} in the input of this response")
        at = before + step
    data, size = list[dict[str, Any]](), 0
    while 0 <= at < len(items) and len(data) < limit and size < MAX_PAGE_BYTES:
        data.append(shown(at))
        size += len(items[at])
        at += step
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = 0 <= at < len(items)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _shown(number: str, item: dict[str, Any]) -> dict[str, Any]:
    """An item with an id, and with its text as parts, as OpenAI shows it."""
    out = {"id": f"{_NAMES[item['type']]}_{number}", "status": "completed", **item}
    if isinstance(content := item.get("content"), str):
        kind = {"assistant": "output_text"}.get(item.get("role", ""), "input_text")
        out["content"] = [{"type": kind, "text": content, **({"annotations": []} if "out" in kind else {})}]
    return out
