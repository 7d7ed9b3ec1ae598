"""What a grammar's text asks for, character by character: to find places where no token could follow.

There llama.cpp samples a token that the grammar forbids and then aborts the process (llama-grammar.cpp, accept_impl), so such
a grammar must not get as far. A place leads nowhere exactly if some class of characters, or a token, is out of the
vocabulary's reach: any other can be had byte by byte, or as the token that it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Ranges = list[tuple[int, int]]  # inclusive, ascending, not touching

EVERY: Ranges = [(1, 0x10FFFF)]  # 0 ends strings in llama.cpp
_PIECE = re.compile(r'#[^\r\n]*|"((?:\\.|[^"\\])*)"|\[((?:\\.|[^\]\\])*)\]|!?<[^>]*>', re.DOTALL)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", re.DOTALL)
_ESCAPES = {"t": 9, "n": 10, "r": 13}


def terminals(text: str) -> Iterator[tuple[str, Ranges | None]]:
    """(as it is written, the characters it stands for) of each character, class and token in a grammar that llama.cpp can read.

    Of a token, <...> or !<...>, the characters are None.
    """
    for piece in _PIECE.finditer(text):
        said = piece[0]
        if said[0] == "#":
            continue
        if piece[1] is not None:
            for c in _CHARACTER.findall(piece[1]):
                yield c, [(_code(c), _code(c))]
        elif piece[2] is not None:
            if piece[2] not in ("", "^"):  # llama.cpp reads these as nothing at all
                yield said, _class(piece[2])
        else:
            yield said, None


def meets(a: Ranges, b: Ranges) -> bool:
    """Whether two sets of characters have one in common."""
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
    """Ranges in any order, as they should be."""
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


def complement(ranges: Ranges) -> Ranges:
    """All characters but these."""
    out, start = [], EVERY[0][0]
    for low, high in ranges:
        if start < low:
            out.append((start, low - 1))
        start = max(start, high + 1)
    return [
        (low, min(high, EVERY[0][1]))
        for low, high in [*out, (start, EVERY[0][1])]
        if low <= min(high, EVERY[0][1])
    ]
