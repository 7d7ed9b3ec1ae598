"""Where a model's thoughts are, and how many tokens of them a request allows."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...batching.samplers import Thoughts
from ..api.chat import ChatBody
from ..settings import ServerSettings
from ..web.errors import wrong


def thoughts_of(made: dict[str, Any]) -> Thoughts | None:
    """The tags around thoughts, from what the template's child has made. None if the model has none."""
    if made["thinking"] is None or not (start := made["thinking"]["start"].strip()):
        return None
    prompt, ends = made["generation_prompt"], made["thinking"]["ends"]
    _, begun, after = prompt.rpartition(start)
    inside = bool(begun) and not any(end.strip() in after for end in ends)
    return Thoughts(start, tuple(ends), inside)


def budget_of(body: ChatBody, settings: ServerSettings) -> int | None:
    """The tokens that thoughts may have, None for any number. Raises ApiError 400."""
    asked = body.thinking_budget_tokens
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
