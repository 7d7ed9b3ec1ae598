"""Turns messages into a prompt, with a chat format of llama-cpp-python or with the model's template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..jobs.limits import Once, busy
from ..sandbox.pool import Sandbox, SandboxBusy, SandboxError
from ..sandbox.prompt_size import PromptSize
from ..web.errors import ApiError


def template_setup(base: Any) -> dict[str, str] | None:
    """What the sandbox needs to render the model's template. None if llama-cpp-python has a format for it."""
    name = base.chat_format or ""
    key = "tokenizer.chat_template" if name == "chat_template.default" else f"tokenizer.{name}"
    template = base.metadata.get(key) if name.startswith("chat_template.") else None
    if template is None:
        return None
    text = lambda t: base._model.token_get_text(t) if t != -1 else ""
    return {"template": template, "eos": text(base.token_eos()), "bos": text(base.token_bos())}


def sandboxed_handler(
    sandbox: Sandbox, eos: str, size: PromptSize, shown: dict[str, Any]
) -> Callable[..., Any]:
    """The chat handler that llama-cpp-python would make from the template, for one request.

    The sandbox renders the prompt, once for all choices. shown: the template's variables messages, functions,
    function_call, tools and tool_choice. llama-cpp-python's handler also has a stopping criterion, the end
    token. This one has none: the end token ends generation anyway, and a criterion needs a copy of the logits
    for every token.
    """
    from llama_cpp.llama_chat_format import ChatFormatterResponse, chat_formatter_to_chat_completion_handler

    def render() -> str:
        prompt = ask(sandbox, "messages", "the chat template refused the messages", do="render", **shown)
        size.check_fits(prompt, "messages")
        return prompt

    rendered = Once(render)
    return chat_formatter_to_chat_completion_handler(
        lambda **_: ChatFormatterResponse(prompt=rendered(), stop=[eos] if eos else None, added_special=True)
    )


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

    def call(*, llama: Any, tools: Any = None, functions: Any = None, **arguments: Any) -> Any:
        tools = tools and [{**t, "function": {**t["function"], "parameters": {}}} for t in tools]
        functions = functions and [{**f, "parameters": {}} for f in functions]
        return handler(llama=_WithGrammar(llama, grammar), tools=tools, functions=functions, **arguments)

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


def ask(sandbox: Sandbox, param: str, what: str, **request: Any) -> Any:
    """The sandbox's answer. Raises ApiError 400 about `param`, or 503 if too many requests wait for it.

    what: the start of the error message.
    """
    try:
        return sandbox.call(**request)
    except SandboxError as e:
        raise ApiError(400, f"{what}: {e}", param, "refused") from None
    except SandboxBusy:
        raise busy("with chat templates or grammars") from None


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them: with content as text, without fields of OpenAI's service alone."""
    out = []
    for message in messages:
        m = message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "audio"})
        content = m.get("content") or ""
        m["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
        m["role"] = "system" if m["role"] == "developer" else m["role"]
        out.append(m)
    return out
