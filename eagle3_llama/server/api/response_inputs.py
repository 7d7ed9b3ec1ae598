"""The input items of a stored response, as a list in pages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from ..web.errors import wrong

MAX_PAGE = 100
_NAMES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_NAMES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "additional_tools": "at"}


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(
    response_id: str, items: list[dict[str, Any]], limit: int, order: str, after: str | None
) -> dict[str, Any]:
    """At most `limit` items, the newest first if order is desc. after: the id of the item before them.

    Raises ApiError 400 if there is no such item.
    """
    listed = [_shown(f"{response_id.partition('_')[2]}_{i}", item) for i, item in enumerate(items)]
    if order == "desc":
        listed.reverse()
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(listed) if item["id"] == after), -1)
        if start < 0:
            raise wrong("after", f"there is no item {after!r:.100} in the input of this response")
    data = listed[start : start + limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = start + limit < len(listed)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _shown(number: str, item: dict[str, Any]) -> dict[str, Any]:
    """An item with an id, and with its text as parts, as OpenAI shows it."""
    out = {"id": f"{_NAMES[item['type']]}_{number}", "status": "completed", **item}
    if isinstance(content := item.get("content"), str):
        kind = {"assistant": "output_text"}.get(item.get("role", ""), "input_text")
        out["content"] = [{"type": kind, "text": content, **({"annotations": []} if "out" in kind else {})}]
    return out
