"""The bytes of tokens, with a cache: a completion detokenizes its whole text at every token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

KEPT = 64  # tokens from which on a text is kept; shorter ones take no time

BytesOf = Callable[[int, bool], bytes]  # (token, special) -> its bytes


def bytes_of(model: Any) -> BytesOf:
    """The bytes of a token of llama-cpp-python's model object, which are kept."""
    return functools.lru_cache(maxsize=1 << 16)(
        lambda token, special: model.detokenize([token], special=special)
    )


class TokenBytes:
    """Same as the detokenize() of llama-cpp-python's model object. bos: the token that begins a text.

    Of a text that grows, only the new tokens are looked up. shown: special tokens that are written out even
    where the others are not.
    """

    def __init__(self, bytes_of: BytesOf, bos: int) -> None:
        self._bytes_of = bytes_of
        self._bos = bos
        self.shown: frozenset[int] = frozenset()
        # set at once, because several threads may detokenize
        self._kept: dict[bool, tuple[list[int], bytes]] = {}

    def __call__(self, tokens: Sequence[int], special: bool) -> bytes:
        tokens = list(tokens)
        text, out = self._kept.get(special, ([], b""))
        n = len(text)
        if not n or tokens[:n] != text:
            n = 0
            out = b""
        out += b"".join([self._bytes_of(token, special or token in self.shown) for token in tokens[n:]])
        if len(tokens) >= KEPT:
            self._kept[special] = tokens, out
        return out[1:] if tokens and tokens[0] == self._bos and out[:1] == b" " else out
