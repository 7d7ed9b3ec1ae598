"""Converts answers in llama-cpp-python's form to the form that OpenAI's clients expect."""

from __future__ import annotations

import json
import math
from typing import Any

from ... import __version__


class Shape:
    """The form of one answer."""

    def __init__(
        self, *, chat: bool, answer_id: str, created: int, model: str, stream: bool, top_logprobs: int = 0
    ) -> None:
        self.chat, self.top_logprobs = chat, top_logprobs
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        self.head = {"id": answer_id, "object": kind, "created": created, "model": model}
        self.head["system_fingerprint"] = f"eagle3-llama-{__version__}"
        self._called: set[int] = set()

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        """A chunk of choice `index` for a streamed answer."""
        timings = {"timings": chunk["timings"]} if "timings" in chunk else {}
        return {**self.head, "choices": [self._choice(index, chunk["choices"][0], "delta")], **timings}

    def whole(self, parts: list[tuple[int, dict[str, Any]]], usage: dict[str, Any]) -> dict[str, Any]:
        """An answer that is not streamed. parts: (choice's index, completion)."""
        ordered = sorted(parts, key=lambda p: p[0])
        choices = [self._choice(i, part["choices"][0], "message") for i, part in ordered]
        timings = [part["timings"] for _, part in ordered]
        return {
            **self.head,
            "choices": choices,
            "usage": usage,
            "timings": timings[0] if len(timings) == 1 else timings,
        }

    def _choice(self, index: int, choice: dict[str, Any], name: str) -> dict[str, Any]:
        out = {"index": index, "finish_reason": choice["finish_reason"]}
        out["logprobs"] = self._logprobs(choice.get("logprobs"))
        if not self.chat:
            return {"text": choice["text"], **out}
        delta = {k: v for k, v in choice[name].items() if v is not None}
        if name == "message" or "role" in delta:
            delta.setdefault("content", None)
        if "function_call" in delta:
            delta = self._call(index, delta, name)
        return {**out, name: delta}

    def _call(self, index: int, delta: dict[str, Any], name: str) -> dict[str, Any]:
        """A call by a named chat format of llama-cpp-python, which gives an older form of it too.

        In a stream, only the first chunk has id and name, because clients join the chunks' fields.
        """
        delta = {key: value for key, value in delta.items() if key != "function_call"}
        if name == "message" or index not in self._called:
            self._called.add(index)
        else:
            calls = [(c["index"], c["function"]["arguments"]) for c in delta["tool_calls"]]
            delta["tool_calls"] = [{"index": i, "function": {"arguments": text}} for i, text in calls]
        return delta

    def _logprobs(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """The logprobs with finite numbers and, in a chat, with as many top_logprobs as the request asks for.

        Changes the chat's logprobs in place, because 2,000 tokens with 20 alternatives each are 10 MB. The
        bytes are those of the tokens: the text of a part of a character is empty.
        """
        if logprobs is None:
            return None
        if self.chat:
            for t in logprobs["content"]:
                token, t["logprob"] = t["token"], finite(t["logprob"])
                t["bytes"] = list(token.raw)
                t["top_logprobs"] = [
                    {"token": text, "logprob": finite(p), "bytes": list(raw)}
                    for _, text, raw, p in token.top()[: self.top_logprobs]
                ]
            return {"content": logprobs["content"], "refusal": None}
        tops = [top and {token: finite(p) for token, p in top.items()} for top in logprobs["top_logprobs"]]
        own = [p if p is None else finite(p) for p in logprobs["token_logprobs"]]
        return {**logprobs, "token_logprobs": own, "top_logprobs": tops}


def finite(x: Any) -> float:
    """A finite number, because JSON has no infinity. OpenAI writes -9999 for a probability of 0."""
    x = float(x)
    return x if math.isfinite(x) else -9999.0


def dumps(value: Any) -> bytes:
    """UTF-8. Half of a surrogate pair, which the JSON of a call's arguments may name, becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # clients ignore comments, by the standard of server-sent events
