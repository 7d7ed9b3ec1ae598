"""Answers of /v1/responses: the response object, whole or told in events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from ..errors import ApiError
from ..http.shapes import Shape, dumps
from ..http.stream import EventStream, total_report
from ..jobs.job import Event, total_usage
from .body import ResponseBody, ResponseItem
from .items import Items
from .store import ResponseStore
from .to_chat import renamed
from .tools import HOSTED, ToolSet


class ResponseShape:
    """The form of one response. chat: the shape of the chat's answer that it is made from.

    conversation, tools: the items that were asked with, and the tools. count: text -> its number of tokens.
    store, client: where and for whom the response is kept, with store None if it is not.
    """

    def __init__(
        self,
        body: ResponseBody,
        chat: Shape,
        response_id: str,
        conversation: list[dict[str, Any]],
        tools: ToolSet,
        count: Callable[[str], int],
        store: ResponseStore | None,
        client: str,
    ) -> None:
        self.chat, self.store, self.client, self.count = chat, store, client, count
        self.conversation, self.items = conversation, Items(tools.calls)
        self.finish: str | None = None
        self._probs: list[Any] = []  # a stream's, which no text has had yet
        self.head = _about(body, chat, response_id) | {"store": store is not None}

    def whole(self, parts: list[tuple[int, dict[str, Any]]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that does not stream. parts: its only completion. Keeps the response."""
        choice = self.chat.whole(parts, usage)["choices"][0]
        message = choice["message"]
        probs = (choice["logprobs"] or {"content": []})["content"]
        said = {k: v for k, v in message.items() if k != "tool_calls"}
        self.items.add(said, _logprobs_of(message["content"] or "", probs)[0])
        self.items.add({"tool_calls": message.get("tool_calls")}, [])
        self.finish = choice["finish_reason"]
        self.items.end(self.status)
        return self.ended(usage)

    def events(self, e: Event) -> list[dict[str, Any]]:
        """The events of a chat's chunk."""
        choice = self.chat.chunk(0, e.chunk)["choices"][0]
        self.finish = choice["finish_reason"] or self.finish
        delta, own = choice["delta"], list[Any]()
        self._probs += (choice["logprobs"] or {"content": []})["content"]
        if delta.get("content"):
            own, self._probs = _logprobs_of(delta["content"], self._probs)
        return self.items.add(delta, own)

    @property
    def status(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"

    def ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The response at its end, which is kept if it is to be. usage: as a chat has it."""
        cut = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        out = {**self.head, "status": self.status, "incomplete_details": cut, "output": self.items.output}
        out |= {"completed_at": None if cut else int(time.time()), "usage": self._usage(usage)}
        if self.store is not None:
            self._keep(self.store, out)
        return out

    def _keep(self, store: ResponseStore, out: dict[str, Any]) -> None:
        try:
            own = [ResponseItem.model_validate(item) for item in self.items.output]
        except ValidationError:  # a name or an id that the model has made up, and that no request may have
            out["store"] = False
            return
        items = [item.model_dump(exclude_none=True) for item in own]  # without logprobs and ids
        store.keep(self.client, out, self.conversation + items)

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        thoughts = [item["content"][0]["text"] for item in self.items.output if item["type"] == "reasoning"]
        n_thoughts = min(sum(map(self.count, thoughts)), usage["completion_tokens"])
        cached = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0}
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": n_thoughts, **usage["completion_tokens_details"]},
            "total_tokens": usage["total_tokens"],
        }


class ResponseStream(EventStream):
    """The events of a response, each with its number and its name. There is no [DONE]."""

    shape: ResponseShape
    _number = 0

    def _send(self, events: list[dict[str, Any]]) -> bytes:
        out = []
        for e in events:
            numbered = {"type": e["type"], "sequence_number": self._number, **e}
            out.append(b"event: " + e["type"].encode() + b"\ndata: " + dumps(numbered) + b"\n\n")
            self._number += 1
        return b"".join(out)

    def _lifecycle(self, name: str, response: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"response.{name}", "response": response}

    async def _begin(self) -> bytes:
        events = [self._lifecycle(name, self.shape.head) for name in ("created", "in_progress")]
        return await asyncio.to_thread(self._send, events)  # instructions and tools may be megabytes

    def _frame(self, e: Event) -> bytes:
        return self._send(self.shape.events(e))

    def _failure(self, e: ApiError) -> bytes:
        e = renamed(e)
        error = {"type": "error", "code": e.code, "message": str(e), "param": e.param}
        about = {"code": "server_error" if e.status >= 500 else "invalid_prompt", "message": str(e)}
        response = {**self.shape.head, "status": "failed", "error": about, "output": self.shape.items.output}
        return self._send([error, self._lifecycle("failed", response)])

    async def _end(self) -> bytes:
        return await asyncio.to_thread(self._last_events)  # logprobs may be megabytes, thoughts are counted

    def _last_events(self) -> bytes:
        events = self.shape.items.end(self.shape.status)
        response = self.shape.ended(total_usage(self.job).body())
        response |= total_report(self.job) if self.report else {}
        return self._send([*events, self._lifecycle(self.shape.status, response)])


def _about(body: ResponseBody, chat: Shape, response_id: str) -> dict[str, Any]:
    """The response before its first token."""
    given = body.model_dump(mode="json", by_alias=True)
    text, reasoning = given["text"] or {}, given["reasoning"] or {}
    choice = given["tool_choice"]
    if isinstance(choice, dict):
        choice = {k: v for k, v in choice.items() if v is not None}
    as_given = "instructions max_output_tokens max_tool_calls previous_response_id temperature top_p user"
    more = "safety_identifier prompt_cache_key"
    return {
        "id": response_id,
        "object": "response",
        "created_at": chat.head["created"],
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": chat.head["model"],
        "output": [],
        **{name: given[name] for name in f"{as_given} {more}".split()},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {**text, "format": _format_of(text)},
        "tool_choice": choice or "auto",
        "tools": [_tool(t) for t in given["tools"] or () if t["type"] not in HOSTED],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }


_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
    "namespace": ("name", "description", "tools"),
    "tool_search": ("description", "parameters", "execution"),
}


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """A tool of the request with the fields that its type has."""
    out = {"type": given["type"], **{name: given[name] for name in _FIELDS.get(given["type"], ())}}
    if given["type"] == "namespace":
        out |= {"description": given["description"] or "", "tools": [_tool(one) for one in given["tools"]]}
    return out


def _format_of(text: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in (text.get("format") or {"type": "text"}).items() if v is not None}


def _logprobs_of(content: str, tokens: list[Any]) -> tuple[list[Any], list[Any]]:
    """(the logprobs of a content, those of what follows). An answer's are those of thoughts and calls, too.

    A content that is not found, because a character of it has several tokens, gets all of them.
    """
    text = "".join(t["token"] for t in tokens)
    if (at := text.rfind(content)) < 0:  # its blanks are a parser's
        content = content.strip()
        at = text.rfind(content)
    if at < 0 or not content:
        return tokens, []
    own, begin = list[Any](), 0
    for i, t in enumerate(tokens):
        if begin >= at + len(content):
            return own, tokens[i:]
        begin += len(t["token"])
        if begin > at:
            own.append(t)
    return own, []
