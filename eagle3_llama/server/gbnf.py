"""Reads the characters, classes and tokens in a GBNF grammar, to find those that no token can match.

Where a grammar allows no token, llama.cpp samples a token that the grammar forbids and then aborts the
process (llama-grammar.cpp, accept_impl). So the server must refuse such a grammar. A grammar can reach such
a place only if the vocabulary cannot produce one of its character classes or tokens: all others can be
produced byte by byte, or as the token itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Ranges = list[tuple[int, int]]  # inclusive, ascending, not touching

EVERY: Ranges = [(1, 0x10FFFF)]  # without 0, which ends strings in llama.cpp
_PIECE = re.compile(r'#[^\r\n]*|"((?:\\.|[^"\\])*)"|\[((?:\\.|[^\]\\])*)\]|!?<[^>]*>', re.DOTALL)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", re.DOTALL)
_ESCAPES = {"t": 9, "n": 10, "r": 13}


def terminals(text: str) -> Iterator[tuple[str, Ranges | None]]:
    """Yields (text, characters) for each character, character class and token in a grammar.

    text: as the grammar has it. characters: those that it matches; None for a token, <...> or !<...>. The
    grammar must be one that llama.cpp can parse.
    """
    for piece in _PIECE.finditer(text):
        said = piece[0]
        if said[0] == "#":
            continue
        if piece[1] is not None:
            for c in _CHARACTER.findall(piece[1]):
                yield c, [(_code(c), _code(c))]
        elif piece[2] is not None:
            if piece[2] not in ("", "^"):  # llama.cpp ignores these two
                yield said, _class(piece[2])
        else:
            yield said, None


def meets(a: Ranges, b: Ranges) -> bool:
    """Whether two sets of characters have a character in common."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][0] <= b[j][1] and b[j][0] <= a[i][1]:
            return True
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return False


def _code(c: str) -> int:
    if len(c) > 2:
        return int(c[2:], 16)
    return _ESCAPES.get(c[1], ord(c[1])) if len(c) == 2 else ord(c)


def _class(text: str) -> Ranges:
    found, out = text[0] == "^", []
    parts, i = _CHARACTER.findall(text[1:] if found else text), 0
    while i < len(parts):
        is_range = i + 2 < len(parts) and parts[i + 1] == "-"
        low, high = _code(parts[i]), _code(parts[i + 2] if is_range else parts[i])
        if low <= high:
            out.append((low, high))
        i += 3 if is_range else 1
    merged = merge(out)
    return complement(merged) if found else merged


def merge(ranges: Ranges) -> Ranges:
    """Ranges in any order as sorted ranges that do not touch."""
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    out, (start, end) = [], EVERY[0]
    for low, high in ranges:
        if start < low:
            out.append((start, low - 1))
        start = max(start, high + 1)
    return [(low, min(high, end)) for low, high in [*out, (start, end)] if low <= min(high, end)]
