"""Turns the text of a completion into the message that it is, whole or in deltas."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ...common.guarded_json import read_json
from ..sandbox.cpu_time import CpuTime
from ..sandbox.pool import SandboxBusy, SandboxError

FREE = 0.005  # seconds of a child's processor that a reading of an answer may take
PAUSE = 3.0  # seconds until the next one, for each further one: what is slow to read is read less often
# (text so far, whether it goes on) -> content, reasoning_content, tool_calls; None: not to be read yet
Read = Callable[[str, bool], "dict[str, Any] | None"]


class Deltas:
    """The new part of an answer each time that its text has grown.

    A text that brings the parser down, or that is none of its answers, goes on as content. tags: those of
    thoughts. cut: whether the text ended within a call.
    """

    def __init__(self, read: Read, parallel: bool, tags: Collection[str] = ()) -> None:
        self._read, self._parallel, self._tags = read, parallel, tags
        self.cut = False
        self._at = 0  # characters of the text that have been read
        self._raw: int | None = None  # from where on the text is content, if it cannot be read
        self._sent = {"content": "", "reasoning_content": ""}
        self._calls: list[dict[str, str]] = []

    @property
    def called(self) -> bool:
        return bool(self._calls)

    def of(self, text: str, partial: bool, last: bool = False) -> Iterator[dict[str, Any]]:
        """The deltas since the last call. partial: the text was cut or goes on. last: nothing follows."""
        message = self._message(text, partial, last) if self._raw is None else None
        if self._raw is not None:
            new, self._raw = text[self._raw :], len(text)
            if new:
                yield {"content": new}
        if message is None:
            return
        self._at = len(text)
        calls = message["tool_calls"][: None if self._parallel else 1]
        self.cut = last and _within_call(text, message, calls, self._tags)
        for field in ("reasoning_content", "content"):
            new, was = message[field], self._sent[field]
            if len(new) > len(was) and new.startswith(was):
                self._sent[field] = new
                yield {field: new[len(was) :]}
        for i, call in enumerate(calls):
            yield from self._of_call(i, call)

    def _message(self, text: str, partial: bool, last: bool) -> dict[str, Any] | None:
        message = None
        try:
            message = self._read(text, partial)
            lost = last and message is None
        except SandboxBusy:
            lost = last
        except SandboxError:  # it would bring down the next child, too
            lost = True
        if lost:
            sent = self._sent["content"]
            all_content = text.startswith(sent) and not self._sent["reasoning_content"]
            self._raw = len(sent) if all_content else self._at
        return message

    def _of_call(self, i: int, call: dict[str, str]) -> Iterator[dict[str, Any]]:
        if i == len(self._calls):
            if not call["name"]:
                return
            self._calls.append({"arguments": ""})
            yield self._delta(i, new_call({**call, "arguments": ""}))
        if i < len(self._calls):
            was, new = self._calls[i]["arguments"], call["arguments"]
            if len(new) > len(was) and new.startswith(was):
                self._calls[i]["arguments"] = new
                yield self._delta(i, {"function": {"arguments": new[len(was) :]}})

    def _delta(self, i: int, call: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": i, **call}]}


def new_call(call: dict[str, str]) -> dict[str, Any]:
    """A call of a message as OpenAI writes it, with an id of its own if the model gave it none."""
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"] or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def plain(chunks: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A chat's chunks of a completion's, whose text is content and nothing else."""
    yield _chunk({"role": "assistant"}, None, None)
    for chunk in chunks:
        choice = chunk["choices"][0]
        finish, probs = choice["finish_reason"], chat_logprobs(choice["logprobs"])
        yield _chunk({"content": choice["text"]} if finish is None else {}, probs, finish)


def streamed(chunks: Iterable[dict[str, Any]], deltas: Deltas, interval: float) -> Iterator[dict[str, Any]]:
    """A chat's chunks of a completion's. interval: seconds between two readings of the text."""
    yield _chunk({"role": "assistant"}, None, None)
    text, due, probs = "", 0.0, []
    for chunk in chunks:
        choice = chunk["choices"][0]
        finish, text = choice["finish_reason"], text + choice["text"]
        probs += (chat_logprobs(choice["logprobs"]) or {"content": []})["content"]
        if finish is None and time.monotonic() < due:
            continue
        spent = CpuTime()
        new: list[dict[str, Any]] = spent.of(list, deltas.of(text, finish != "stop", finish is not None))
        for delta in new:
            yield _chunk(delta, {"content": probs, "refusal": None} if probs else None, None)
            probs = []
        due = time.monotonic() + max(interval, PAUSE * (spent.seconds - FREE))
        if finish is not None:
            finish = "length" if choice.get("cut") and deltas.cut else finish
            ended = "tool_calls" if finish == "stop" and deltas.called else finish
            yield _chunk({}, {"content": probs, "refusal": None} if probs else None, ended)


def whole(
    completion: dict[str, Any], read: Read | None, parallel: bool, tags: Collection[str] = ()
) -> dict[str, Any]:
    """A chat's completion of one whose text is an answer. One that was cut within a call has no call.

    read: None if all of the text is content. tags: those of thoughts.
    """
    choice = completion["choices"][0]
    text, finish = choice["text"], choice["finish_reason"]
    try:
        message = read(text, finish != "stop") if read is not None else None
    except (SandboxError, SandboxBusy):
        message = None
    if message is None:
        message = {"content": text, "reasoning_content": "", "tool_calls": []}
    calls = message["tool_calls"][: None if parallel else 1]
    if choice.get("cut") and read is not None and _within_call(text, message, calls, tags):
        finish = "length"
    if finish != "stop":
        calls = [call for call in calls if _is_json(call["arguments"])]
    out: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if message["reasoning_content"]:
        out["reasoning_content"] = message["reasoning_content"]
    if calls:
        out["content"] = out["content"].strip() or None
        out["tool_calls"] = [new_call(call) for call in calls]
        finish = "tool_calls" if finish == "stop" else finish
    probs = chat_logprobs(choice["logprobs"])
    return {"choices": [{"index": 0, "message": out, "logprobs": probs, "finish_reason": finish}]}


def _within_call(
    text: str, message: dict[str, Any], calls: list[dict[str, str]], tags: Collection[str]
) -> bool:
    """True if a text ends within a call, of which the message may know nothing yet."""
    if calls:
        return not all(_is_json(call["arguments"]) for call in calls)
    told = (message["content"] or message["reasoning_content"]).strip()
    return bool(text.strip()) and not text.rstrip().endswith((told, *tags) if told else tuple(tags))


def chat_logprobs(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """A completion's logprobs in the form of a chat. api/shapes.py adds what the tokens know."""
    if logprobs is None:
        return None
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"])
    return {"content": [{"token": token, "logprob": value} for token, value in pairs], "refusal": None}


def _chunk(delta: dict[str, Any], probs: Any, finish: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": probs, "finish_reason": finish}]}


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except ValueError:
        return False
    return True
