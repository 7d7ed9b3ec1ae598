"""Compares the tokenizer in a head's file with its target's. A head predicts the target's token ids."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFValueType as T

from ..errors import EagleError
from .files import reading

_SIZES = {T.UINT8: 1, T.INT8: 1, T.BOOL: 1, T.UINT16: 2, T.INT16: 2, T.UINT32: 4, T.INT32: 4, T.FLOAT32: 4}
_SIZES |= {T.UINT64: 8, T.INT64: 8, T.FLOAT64: 8}
_PREFIX = "tokenizer.ggml."
MOST = 24 << 20  # bytes of a file's beginning; a vocabulary of 256,000 tokens has about 5 MB


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """tokenizer.ggml.model, .pre and .tokens of a GGUF file; None for what it does not name."""

    model: str | None = None
    pre: str | None = None
    tokens: bytes | None = None  # as the file has them: of each its length, in 8 bytes, and its text
    n_tokens: int = 0


def read_tokenizer(path: Path) -> Tokenizer:
    """An empty Tokenizer for a damaged file: loading it says more. Raises EagleError if it cannot be read."""
    with reading(path), path.open("rb") as f:
        data = f.read(MOST)
    found: dict[str, Any] = {}
    try:
        for name, value in _values(data):
            found[name] = value
            if len(found) == len(dataclasses.fields(Tokenizer)):
                break  # what follows, such as merges, takes longer to walk through
    except (struct.error, ValueError, KeyError):
        return Tokenizer()
    return Tokenizer(**found)


def difference(target: str | Path, head: str | Path) -> str | None:
    """How the head's tokenizer differs from the target's. None if it does not, or if the files do not say."""
    a, b = read_tokenizer(Path(target)), read_tokenizer(Path(head))
    for name in ("model", "pre"):
        theirs, ours = getattr(a, name), getattr(b, name)
        if theirs is not None and ours is not None and theirs != ours:
            return f"its {_PREFIX}{name} is {ours!r:.40}, the target's is {theirs!r:.40}"
    if a.tokens is not None and b.tokens is not None and a.tokens != b.tokens:
        pairs = zip(_strings(a.tokens, a.n_tokens), _strings(b.tokens, b.n_tokens))
        n = sum(x != y for x, y in pairs) + max(b.n_tokens - a.n_tokens, 0)
        return f"{n:,} of its {b.n_tokens:,} tokens are not the target's {a.n_tokens:,}"
    return None


def warning(target: str, head: str) -> str | None:
    """The warning when `head` is loaded for `target`."""
    try:
        differs = difference(target, head)
    except EagleError:
        return None  # loading them says more
    if differs is None:
        return None
    return (
        f"{head} was made for another tokenizer: {differs}. The text stays right, but few drafts fit: "
        "use a head that was trained for this model"
    )


def _values(data: bytes) -> Iterator[tuple[str, Any]]:
    """(field of Tokenizer, value). Raises what unpacking raises at a wrong length."""
    n_keys, at = struct.unpack_from("<Q", data, 16)[0], 24
    for _ in range(n_keys):
        name, at = _string(data, at)
        kind, at = T(struct.unpack_from("<I", data, at)[0]), at + 4
        key = name.decode("utf-8", "replace")
        if kind is T.STRING:
            value, at = _string(data, at)
            if key in (_PREFIX + "model", _PREFIX + "pre"):
                yield key.removeprefix(_PREFIX), value.decode("utf-8", "replace")
        elif kind is T.ARRAY:
            item, n = struct.unpack_from("<IQ", data, at)
            at += 12
            if T(item) is T.STRING:
                first, at = at, _after_strings(data, at, n)
                if key == _PREFIX + "tokens":
                    yield "tokens", data[first:at]
                    yield "n_tokens", n
            else:
                at += n * _SIZES[T(item)]
        else:
            at += _SIZES[kind]


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    if end > len(data):
        raise ValueError("a string ends after the file")
    return data[at + 8 : end], end


def _after_strings(data: bytes, at: int, n: int) -> int:
    length = struct.Struct("<Q").unpack_from
    for _ in range(n):
        at += 8 + length(data, at)[0]
    if at > len(data):
        raise ValueError("a string ends after the file")
    return at


def _strings(data: bytes, n: int) -> Iterator[bytes]:
    at = 0
    for _ in range(n):
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        yield data[at + 8 : end]
        at = end
