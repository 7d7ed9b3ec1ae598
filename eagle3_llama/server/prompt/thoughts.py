"""The place of a model's thoughts, and how many tokens of them a request allows."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...batching.samplers import Thoughts
from ..body.chat import ChatBody
from ..errors import wrong
from ..settings import ServerSettings


def thoughts_of(made: dict[str, Any]) -> Thoughts | None:
    """The tags around thoughts, from what the template's child has made. None if the model has none."""
    if made["thinking"] is None or not (start := made["thinking"]["start"].strip()):
        return None
    prompt, ends = made["generation_prompt"], made["thinking"]["ends"]
    _, begun, after = prompt.rpartition(start)
    inside = bool(begun) and not any(end.strip() in after for end in ends)
    return Thoughts(start, tuple(ends), inside)


def wants_thoughts(body: ChatBody, settings: ServerSettings) -> bool:
    """True if a request asks for thoughts, by any of the names that servers have for it; else the server's.

    Raises ApiError 400 if two of them contradict each other.
    """
    own = body.chat_template_kwargs or {}
    asked = {}
    if "enable_thinking" in own:
        asked["chat_template_kwargs.enable_thinking"] = own["enable_thinking"]
    if isinstance(own.get("thinking"), bool):  # as DeepSeek's templates call it
        asked["chat_template_kwargs.thinking"] = own["thinking"]
    asked |= {} if body.enable_thinking is None else {"enable_thinking": body.enable_thinking}
    asked |= {} if body.thinking is None else {"thinking": body.thinking.type != "disabled"}
    asked = asked or {"enable_thinking": settings.template_kwargs.get("enable_thinking", True)}
    for name, value in asked.items():
        if not isinstance(value, bool):
            raise wrong("chat_template_kwargs", "enable_thinking is not true or false")
        if value is not next(iter(asked.values())):
            raise wrong(name, f"it differs from {next(iter(asked))}; give only one of them")
    return all(asked.values()) and body.reasoning_effort != "none"


def budget_of(body: ChatBody, settings: ServerSettings) -> int | None:
    """The tokens that thoughts may have, None for any number. Raises ApiError 400."""
    asked = body.thinking_budget_tokens
    if asked is None and body.thinking is not None:
        asked = body.thinking.budget_tokens
    if body.grammar is not None:  # it says itself where thoughts end, and may not let them end elsewhere
        if asked not in (None, -1):
            raise wrong("thinking_budget_tokens", "`grammar` bounds the thoughts: give only one of them")
        return None
    budget = settings.reasoning_budget if asked is None else asked
    return None if budget < 0 else budget


def bounded(llm: Any, thoughts: Thoughts | None, budget: int | None, waits: bool) -> Thoughts | None:
    """The thoughts with their budget, for a request's sampler. None if it need not know of them.

    waits: a lazy grammar waits for their end.
    """
    if thoughts is None or (budget is None and not waits):
        return None
    if budget is None:
        return thoughts
    closing = llm.tokenize(thoughts.ends[0].encode(), add_bos=False, special=True)
    return dataclasses.replace(thoughts, budget=budget, closing=tuple(closing))
