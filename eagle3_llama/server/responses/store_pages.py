"""What is shown of a stored response: itself, and its input items as a list in pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from ..errors import wrong

MAX_PAGE, MAX_PAGE_BYTES = 100, 1 << 20  # items of a page; bytes from which on it has no further one
_NAMES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_NAMES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "additional_tools": "at"}


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
