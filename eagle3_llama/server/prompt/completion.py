"""The text of a completion, made from its tokens as they come. Each costs the same, however many there are.

Where an answer ends and what its chunks hold is as with llama-cpp-python's create_completion, which makes the
whole text anew for each token. But limits count tokens: llama-cpp-python goes on until a character is whole.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ...batching.logprobs import Logprobs
from ...batching.samplers import Thoughts
from ...llama.chat import is_end
from ...llama.completion_options import CompletionOptions
from ...llama.infill import can_infill, infill_prompt

_LEADS = (2, 0xC0), (3, 0xE0), (4, 0xF0)  # bytes of a character, and the bits of its first one


class StopWord:
    """How much of a stop string stands at the end of a text, which grows (Knuth, Morris and Pratt)."""

    def __init__(self, word: bytes) -> None:
        self.word, self.n = word, 0  # bytes
        self._shorter = [0] * len(word)  # by beginning: the longest other one that it ends with
        k = 0
        for i in range(1, len(word)):
            k = self._next(k, word[i])
            self._shorter[i] = k

    def add(self, piece: bytes) -> None:
        """Each byte costs the same, whatever the word."""
        first = 0 if self.n else piece.find(self.word[:1])
        if first >= 0:
            for byte in piece[first:]:
                n = self._shorter[self.n - 1] if self.n == len(self.word) else self.n
                self.n = self._next(n, byte)

    def _next(self, n: int, byte: int) -> int:
        while n and self.word[n] != byte:
            n = self._shorter[n - 1]
        return n + (self.word[n] == byte)


class TextOfTokens:
    """The bytes of an answer. What may be a part of a character or of a stop string waits for what follows.

    end: the number of bytes before the stop string, `word`, that has ended the text; None: none has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [StopWord(s.encode()) for s in stops]
        self.end: int | None = None
        self.word: str | None = None
        self._bytes = bytearray()
        self._searched = 0  # bytes that have been searched for stop strings
        self._missing = 0  # bytes until the last character is whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._ends: collections.deque[int] = collections.deque()  # ends of tokens that are not decoded yet
        self._decoded, self._begun, self._n_begun = 0, "", 0  # bytes; text and tokens that take() still has

    def add(self, piece: bytes) -> bool:
        """Adds a token. False if the text may end within a character, by llama-cpp-python's count."""
        self._bytes += piece
        self._ends.append(len(self._bytes))
        for s in self._stops:
            s.add(piece)
        tail = self._bytes[-3:]
        if tail and max(tail) >= _LEADS[0][1]:
            for have, byte in zip((3, 2, 1), tail):
                for size, lead in _LEADS:
                    if size > have and byte & lead == lead:
                        self._missing = size - have
        if not self._missing:
            return True
        self._missing -= 1
        return False

    def stopped(self) -> bool:
        """Looks for stop strings. Of several that came with one token, the first in the list counts."""
        before, self._searched = self._searched, len(self._bytes)
        if self.end is None:
            words = (s.word for s in self._stops)
            found = ((self._bytes.find(w, max(0, before - len(w) + 1)), w) for w in words)
            self.end, word = next(((at, s) for at, s in found if at >= 0), (None, b""))
            self.word = None if self.end is None else word.decode()
        return self.end is not None

    def take(self) -> Iterator[tuple[str, int]]:
        """The new texts, each with its number of tokens; without what may become a stop string."""
        most = len(self._bytes) - self._half_stop()
        while self._ends and self._ends[0] <= most:
            end = self._ends.popleft()
            self._begun += self._decoder.decode(self._bytes[self._decoded : end])
            self._decoded, self._n_begun = end, self._n_begun + 1
            if not self._decoder.getstate()[0]:
                yield self._begun, self._n_begun
                self._begun, self._n_begun = "", 0

    def rest(self) -> tuple[str, int]:
        """The rest of a text that has ended, behind take(), with its number of tokens.

        Of the tokens of a stop string, only one that text comes from is counted, or the first.
        """
        end = len(self._bytes) if self.end is None else self.end
        text = self._begun + self._decoder.decode(self._bytes[self._decoded : end], final=True)
        n = len(self._ends) if self.end is None else sum(at < end for at in self._ends) + 1
        return text, self._n_begun + min(n, len(self._ends))

    def whole(self) -> str:
        """All of the text."""
        return self._bytes[: self.end].decode("utf-8", "ignore")

    def _half_stop(self) -> int:
        """The bytes at the end that a stop string may begin with."""
        held = len(self._bytes) - self._decoded
        return max((min(s.n, held) for s in self._stops if s.n < len(s.word)), default=0)


class CompletionCall:
    """One completion, by a request of a Batcher. prompt: text or token ids. max_tokens: 0: the prompt alone.

    cuts: those of `stop` after which the last item says that the text is `cut`. sampling: temperature, and
    arguments of llama_cpp.Llama.generate. post_sampling: the logprobs are of what the samplers leave.
    details: as llama.cpp's server tells them. Raises ValueError for a long prompt.
    """

    def __init__(
        self,
        llm: Any,
        prompt: str | list[int],
        *,
        max_tokens: int,
        seed: int,
        stop: Sequence[str] = (),
        cuts: Collection[str] = (),
        logprobs: int | None = None,
        echo: bool = False,
        suffix: str | None = None,
        logit_bias: dict[int, float] | None = None,
        thoughts: Thoughts | None = None,
        post_sampling: bool = False,
        details: bool = False,
        temperature: float = 0.8,
        **sampling: Any,
    ) -> None:
        self._llm, self._text, self._finish = llm, TextOfTokens(stop), "length"
        self._cuts = cuts
        self._details, self._made, self._n_told, self._seed = details, list[int](), 0, seed
        self._ids = _prompt_ids(llm, prompt, suffix)
        if len(self._ids) >= llm.n_ctx():  # in llama-cpp-python's words, as its chat formats say it
            raise ValueError(f"Requested tokens ({len(self._ids)}) exceed context window of {llm.n_ctx()}")
        self._max_tokens = max_tokens
        self._echoed = _text(llm, prompt) if echo else ""
        self._writer = None
        if logprobs is not None:
            # a client counts the tokens that it sends, also one that begins a text
            hidden = llm.token_bos() if isinstance(prompt, str) else -1
            self._writer = Logprobs(llm.detokenize, hidden, 0 if echo else len(prompt))
        echoes = self._writer is not None and echo
        bias = logit_bias or {}
        rows: dict[str, Any] = {
            "n_top": logprobs,
            "echo": echoes,
            "writer": self._writer,
            "post_sampling": post_sampling,
        }
        self._options = CompletionOptions(bias=bias, thoughts=thoughts, **rows)
        self._sampling = {"max_tokens": max_tokens, "temp": temperature, **sampling}
        llm.set_seed(seed)

    def whole(self) -> dict[str, Any]:
        """The answer in the form of llama-cpp-python's, without usage."""
        for _ in self._grow():
            pass
        writer, options = self._writer, self._options
        probs = writer.whole(options.before, options.echo) if writer is not None else None
        return self._item(self._echoed + self._text.whole(), probs, len(self._made), self._finish)

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The answer in chunks. The first is the prompt, if it is echoed, and the last has no text."""
        for _ in self._grow():
            yield from self._echo()
            for text, n in self._text.take():
                yield self._chunk(text, n)
        yield from self._echo()
        text, n = self._text.rest()
        if text or (n and self._writer is not None):
            yield self._chunk(text, n)
        yield self._item("", None, len(self._made) - self._n_told, self._finish)

    def _echo(self) -> Iterator[dict[str, Any]]:
        """A chunk with the prompt, once; its logprobs are known with the first token."""
        if self._echoed:
            report = self._llm.take_report()  # about what the answer's first chunk holds
            probs = self._writer.echo(self._options.before) if self._writer is not None else None
            yield self._item(self._echoed, probs, 0)
            self._llm.give_back_report(report)
            self._echoed = ""

    def _chunk(self, text: str, n: int) -> dict[str, Any]:
        return self._item(text, self._writer.take(n) if self._writer is not None else None, n)

    def _item(self, text: str, probs: Any, n: int, finish: str | None = None) -> dict[str, Any]:
        """A completion, or a chunk of one with n tokens, in llama-cpp-python's form."""
        item: dict[str, Any] = {
            "choices": [{"index": 0, "text": text, "logprobs": probs, "finish_reason": finish}]
        }
        if finish is not None and self._text.word in self._cuts:
            item["choices"][0]["cut"] = True
        if self._details:
            item["details"] = self._about(n, finish)
        return item

    def _about(self, n: int, finish: str | None) -> dict[str, Any]:
        """As llama.cpp's server tells: n more tokens, and at the end how it ended and what was asked."""
        tokens, self._n_told = self._made[self._n_told : self._n_told + n], self._n_told + n
        about = {"tokens": tokens, "n_told": self._n_told, "n_prompt": len(self._ids), "slot": self._llm.slot}
        if finish is None:
            return about
        word, n = self._text.word, len(self._made)
        stop = "limit" if finish == "length" else "word" if word is not None else "eos"
        prompt = self._llm.detokenize(self._ids, special=True).decode("utf-8", "replace")
        return about | {
            "stop_type": stop,
            "stopping_word": word or "",
            "n_made": n,
            "prompt": prompt,
            "has_new_line": "\n" in self._text.whole(),
            "truncated": finish == "length" and n < self._max_tokens,
            "settings": {"seed": self._seed, **self._sampling},
            "bias": self._options.bias,
        }

    def _grow(self) -> Iterator[None]:
        """Adds tokens to the text until it has ended. Yields wherever it may be looked at."""
        n = 0
        if not self._max_tokens:
            self._llm.read(self._ids, self._options)
            return
        with contextlib.closing(self._llm.complete(self._ids, self._options, **self._sampling)) as tokens:
            for token in tokens:
                self._made.append(token)
                if is_end(self._llm, token):
                    self._finish = "stop"
                    break
                n += 1
                whole = self._text.add(self._llm.detokenize([token]))
                if self._text.stopped():  # within a character, too: tokens may never end one
                    break
                if whole:
                    yield
                if n >= self._max_tokens:
                    break
        if self._text.stopped():
            self._finish = "stop"


def complete(llm: Any, prompt: str | list[int], stream: bool, **given: Any) -> Any:
    """A completion, or an iterator of its chunks. given: see CompletionCall."""
    made = CompletionCall(llm, prompt, **given)
    return made.chunks() if stream else made.whole()


def _text(llm: Any, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else llm.detokenize(prompt).decode("utf-8", "ignore")


def _prompt_ids(llm: Any, prompt: str | list[int], suffix: str | None) -> list[int]:
    """The prompt with the tokens that the vocabulary puts around a text. suffix: of a text to fill in."""
    if suffix or (suffix is not None and can_infill(llm)):
        return infill_prompt(llm, prompt, suffix)
    if not isinstance(prompt, str):
        return prompt
    first, last = llm._model.token_cls(), llm._model.token_sep()
    ends = last != -1 or llm._model.add_eos_token()
    first, last = (llm.token_bos() if first == -1 else first), (llm.token_eos() if last == -1 else last)
    begin = [first] if llm._model.add_bos_token() and first != -1 else []
    ids = llm.tokenize(prompt.encode(), add_bos=False, special=True)
    return begin + ids + ([last] if ends else [])
