"""Log probabilities without rows of logits: each row is reduced to a few numbers at once.

llama-cpp-python keeps a row of n_vocab logits for each token. When the text has ended, it sorts each row in
Python. For 2,000 tokens and a vocabulary of 49,152 that takes 400 MB, and minutes. Here, only
the most likely tokens of a row and the token that followed are kept. OpenAI's object is written from these.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime.binding import Llama


class TopRow(NamedTuple):
    """The kept part of a row. ids, values: the most likely tokens, in order, and their log probabilities."""

    token: int  # that followed
    value: float  # its log probability
    ids: np.ndarray  # int32 [n]
    values: np.ndarray  # float32 [n]


def top_row(logits: np.ndarray, token: int, n: int) -> TopRow:
    """Reduces logits, float32 [n_vocab], to the n most likely tokens. Of equals, the larger id is first."""
    values = Llama.logits_to_logprobs(logits)
    ids = likeliest(values, None, n)
    return TopRow(token, float(values[token]), ids.astype(np.int32), values[ids])


def likeliest(values: np.ndarray, ids: np.ndarray | None, n: int) -> np.ndarray:
    """Places of the n largest of values [m], in order. Of equals, the larger of ids, or place, is first."""
    n = min(n, len(values))
    if n <= 0:
        return np.empty(0, np.intp)
    near = np.flatnonzero(values >= np.partition(values, -n)[-n])
    return near[np.lexsort((near if ids is None else ids[near], values[near]))[::-1][:n]]


class TokenText(str):
    """The text of a token in `tokens`, with what the object of a completion has no room for.

    A token that is a part of a character has no text, and several of them have the same. A chat names the
    bytes of each.
    """

    id: int
    raw: bytes  # the token's
    # (id, text, bytes, log probability) of the most likely
    top: Callable[[], list[tuple[int, str, bytes, float]]]


class Logprobs:
    """Writes the `logprobs` of one completion, whole or chunk by chunk. detokenize: bytes of token ids.

    rows: those of the tokens that are not written yet; the generation appends to it. The token bos is left
    out, as in llama-cpp-python.
    """

    def __init__(self, detokenize: Callable[[list[int]], bytes], bos: int, offset: int) -> None:
        self._detokenize = detokenize
        self._bos = bos
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(
            "ignore"
        )  # a character may be split over tokens
        self._bytes: dict[int, bytes] = {}
        self.rows: list[TopRow] = []

    def whole(self, first: Sequence[TopRow] = (), echo: bool = False) -> dict[str, Any]:
        """Writes all rows, after those of `first`, which belong to an echoed prompt."""
        rows, self.rows = [*first, *self.rows], []
        out = self._write(rows)
        return _without_first(out) if echo else out

    def echo(self, first: Sequence[TopRow]) -> dict[str, Any]:
        """Writes the rows of an echoed prompt, before chunk() or take() writes those of the answer."""
        return _without_first(self._write(first))

    def take(self, n: int) -> dict[str, Any] | None:
        """Writes the rows of the next n tokens; None if there are none."""
        rows, self.rows = self.rows[:n], self.rows[n:]
        return self._write(rows) if rows else None

    def chunk(self, text: str) -> dict[str, Any] | None:
        """Writes the rows of the tokens of a chunk's text: at least one, if there is one."""
        size = len(text.encode())
        n = 0
        while n < len(self.rows) and (n == 0 or size > 0):
            size -= len(self._raw(self.rows[n].token))
            n += 1
        return self.take(n)

    def _raw(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._detokenize([token])
        return self._bytes[token]

    def _text(self, token: int) -> str:
        return self._raw(token).decode("utf-8", "ignore")

    def _token(self, row: TopRow) -> TokenText:
        token = TokenText(self._text(row.token))
        token.id, token.raw = row.token, self._raw(row.token)
        token.top = lambda: [
            (i, self._text(i), self._raw(i), value) for i, value in zip(row.ids.tolist(), row.values.tolist())
        ]
        return token

    def _write(self, rows: Sequence[TopRow]) -> dict[str, Any]:
        out: dict[str, Any] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
        for row in rows:
            if row.token != self._bos:
                text = self._token(row)
                top = dict(zip(map(self._text, row.ids.tolist()), row.values.tolist()))
                top[str(text)] = row.value
                for name, value in zip(out, (text, self._offset, row.value, top)):
                    out[name].append(value)
            self._offset += len(self._decoder.decode(self._raw(row.token)))
        return out


def _without_first(logprobs: dict[str, Any]) -> dict[str, Any]:
    """OpenAI gives null for the first token of an echoed prompt, even after a BOS."""
    if logprobs["tokens"]:
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
    return logprobs
