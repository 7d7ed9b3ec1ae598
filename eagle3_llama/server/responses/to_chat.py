"""Turns the body of POST /v1/responses into the chat request that it is."""

from __future__ import annotations

from typing import Any

from ..body.chat import ChatBody
from ..body.fields import Generation, validated
from ..errors import ApiError, wrong
from .body import Format, ResponseBody, ResponseItem
from .tools import HOSTED, ToolChoice, ToolSet, arguments_of, flat

_TEXTS = ("content", "reasoning_content")
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


def chat_of(body: ResponseBody, items: list[dict[str, Any]]) -> tuple[ChatBody, ToolSet]:
    """The chat request, and its tools. items: the whole conversation, as JSON. Raises ApiError 400."""
    out: dict[str, Any] = body.model_dump(include=set(Generation.model_fields), exclude_none=True)
    conversation = [validated(ResponseItem, item) for item in items]
    out["messages"] = messages_of(body.instructions, conversation)
    if not out["messages"]:
        raise wrong("input", "it is empty: there is nothing to answer")
    tools = ToolSet(body.tools or (), (tool for item in conversation for tool in item.tools or ()))
    out |= {"max_completion_tokens": body.max_output_tokens, "tool_choice": _choice(body.tool_choice, tools)}
    if tools.functions:
        out["tools"] = tools.functions
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
        return validated(ChatBody, out), tools
    except ApiError as e:  # a conversation that is longer than a chat's may be
        raise renamed(e) from None


def messages_of(instructions: str | None, items: list[ResponseItem]) -> list[dict[str, Any]]:
    """The messages of a conversation. What the assistant wrote in one turn becomes one message."""
    out: list[dict[str, Any]] = [{"role": "system", "content": [instructions]}] if instructions else []
    calls: set[str] = set()
    for item in items:
        if item.type == "additional_tools" or item.type in CALLS and item.status == "incomplete":
            continue  # a call that was cut is none
        if item.type in ("function_call_output", "custom_tool_call_output"):
            if item.call_id not in calls:
                message = f"there is no call {item.call_id!r:.80} before its {item.type}"
                raise wrong("input", message)
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": [_text(item.output)]})
        elif item.type == "message" and item.role != "assistant":
            _add_message(out, "user" if item.role == "user" else "system", _text(item.content))
        else:
            _add_to_turn(out, item)
            calls.add(item.call_id or "")
    for said in out:  # texts are joined once: to add one after the other would copy all before them
        between = "\n\n" if said["role"] == "system" else "\n"
        said |= {name: between.join(said[name]) for name in _TEXTS if name in said}
    return out


def _add_message(out: list[dict[str, Any]], role: str, content: str) -> None:
    if role == "system" and len(out) == 1 and out[0]["role"] == role:
        out[0]["content"].append(content)  # many templates know one system message alone
    else:
        out.append({"role": role, "content": [content]})


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
        call = {"name": flat(item.namespace, item.name or ""), "arguments": arguments}
        made = {"id": item.call_id, "type": "function", "function": call}
        turn.setdefault("tool_calls", []).append(made)
        return
    field = "content" if item.type == "message" else "reasoning_content"
    turn.setdefault(field, []).append(text)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal or "" for part in content)


def _choice(choice: str | ToolChoice | None, tools: ToolSet) -> Any:
    left_out = ", ".join(dict.fromkeys(tools.left_out))
    if choice == "required" and not tools.functions and left_out:
        raise wrong(
            "tool_choice", f"`required` needs tools to choose from, but the server has no {left_out:.200}"
        )
    if choice is None or isinstance(choice, str):
        return choice
    named = lambda one: {
        "type": "function",
        "function": {"name": tools.chosen(one.name or "", one.namespace)},
    }
    if choice.type != "allowed_tools":
        return named(choice)
    own = [named(one) for one in choice.tools or () if one.type not in HOSTED]
    if not own:
        raise wrong(
            "tool_choice", "this server runs none of these tools itself: allow one that the client runs"
        )
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": own}}


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
