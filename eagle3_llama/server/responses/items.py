"""The output items of a response, and the events that tell how they grow, from a chat's deltas."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from ...common.guarded_json import read_json
from .tools import Called

# by kind of tool: the type of a call's item, the beginning of its id, and fields
_CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "function": ("function_call", "fc", {"arguments": ""}),
    "custom": ("custom_tool_call", "ctc", {"input": ""}),
    "local_shell": ("local_shell_call", "lsh", {"action": {"type": "exec", "command": [], "env": {}}}),
    "tool_search": ("tool_search_call", "tsc", {"execution": "client", "arguments": {}}),
}
_UNNAMED = {"local_shell_call": "action", "tool_search_call": "arguments"}  # filled at the call's end
_TEXTS = {"reasoning": ("reasoning_text", "rs"), "message": ("output_text", "msg")}
Event = dict[str, Any]

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# a character of a JSON string, or an escape: of two halves of a surrogate pair, both
_PAIR = r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PART = re.compile(rf'[^"\\]|\\(?:["\\/bfnrt]|{_PAIR}|u[0-9a-fA-F]{{4}})')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?\Z")


class Items:
    """The items so far. One of them may be open, and grows. calls: what a call of a function is, by its name.

    Blanks at the beginning of a message wait for more text, because templates write them before calls, too.
    """

    def __init__(self, calls: Mapping[str, Called] | None = None) -> None:
        self._calls, self._input, self._arguments = calls or {}, InputText(), ""
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._blanks, self._blank_logprobs = "", list[Any]()

    def add(self, delta: dict[str, Any], logprobs: list[Any]) -> list[Event]:
        """The events of a chat's delta, or of a whole message. logprobs: of its content."""
        out: list[Event] = []
        if thoughts := delta.get("reasoning_content"):
            out += self._text("reasoning", thoughts, [])
        if content := delta.get("content"):
            if not self._is_open("message"):
                content, self._blanks = self._blanks + content, ""
                logprobs, self._blank_logprobs = self._blank_logprobs + logprobs, []
                if not content.strip():
                    self._blanks, self._blank_logprobs = content, logprobs
                    return out
            out += self._text("message", content, logprobs)
        for call in delta.get("tool_calls") or ():
            out += self._call(call)
        return out

    def end(self, status: str) -> list[Event]:
        """Closes what is open. status: completed, or incomplete for an answer that was cut."""
        out: list[Event] = []
        if not self.output:  # clients expect an item of every answer
            out += self._text("message", self._blanks, self._blank_logprobs)
        return out + self._close(status)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        out = self._close("completed")
        self._open = item
        self.output.append(item)
        # a copy: the item grows before its events are written
        added = {**item, **({"content": []} if "content" in item else {})}
        where = {"output_index": len(self.output) - 1, "item": added}
        return [*out, {"type": "response.output_item.added", **where}]

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[Event]:
        name, prefix = _TEXTS[kind]
        out: list[Event] = []
        if not self._is_open(kind):
            out += self._begin(
                {"id": _new_id(prefix), "type": kind, "status": "in_progress", **_fields(kind)}
            )
            out.append(self._event("content_part.added", content_index=0, part=_part(name)))
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more = {"logprobs": logprobs}
        return [*out, *([self._event(f"{name}.delta", content_index=0, delta=text, **more)] if text else [])]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        out, function = [], call["function"]
        if "id" in call:
            out = self._begin(self._called(call["id"], function["name"]))
            self._input, self._arguments = InputText(), ""
        if arguments := function["arguments"]:
            assert self._open is not None
            if self._is_open("custom_tool_call"):
                return out + self._input_grows(self._input.add(arguments))
            if not self._is_open("function_call"):
                self._arguments += arguments
                return out
            self._open["arguments"] += arguments
            out.append(self._event("function_call_arguments.delta", delta=arguments))
        return out

    def _called(self, call_id: str, function: str) -> dict[str, Any]:
        """The item of a call that begins."""
        tool = self._calls.get(function, Called("function", function))
        kind, prefix, own = _CALLS[tool.kind]
        about = {"id": _new_id(prefix), "type": kind, "status": "in_progress", "call_id": call_id, **own}
        named = {} if kind in _UNNAMED else {"name": tool.name}
        return about | named | ({} if tool.namespace is None else {"namespace": tool.namespace})

    def _input_grows(self, new: str) -> list[Event]:
        assert self._open is not None
        self._open["input"] += new
        return [self._event("custom_tool_call_input.delta", delta=new)] if new else []

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            out = [self._event("function_call_arguments.done", **whole)]
        elif item["type"] == "custom_tool_call":
            out = self._input_grows(self._input.end()) if status == "completed" else []
            out.append(self._event("custom_tool_call_input.done", input=item["input"]))
        elif item["type"] in _UNNAMED:
            field = _UNNAMED[item["type"]]
            item[field], out = {**item[field], **_object(self._arguments)}, []
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            out = [
                self._event(f"{part['type']}.done", content_index=0, text=part["text"], **more),
                self._event("content_part.done", content_index=0, part=part),
            ]
        out.append({"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item})
        self._open = None
        return out


def _fields(kind: str) -> dict[str, Any]:
    part = _part(_TEXTS[kind][0])
    return (
        {"role": "assistant", "content": [part]} if kind == "message" else {"summary": [], "content": [part]}
    )


def _part(name: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if name == "output_text" else {}
    return {"type": name, "text": "", **more}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; {} for what is no object, which only a model without a grammar writes."""
    try:
        made = read_json(text)
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}


class InputText:
    """The text of a custom tool's call, which grows with the JSON of its arguments."""

    def __init__(self) -> None:
        self.text = ""  # so far
        self._parts: list[str] = []  # all of the JSON
        self._left, self._begun = "", False  # what of it has not been read; whether some has

    def add(self, arguments: str) -> str:
        """The new part of the text."""
        self._parts.append(arguments)
        self._left += arguments
        start = 0
        if not self._begun:
            if (begun := _BEGIN.match(self._left)) is None:
                return ""
            start = begun.end()
        last = end = start
        while (part := _PART.match(self._left, end)) is not None:
            last, end = part.span()
        if _HALF.match(self._left, last) is not None:  # the other half may come
            end = last
        new = self._left[start:end]
        self._left, self._begun = self._left[end:], True
        return self._grow(read_json(f'"{new}"', strict=False))

    def end(self) -> str:
        """The rest of a text that has ended. Arguments of another form are the text themselves."""
        try:
            made = read_json("".join(self._parts), strict=False)
        except ValueError:
            made = None
        text = made.get("input") if isinstance(made, dict) and len(made) == 1 else None
        if not isinstance(text, str):
            text = self.text or "".join(self._parts)
        return self._grow(text[len(self.text) :]) if text.startswith(self.text) else ""

    def _grow(self, new: str) -> str:
        self.text += new
        return new
