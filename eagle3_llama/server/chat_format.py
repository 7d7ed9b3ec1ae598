"""Messages to a prompt: llama-cpp-python's chat formats, a model file's own template in the sandbox."""

from __future__ import annotations

from typing import Any, Callable

from .errors import ApiError
from .prompt_size import PromptSize
from .sandbox import Sandbox, SandboxBusy, SandboxError


def template_setup(base: Any) -> dict[str, str] | None:
    """What the sandbox needs to render the model's template; None where llama-cpp-python has a format of its own for it."""
    name = base.chat_format or ""
    key = "tokenizer.chat_template" if name == "chat_template.default" else f"tokenizer.{name}"
    template = base.metadata.get(key) if name.startswith("chat_template.") else None
    if template is None:
        return None
    text = lambda t: base._model.token_get_text(t) if t != -1 else ""  # noqa: E731
    return {"template": template, "eos": text(base.token_eos()), "bos": text(base.token_bos())}


def sandboxed_handler(sandbox: Sandbox, eos: str, size: PromptSize) -> Callable[..., Any]:
    """A chat handler as llama-cpp-python makes one of the template itself; only rendering happens elsewhere.

    Its stopping criterion (the end token) is left out: the end token ends generation anyway, and a criterion has a row of
    logits copied for every token.
    """
    from llama_cpp.llama_chat_format import ChatFormatterResponse, chat_formatter_to_chat_completion_handler

    def formatter(*, messages: Any, functions: Any = None, function_call: Any = None, tools: Any = None, tool_choice: Any = None, **_: Any) -> Any:
        prompt = ask(sandbox, "messages", "the chat template refused the messages", do="render", messages=messages, functions=functions,
                     function_call=function_call, tools=tools, tool_choice=tool_choice)  # fmt: skip
        size.check_fits(prompt, "messages")
        return ChatFormatterResponse(prompt=prompt, stop=[eos] if eos else None, added_special=True)

    return chat_formatter_to_chat_completion_handler(formatter)


def ask(sandbox: Sandbox, param: str, what: str, **request: Any) -> Any:
    """The sandbox's answer; ApiError 400 about `param`, or 503 when too many ask."""
    try:
        return sandbox.call(**request)
    except SandboxError as e:
        raise ApiError(400, f"{what}: {e}", param, "refused") from None
    except SandboxBusy:
        raise ApiError(503, "too many requests with templates or grammars", code="busy", headers={"Retry-After": "2"}) from None


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates know them: content is text, and what only OpenAI's service reads is left out."""
    out = []
    for message in messages:
        m = message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "audio"})
        content = m.get("content")
        m["content"] = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        m["role"] = "system" if m["role"] == "developer" else m["role"]
        out.append(m)
    return out
