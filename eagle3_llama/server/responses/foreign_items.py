"""Items of conversations with other servers, as items that every server knows.

Clients send back all that an answer had: calls of tools that a client runs in a form of its own, such as
local_shell_call, and traces of what a server ran by itself.
"""

from __future__ import annotations

import json
from typing import Any

# what calls of these tools say is in this field
_CALLS = {"local_shell_call": "action", "shell_call": "action", "computer_call": "action"}
_CALLS |= {"apply_patch_call": "operation", "tool_search_call": "arguments"}
_OUTPUTS = {f"{kind}_output" for kind in _CALLS} | {"tool_search_output"}
_UNREAD = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "ghost_snapshot",
    "program",
    "program_output",
)
_NOTHING = {"type": "reasoning", "summary": []}  # thoughts that nobody can read


def of_ours(item: Any) -> Any:
    """The item in the words of this server: a call, its output, or thoughts without a text."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        return item
    if kind in _UNREAD:
        return _NOTHING
    if kind == "agent_message":
        text = "\n".join(_named("text", item.get("content")))
        said = f"Message from {item.get('author')!s:.256}:\n{text}"
        return {"type": "message", "role": "user", "content": said} if text else _NOTHING
    if kind not in _CALLS and kind not in _OUTPUTS:
        return item
    call_id = item.get("call_id") or item.get("id")
    if call_id is None or item.get("execution") == "server":
        return _NOTHING
    kept = {"call_id": call_id, "status": item.get("status")}
    if kind in _CALLS:
        arguments = json.dumps(_said(item.get(_CALLS[kind])), ensure_ascii=False)
        return {**kept, "type": "function_call", "name": kind.removesuffix("_call"), "arguments": arguments}
    out = {**kept, "type": "function_call_output", "output": _output_of(item)}
    return out | ({"tools": item.get("tools")} if kind == "tool_search_output" else {})


def _said(action: Any) -> dict[str, Any]:
    """An action without what a model does not write: clients and servers add fields that say nothing."""
    given = action if isinstance(action, dict) else {}
    return {k: v for k, v in given.items() if v not in (None, {}) and (k, v) != ("type", "exec")}


def _output_of(item: dict[str, Any]) -> str:
    """The call's result, as a text. Pictures are left out."""
    output = item.get("output")
    if item["type"] == "tool_search_output":
        return "These can be called now: " + ", ".join(_named("name", item.get("tools")))
    if item["type"] == "computer_call_output":
        return "[An image was here, which this model cannot read.]"
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _named(field: str, of: Any) -> list[str]:
    """The texts that the objects of a list have in a field."""
    found = [one.get(field) for one in of if isinstance(one, dict)] if isinstance(of, list) else []
    return [text for text in found if isinstance(text, str)]
