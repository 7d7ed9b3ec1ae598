"""Turns the body of POST /v1/responses into the chat request that it is."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import ValidationError

from ..web.errors import ApiError, from_validation, wrong
from .chat import ChatBody
from .custom_tools import PARAMETERS, arguments_of
from .fields import Generation, field_names
from .responses import Format, ResponseBody, ResponseItem, ResponseTool, ToolChoice

CALLS = ("function_call", "custom_tool_call")
# what the fields of a chat request are called here
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def items_of(body: ResponseBody) -> list[dict[str, Any]]:
    """The items of the input as JSON. A text is the user's message."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}] if body.input else []
    return [item.model_dump(exclude_none=True) for item in body.input]


def chat_of(body: ResponseBody, items: list[dict[str, Any]]) -> ChatBody:
    """The chat request. items: the whole conversation, as JSON. Raises ApiError 400."""
    out: dict[str, Any] = body.model_dump(include=set(Generation.model_fields), exclude_none=True)
    out["messages"] = messages_of(body.instructions, [ResponseItem.model_validate(item) for item in items])
    if not out["messages"]:
        raise wrong("input", "it is empty: there is nothing to answer")
    out |= {"max_completion_tokens": body.max_output_tokens, "tool_choice": _choice(body.tool_choice)}
    if body.tools:
        if both := body.custom & {tool.name for tool in body.tools if tool.type == "function"}:
            raise wrong("tools", f"{min(both)!r:.80} is a function and a custom tool: name them apart")
        out["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    out |= {
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "enable_thinking": body.enable_thinking,
        "thinking": body.thinking and body.thinking.model_dump(),
    }
    if body.text is not None and body.text.format is not None:
        out["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        out["reasoning_effort"] = body.reasoning.effort
    if body.logprobs:
        out |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        return ChatBody.model_validate(out)
    except ValidationError as e:  # a conversation that is longer than a chat's may be
        raise renamed(from_validation(e, functools.partial(field_names, ChatBody))) from None


def _function(tool: ResponseTool) -> dict[str, Any]:
    if tool.type == "custom":
        return {"name": tool.name, "description": tool.description, "parameters": PARAMETERS}
    return tool.model_dump(exclude_none=True, exclude={"type", "format"})


def messages_of(instructions: str | None, items: list[ResponseItem]) -> list[dict[str, Any]]:
    """The messages of a conversation. What the assistant wrote in one turn becomes one message."""
    out: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    calls: set[str] = set()
    for item in items:
        if item.type in CALLS and item.status == "incomplete":
            continue  # it was cut: half a call is no call
        if item.type in ("function_call_output", "custom_tool_call_output"):
            if item.call_id not in calls:
                message = f"there is no call {item.call_id!r:.80} before its {item.type}"
                raise wrong("input", message)
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.type == "message" and item.role != "assistant":
            _add_message(out, "user" if item.role == "user" else "system", _text(item.content))
        else:
            _add_to_turn(out, item)
            calls.add(item.call_id or "")
    return out


def _add_message(out: list[dict[str, Any]], role: str, content: str) -> None:
    if role == "system" and len(out) == 1 and out[0]["role"] == role:
        out[0]["content"] += f"\n\n{content}"  # many templates know one system message alone
    else:
        out.append({"role": role, "content": content})


def _add_to_turn(out: list[dict[str, Any]], item: ResponseItem) -> None:
    """Adds what the assistant wrote to its message: thoughts, then content, then calls."""
    text = _text(item.content) or _text(item.summary)
    if item.type == "reasoning" and not text:
        return  # its thoughts are encrypted, by another server
    turn = out[-1] if out and out[-1]["role"] == "assistant" else None
    begins = turn is None or item.type == "reasoning" and ("content" in turn or "tool_calls" in turn)
    if turn is None or begins:
        out.append(turn := {"role": "assistant"})
    if item.type in CALLS:
        arguments = item.arguments if item.type == "function_call" else arguments_of(item.input or "")
        call = {"name": item.name, "arguments": arguments}
        made = {"id": item.call_id, "type": "function", "function": call}
        turn.setdefault("tool_calls", []).append(made)
        return
    field = "content" if item.type == "message" else "reasoning_content"
    turn[field] = f"{turn[field]}\n{text}" if field in turn else text


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal or "" for part in content)


def _choice(choice: str | ToolChoice | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    named = lambda name: {"type": "function", "function": {"name": name}}
    if choice.type != "allowed_tools":
        return named(choice.name)
    allowed = {"mode": choice.mode, "tools": [named(t.name) for t in choice.tools or ()]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _format(given: Format) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    schema = given.model_dump(exclude_none=True, exclude={"type"}, by_alias=True)
    return {"type": "json_schema", "json_schema": schema}


def renamed(e: ApiError) -> ApiError:
    """An error of the chat request with the names of this API's fields."""
    name = _NAMES.get(e.param or "")
    if name is None:
        return e
    message = str(e)
    if message.startswith(f"{e.param}: "):
        message = name + message[len(e.param or "") :]
    return ApiError(e.status, message, name, e.code, e.headers, e.sizes)
