"""The chat formats of llama-cpp-python that are left: those that --chat-format names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..body.chat import AllowedTools, ChatBody
from ..errors import wrong
from ..settings import ServerSettings, read_template


def template_setup(base: Any, settings: ServerSettings) -> dict[str, Any] | None:
    """The template as the children render it. None if a chat format of llama-cpp-python is named."""
    if settings.chat_format is not None and not settings.chat_format.startswith("chat_template."):
        return None
    name = (settings.chat_format or "chat_template.default").removeprefix("chat_template.")
    key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
    template, tool_use = base.metadata.get(key), base.metadata.get("tokenizer.chat_template.tool_use")
    if settings.chat_template_file is not None:
        template, tool_use = read_template(settings.chat_template_file), None
    if template is None:
        return None
    text = lambda t: base._model.token_get_text(t) if t != -1 else ""
    ends = {"eos": text(base.token_eos()), "bos": text(base.token_bos())}
    return {"template": template, "tool_use": tool_use if name == "default" else None, **ends}


def handler_of(llm: Any) -> Callable[..., Any]:
    """The chat handler that llama-cpp-python would choose."""
    from llama_cpp.llama_chat_format import get_chat_completion_handler

    return (
        llm.chat_handler
        or llm._chat_handlers.get(llm.chat_format)
        or get_chat_completion_handler(llm.chat_format)
    )


def call_tool(handler: Callable[..., Any], grammar: str) -> Callable[..., Any]:
    """A handler for a request that must call one tool. grammar: the tool's parameters as GBNF.

    A handler that llama-cpp-python makes from a template would convert the schema to a grammar again, in this
    process. The wrapper hides the schema from it. Other handlers do not convert schemas and stay as they are.
    """
    if not handler.__qualname__.startswith("chat_formatter_to_chat_completion_handler."):
        return handler

    def call(*, llama: Any, tools: Any = None, **arguments: Any) -> Any:
        tools = tools and [{**t, "function": {**t["function"], "parameters": {}}} for t in tools]
        return handler(llama=_WithGrammar(llama, grammar), tools=tools, **arguments)

    return call


class _WithGrammar:
    """A Llama whose completions follow this grammar, whatever grammar the caller passes."""

    def __init__(self, llm: Any, grammar: str) -> None:
        self._llm, self._grammar = llm, grammar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def create_completion(self, **arguments: Any) -> Any:
        from llama_cpp import LlamaGrammar

        grammar = LlamaGrammar.from_string(self._grammar, verbose=False)
        return self._llm.create_completion(**{**arguments, "grammar": grammar})


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them: with content as text, without fields of OpenAI's service alone."""
    out = []
    for message in messages:
        m = message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "audio", "reasoning"})
        if message.reasoning is not None:
            m.setdefault("reasoning_content", message.reasoning)
        content = m.get("content") or ""
        m["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
        m["role"] = "system" if m["role"] == "developer" else m["role"]
        out.append(m)
    return out


def tools_of(body: ChatBody) -> tuple[dict[str, Any], dict[str, Any] | None, bool]:
    """(arguments that describe the tools, the parameters of the one that must be called, if it is strict)."""
    functions, choice = [_function(t.function) for t in body.tools or ()], body.tool_choice
    name = _forced(functions, choice)
    tool = next((f for f in functions if f["name"] == name), None)
    if name is not None and tool is None:
        raise wrong("tool_choice", f"there is no tool {name!r:.80}")
    if choice == "none" or not functions:
        return {}, None, False
    schema, strict = tool and tool["parameters"], bool(tool and tool.get("strict"))
    tools = [{"type": "function", "function": f} for f in functions]
    call = choice if name is None else {"type": "function", "function": {"name": name}}
    return {"tools": tools, "tool_choice": call}, schema, strict


def _forced(functions: list[dict[str, Any]], choice: Any) -> str | None:
    """The name of the function that must be called."""
    if choice in (None, "auto", "none"):
        return None
    if isinstance(choice, AllowedTools):
        message = "allowed_tools needs the model's template: start the server without --chat-format"
        raise wrong("tool_choice", message)
    if choice == "required":
        if len(functions) != 1:
            message = "with --chat-format, `required` needs exactly one tool; name the tool to call instead"
            raise wrong("tool_choice", message)
        return functions[0]["name"]
    return choice.function.name


def _function(function: Any) -> dict[str, Any]:
    return {"parameters": {"type": "object", "properties": {}}, **function.model_dump(exclude_none=True)}
