"""The text of a completion, where llama-cpp-python loses some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .completion_options import CompletionOptions


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings of a completion, as Llama takes them."""
    return [stop] if isinstance(stop, str) else stop or []


class AnswerText:
    """Mends the items of one Llama._create_completion.

    llama-cpp-python looks at the text only where a character is complete. An answer that the context's end
    cuts within a character has no text. The last chunks of a stream have one token each, and lose a character
    of several tokens.

    options: the completion's. whole: the bytes of all tokens so far. arguments: those of
    _create_completion.
    """

    def __init__(
        self, options: CompletionOptions, whole: Callable[[], bytes], arguments: dict[str, Any]
    ) -> None:
        self._options = options
        self._whole = whole
        self._stream = bool(arguments.get("stream"))
        self._stops = [s.encode() for s in stop_strings(arguments.get("stop"))]
        self._echoed = arguments["prompt"] if arguments.get("echo") else ""
        self._sent: list[str] = []
        self._left: str | None = None  # what is not sent yet, since the generation is over

    def mend(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The item with the text that it should have, and before a stream's last one what it still lacks."""
        choice = item["choices"][0]
        if not self._stream:
            if choice["finish_reason"] == "length" and choice["text"] == self._echoed:
                choice["text"] += self._end(choice)
        elif choice["finish_reason"] is not None:
            if self._left:
                yield {**item, "choices": [{**choice, "text": self._left, "finish_reason": None}]}
        elif choice["logprobs"] is None:
            if self._options.over:
                self._catch_up(choice)
            elif choice["text"]:
                self._sent.append(choice["text"])
        yield item

    def _catch_up(self, choice: dict[str, Any]) -> None:
        """The item has the text of one of the last tokens: before it comes what the items before it lost."""
        if self._left is None:
            sent = "".join(self._sent)
            text = self._end({})
            self._left = text[len(sent) :] if text.startswith(sent) else ""
        if (at := self._left.find(choice["text"])) >= 0:
            end = at + len(choice["text"]) if choice["text"] else 0
            choice["text"], self._left = self._left[:end], self._left[end:]

    def _end(self, choice: dict[str, Any]) -> str:
        """The answer's text up to a stop string, which may have come with the first bytes of a character."""
        text = self._whole()
        if found := next((s for s in self._stops if s in text), None):
            text = text[: text.index(found)]
            choice["finish_reason"] = "stop"
        return text.decode("utf-8", "ignore")
