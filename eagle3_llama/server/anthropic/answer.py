"""Answers in the form of Anthropic's Messages API: one message, or a stream of events."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...common.guarded_json import read_json
from ...llama.usage import TokenUsage
from ..errors import ApiError
from ..http.shapes import dumps
from ..http.stream import EventStream, joined
from ..jobs.job import Choice, RequestJob, total_usage

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use"}


class Stopped:
    """Which stop sequence has ended an answer; None if its own end or a limit has."""

    def __init__(self, sequences: list[str] | None) -> None:
        self.sequences, self.by = sequences or [], None

    def watch(self, choice: Choice) -> Choice:
        """The choice with a call that finds out."""
        return dataclasses.replace(choice, call=lambda llm: self._call(choice, llm))

    def _call(self, choice: Choice, llm: Any) -> Any:
        out = choice.call(llm)
        if not isinstance(out, dict):
            return self._streamed(out, llm)
        self._look(out, llm)
        return out

    def _streamed(self, chunks: Iterator[dict[str, Any]], llm: Any) -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            self._look(chunk, llm)
            yield chunk

    def _look(self, answer: dict[str, Any], llm: Any) -> None:
        if self.sequences and answer["choices"][0]["finish_reason"] == "stop":
            self.by = llm.stopped_by(self.sequences)


class MessageShape:
    """The form of one answer. continued: it goes on with the request's last message."""

    def __init__(
        self, *, answer_id: str, model: str, job: RequestJob, stopped: Stopped, continued: bool
    ) -> None:
        self.job, self._stopped, self.continued = job, stopped, continued
        self.head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}

    def whole(self, parts: list[tuple[int, dict[str, Any]]], _: dict[str, Any]) -> dict[str, Any]:
        choice = parts[0][1]["choices"][0]
        message, content = choice["message"], list[dict[str, Any]]()
        thoughts, text = message.get("reasoning_content") or "", message.get("content") or ""
        if thoughts := thoughts.lstrip():
            content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if text := text if self.continued else text.lstrip():
            content.append({"type": "text", "text": text})
        content += [_tool_use(call, _input(call)) for call in message.get("tool_calls") or ()]
        ended = self.ended(choice["finish_reason"])
        return {**self.head, "content": content, **ended, "usage": usage(total_usage(self.job))}

    def start(self) -> dict[str, Any]:
        """The first event of a stream. What is known of the usage then is what the prompt has."""
        message: dict[str, Any] = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None}
        spent = usage(sum(self.job.spent(), TokenUsage()))
        return {"type": "message_start", "message": {**message, "usage": spent}}

    def ended(self, finish: str) -> dict[str, Any]:
        if finish == "stop" and self._stopped.by is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stopped.by}
        return {"stop_reason": _REASONS[finish], "stop_sequence": None}

    def end(self) -> list[dict[str, Any]]:
        """The last two events."""
        spent = usage(total_usage(self.job))
        delta = {"type": "message_delta", "delta": self.ended(self.job.reasons[0]), "usage": spent}
        return [delta, {"type": "message_stop"}]


def usage(used: TokenUsage) -> dict[str, int]:
    """Anthropic counts tokens that were not decoded again apart from the others of the prompt."""
    read = {"cache_read_input_tokens": used.reused, "output_tokens": used.completion}
    return {"input_tokens": used.prompt - used.reused, **read}


class Blocks:
    """Events of content blocks, from a chat's deltas. Space before a block's first word is left out.

    So is space before a call, as in an answer that is not streamed.
    """

    def __init__(self, continued: bool) -> None:
        self._index, self._kind, self._call = -1, "", -1
        self._space, self._continued, self._called = "", continued, False

    def of(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if text := delta.get("reasoning_content"):
            yield from self._text("thinking", text)
        if text := delta.get("content"):
            yield from self._text("text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._of_call(call)

    def end(self) -> Iterator[dict[str, Any]]:
        if self._kind and self._space and not self._called:
            yield self._delta(**_words(self._kind, self._space))
        yield from self._close()

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            keep = kind == "text" and self._continued and self._index < 0
            if not keep and not (text := text.lstrip()):
                return
            yield from self._open(kind, _words(kind, "") | {"type": kind})
        text, self._space = self._space + text, ""
        if kind == "text":
            text, self._space = text.rstrip(), text[len(text.rstrip()) :]
        if text:
            yield self._delta(**_words(kind, text))

    def _of_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if call["index"] > self._call:
            self._call, self._called = call["index"], True
            yield from self._open("tool_use", _tool_use(call, {}))
        if arguments := call["function"].get("arguments"):
            yield self._delta(type="input_json_delta", partial_json=arguments)

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._index, self._kind, self._space = self._index + 1, kind, ""
        block = {**block, "signature": ""} if kind == "thinking" else block
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind == "thinking":  # clients wait for it; there is nothing that it would prove here
            yield self._delta(type="signature_delta", signature="")
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _delta(self, **delta: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessageStream(EventStream):
    """The same as a stream of Anthropic's events. `shape` is a MessageShape. Silences are filled by pings."""

    async def _frames(self) -> AsyncIterator[bytes]:
        blocks, begun = Blocks(self.shape.continued), False
        try:
            async for batch in self.events:
                chunks = joined([e for e in batch or () if e.chunk])
                deltas = [e.chunk["choices"][0]["delta"] for e in chunks]
                out = [new for delta in deltas for new in blocks.of(delta)]
                if not begun and (out or batch is None):
                    begun, out = True, [self.shape.start(), PING, *out]
                elif batch is None:
                    out = [PING]
                if out:
                    yield b"".join(map(_event, out))
        except ApiError as e:
            self.job.failed = e
            yield _event(error_body(e))
            return
        start = [] if begun else [self.shape.start(), PING]
        yield b"".join(map(_event, [*start, *blocks.end(), *self.shape.end()]))


PING = {"type": "ping"}


def _event(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + dumps(value) + b"\n\n"


def _words(kind: str, text: str) -> dict[str, str]:
    """The text of a block or, with the type of a delta, of a part of one."""
    return {"type": f"{kind}_delta", kind: text}


def _tool_use(call: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _input(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call. Without a grammar they may be no object, which Anthropic's clients know so."""
    text = call["function"]["arguments"] or "{}"
    try:
        found = read_json(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = {"response_format": "output_config.format", "continue_final_message": "messages"}


def error_body(e: ApiError) -> dict[str, Any]:
    """An error in this API's form, and with its names of fields."""
    kind = _TYPES.get(e.status, "invalid_request_error" if e.status < 500 else "api_error")
    name = _NAMES.get(e.param or "", e.param)
    message = str(e) if name == e.param else str(e).replace(f"{e.param}:", f"{name}:", 1)
    return {"type": "error", "error": {"type": kind, "message": message}}
