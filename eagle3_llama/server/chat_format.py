"""Messages to a prompt: llama-cpp-python's chat formats, a model file's own template in the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ApiError
from .prompt_size import PromptSize
from .sandbox import Sandbox, SandboxBusy, SandboxError
from .work import Once, busy


def template_setup(base: Any) -> dict[str, str] | None:
    """What the sandbox needs to render the model's template; None where llama-cpp-python has a format of its own for it."""
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
    """A chat handler for one request as llama-cpp-python makes one of the template itself; only rendering happens elsewhere, once for
    all choices. shown: what the template is: messages, functions, function_call, tools, tool_choice.

    Its stopping criterion (the end token) is left out: the end token ends generation anyway, and a criterion has a row of
    logits copied for every token.
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
    """The chat handler that llama-cpp-python would take."""
    from llama_cpp.llama_chat_format import get_chat_completion_handler

    return (
        llm.chat_handler
        or llm._chat_handlers.get(llm.chat_format)
        or get_chat_completion_handler(llm.chat_format)
    )


def call_tool(handler: Callable[..., Any], grammar: str) -> Callable[..., Any]:
    """The handler for a request that names its tool and has the schema as a grammar: it would make that again, in this process.

    So do those that llama-cpp-python makes of templates; the others have ways of their own.
    """
    if not handler.__qualname__.startswith("chat_formatter_to_chat_completion_handler."):
        return handler

    def call(*, llama: Any, tools: Any = None, functions: Any = None, **arguments: Any) -> Any:
        tools = tools and [{**t, "function": {**t["function"], "parameters": {}}} for t in tools]
        functions = functions and [{**f, "parameters": {}} for f in functions]
        return handler(llama=_WithGrammar(llama, grammar), tools=tools, functions=functions, **arguments)

    return call


class _WithGrammar:
    """A Llama whose completions follow this grammar, whatever they are asked to."""

    def __init__(self, llm: Any, grammar: str) -> None:
        self._llm, self._grammar = llm, grammar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def create_completion(self, **arguments: Any) -> Any:
        from llama_cpp import LlamaGrammar

        return self._llm.create_completion(
            **{**arguments, "grammar": LlamaGrammar.from_string(self._grammar, verbose=False)}
        )


def ask(sandbox: Sandbox, param: str, what: str, **request: Any) -> Any:
    """The sandbox's answer; ApiError 400 about `param`, or 503 when too many ask."""
    try:
        return sandbox.call(**request)
    except SandboxError as e:
        raise ApiError(400, f"{what}: {e}", param, "refused") from None
    except SandboxBusy:
        raise busy("with templates or grammars") from None


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates know them: content is text, and what only OpenAI's service reads is left out."""
    out = []
    for message in messages:
        m = message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "audio"})
        content = m.get("content")
        m["content"] = (
            "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        )
        m["role"] = "system" if m["role"] == "developer" else m["role"]
        out.append(m)
    return out
