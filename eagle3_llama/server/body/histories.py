"""A history's messages for a model that reads text alone, whatever API they come by.

A client sends a history again with every request. One picture in it must not make all of them fail: a line
stands for it in earlier messages, in the results of tools, and in what a client says right behind such a
result, where some put the pictures that a tool gave. In the user's newest message it is refused.
"""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator

from .fields import media_of

_NAMES = {"images": "An image", "audio": "A sound", "video": "A video", "files": "A file"}
_RESULTS = ("tool", "function")  # the roles of messages that hold what a tool gave back
_TOOL_RESULTS = ("tool_result", "function_call_output", "custom_tool_call_output")


def _readable(items: Any) -> Any:
    """A list of messages or items whose parts are texts, but for what the user shows in the newest."""
    if not isinstance(items, list):
        return items
    is_users = lambda item: isinstance(item, dict) and item.get("role") == "user"
    newest = next((i for i in reversed(range(len(items))) if is_users(items[i])), -1)
    if newest > 0 and _is_result(items[newest - 1]):
        newest = -1
    return [_item(item, i != newest) if isinstance(item, dict) else item for i, item in enumerate(items)]


READABLE = BeforeValidator(_readable)


def _is_result(item: Any) -> bool:
    """True if it is what a tool gave back: a message, an item, or a block."""
    return isinstance(item, dict) and (item.get("role") in _RESULTS or item.get("type") in _TOOL_RESULTS)


def _item(item: dict[str, Any], is_old: bool) -> dict[str, Any]:
    """A message, an item or a block whose parts are texts, as far as they can be."""
    is_old = is_old or _is_result(item)
    parts = {name: item[name] for name in ("content", "output") if isinstance(item.get(name), list)}
    return {**item, **{name: [_part(part, is_old) for part in found] for name, found in parts.items()}}


def _part(part: Any, is_old: bool) -> Any:
    if not isinstance(part, dict):
        return part
    if _is_result(part):
        return _item(part, is_old)
    text = text_of(part)
    if text is None and is_old and (media := media_of(part)) is not None:
        text = f"[{_NAMES[media]} was here, which this model cannot read.]"
    return part if text is None else {"type": "text", "text": text}


def text_of(part: dict[str, Any]) -> str | None:
    """The text of a part that is one in other words. None for others, and for those that are damaged."""
    kind, content = part.get("type"), part.get("content")
    if kind == "encrypted_content":
        return ""  # by another server, for itself
    if kind == "refusal":
        found = [part.get("refusal")]
    elif kind == "compaction":  # Anthropic's summary of what came before
        found = [content]
    elif kind == "tool_reference":
        found = [f"The tool {part.get('tool_name')!s:.256} can be called."]
    elif kind == "search_result":
        found = [part.get("title"), part.get("source"), *_texts(content)]
    elif kind == "document" and isinstance(source := part.get("source"), dict):
        texts = _texts(source.get("data" if source.get("type") == "text" else "content"))
        found = [part.get("title"), part.get("context"), *texts] if texts else [None]
    else:
        return None
    lines = [line for line in found if line is not None]
    return "\n".join(lines) if lines and all(isinstance(line, str) for line in lines) else None


def _texts(content: Any) -> list[Any]:
    """The texts of a content, of which all parts must have one; [] otherwise."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    found = [part.get("text") if isinstance(part, dict) else None for part in parts]
    return found if all(isinstance(text, str) for text in found) else []
