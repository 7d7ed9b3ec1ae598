"""Regular expressions of schemas, in the terms of llama.cpp's converter, which knows fewer.

It puts a pattern between the quotes of a JSON string as it stands. So classes are written out, what is not
anchored gets any characters around it, and each character is what JSON writes: a quote has a backslash, and
does not end the string. What is allowed then are the strings that the pattern matches, each in JSON's
shortest form, but for control characters that have no short form. Between tags there are no quotes: there the
same text is GBNF, and each character is itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_REPEATED, DEEPEST = 1000, 40
Ranges = list[tuple[int, int]]  # of code points, in order, both ends included

_LAST = 0x10FFFF
_DIGIT: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_LINES: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, _LAST)]  # what JSON writes as it is
_BARE: Ranges = [(9, 10), (13, 13), (0x20, 0x7E), (0x80, _LAST)]  # of texts between tags
_ESCAPED = {0x22: '"', 0x5C: "\\\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_COUNT = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")


class Unsupported(ValueError):
    """What this file does not write: lookarounds, references, anchors inside, and whatever is no pattern."""


def written(pattern: str, least: int = 0, most: int | None = None) -> str:
    """The pattern of the JSON texts of all strings that the pattern matches. Raises Unsupported.

    least, most: lengths of the strings, only for a pattern that repeats one class of characters.
    """
    return f"^{_expression(pattern, least, most, _class)}$"


def between_tags(pattern: str, close: str, least: int = 0, most: int | None = None) -> str:
    """The GBNF of the strings that written() allows, as they are. Raises Unsupported.

    close: what the tag behind them begins with. Its first character is none of those that a class stands for,
    and the pattern must not name it.
    """
    return _expression(pattern, least, most, lambda ranges: _bare(ranges, ord(close[0])))


def counted_between_tags(least: int, most: int | None, close: str, prefix: str) -> dict[str, str]:
    """GBNF rules of texts of some length, the first for the whole. None has `close`, two characters.

    prefix: what the names of the rules begin with.
    """
    a, b = (ord(c) for c in close)
    after_s, after_t = _without([(a, a)]), _without([(a, a), (b, b)])
    classes = {f"{prefix}-s": after_s, f"{prefix}-t": after_t, f"{prefix}-first": [(a, a)]}
    name = lambda state, low, high: f"{prefix}-{'any' if high is None else high}-{low}-{state}"
    rules: dict[str, str] = {}
    low, high = least, most
    while True:
        after = max(low - 1, 0), None if high is None else high - 1
        for state in "st":
            ways = [] if low else ['""']
            if high != 0:
                ways += [f"{prefix}-{state} {name('s', *after)}", f"{prefix}-first {name('t', *after)}"]
            rules[name(state, low, high)] = " | ".join(ways)
        if high == 0 or after == (low, high):
            return rules | {rule: _brackets(_both(_BARE, ranges)) for rule, ranges in classes.items()}
        low, high = after


def _expression(pattern: str, least: int, most: int | None, write: Callable[[Ranges], str]) -> str:
    parser = _Parser(pattern, write)
    branches = parser.alternatives(0)
    if parser.at < len(pattern):
        raise Unsupported("unbalanced parentheses")
    if least or most is not None:
        return _counted(branches, least, most)
    every = write([(0, _LAST)])
    whole = [
        "".join(["" if b.begins else f"{every}*", *b.items, "" if b.ends else f"{every}*"]) for b in branches
    ]
    return f"({'|'.join(whole)})"


class _Branch:
    """One alternative. items: what it consists of, as the converter takes it. only: (class, least, most)."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.begins = self.ends = False
        self.only: tuple[str, int, int | None] | None = None


def _counted(branches: list[_Branch], least: int, most: int | None) -> str:
    """A single class with its own counts and those of the lengths."""
    [branch] = branches if len(branches) == 1 else [_Branch()]
    if branch.only is None or len(branch.items) != 1 or not (branch.begins and branch.ends):
        raise Unsupported("its lengths beside it")
    what, low, high = branch.only
    highs = [n for n in (high, most) if n is not None]
    return what + _count(max(low, least), min(highs, default=None))


def _count(least: int, most: int | None) -> str:
    if least > MOST_REPEATED or (most or 0) > MOST_REPEATED or (most is not None and most < least):
        raise Unsupported("its counts")
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most)) or (
        f"{{{least},{'' if most is None else most}}}"
    )


class _Parser:
    """write: one of some characters, as text of a grammar."""

    def __init__(self, text: str, write: Callable[[Ranges], str]) -> None:
        self.text, self.at, self._write = text, 0, write

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise Unsupported("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _takes(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def alternatives(self, depth: int) -> list[_Branch]:
        """Up to the end of the pattern, or of a group."""
        if depth > DEEPEST:
            raise Unsupported("its depth")
        out = [self._branch(depth)]
        while self._takes("|"):
            out.append(self._branch(depth))
        return out

    def _branch(self, depth: int) -> _Branch:
        out = _Branch()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if self._takes("^"):
                if depth or out.items or out.begins:
                    raise Unsupported("an anchor inside it")
                out.begins = True
            elif self._takes("$"):
                if depth or (self.at < len(self.text) and self.text[self.at] != "|"):
                    raise Unsupported("an anchor inside it")
                out.ends = True
            else:
                self._item(out, depth)
        if depth and not out.items:
            raise Unsupported("an empty alternative")
        return out

    def _item(self, out: _Branch, depth: int) -> None:
        what, is_one = self._group(depth) if self._takes("(") else (self._write(self._character()), True)
        least, most = self._repeated()
        out.only = (what, least, most) if is_one else None
        if most != 0:
            out.items.append(what if (least, most) == (1, 1) else what + _count(least, most))

    def _group(self, depth: int) -> tuple[str, bool]:
        """A group, and whether each of its texts is one character."""
        if self._takes("?") and not self._takes(":"):
            name = re.compile(r"<\w+>").match(self.text, self.at)
            if name is None:
                raise Unsupported("a group of this kind")
            self.at = name.end()
        inner = self.alternatives(depth + 1)
        if self._next() != ")":
            raise Unsupported("unbalanced parentheses")
        is_one = all(len(b.items) == 1 and b.only and b.only[1:] == (1, 1) for b in inner)
        return f"({'|'.join(''.join(b.items) for b in inner)})", is_one

    def _repeated(self) -> tuple[int, int | None]:
        counts: tuple[int, int | None] = (1, 1)
        for sign, found in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                counts = found
                break
        else:
            if found_count := _COUNT.match(self.text, self.at):
                self.at = found_count.end()
                least, comma, most = found_count.groups()
                counts = int(least), (int(most) if most else None) if comma else int(least)
        if counts != (1, 1) and self._takes("?"):
            pass  # whether it takes few or many changes no set of strings
        if self.at < len(self.text) and self.text[self.at] in "*+?{":
            raise Unsupported("what is repeated")
        return counts

    def _character(self) -> Ranges:
        """The characters that the next atom stands for."""
        c = self._next()
        if c == ".":
            return _without(_LINES)
        if c == "[":
            return self._set()
        if c == "\\":
            return self._escaped()
        if c in "*+?{}]":
            raise Unsupported(f"{c} here")
        return [(ord(c), ord(c))]

    def _escaped(self, inside: bool = False) -> Ranges:
        c = self._next()
        if c.lower() in _CLASSES:
            return _CLASSES[c] if c.islower() else _without(_CLASSES[c.lower()])
        if c in _CONTROL or (c == "b" and inside):
            code = _CONTROL.get(c, 8)
        elif c in "xu":
            digits = self.text[self.at : self.at + (2 if c == "x" else 4)]
            if not re.fullmatch(r"[0-9a-fA-F]{2}|[0-9a-fA-F]{4}", digits):
                raise Unsupported(f"\\{c} here")
            self.at += len(digits)
            code = int(digits, 16)
        elif c.isalnum():
            raise Unsupported(f"\\{c}")
        else:
            code = ord(c)
        return [(code, code)]

    def _set(self) -> Ranges:
        """The characters between brackets."""
        negated, found = self._takes("^"), list[tuple[int, int]]()
        while not self._takes("]"):
            first = self._of_set()
            if (
                _is_one(first)
                and self.text.startswith("-", self.at)
                and not self.text.startswith("-]", self.at)
            ):
                self.at += 1
                last = self._of_set()
                if not _is_one(last):  # the hyphen is one of the characters
                    first = [*first, (45, 45), *last]
                elif last < first:
                    raise Unsupported("a range from high to low")
                else:
                    first = [(first[0][0], last[0][1])]
            found += first
        if not found:
            raise Unsupported("an empty class")
        return _without(found) if negated else found

    def _of_set(self) -> Ranges:
        c = self._next()
        return self._escaped(inside=True) if c == "\\" else [(ord(c), ord(c))]


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _without(ranges: Ranges) -> Ranges:
    """All other characters."""
    out, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            out.append((at, low - 1))
        at = max(at, high + 1)
    return [*out, (at, _LAST)] if at <= _LAST else out


def _class(ranges: Ranges) -> str:
    """One of these characters, as JSON writes it: as it is, or with a backslash."""
    plain = _both(ranges, _PLAIN)
    parts = [_brackets(plain)] if plain else []
    short = [f"\\\\{text}" for code, text in _ESCAPED.items() if any(a <= code <= b for a, b in ranges)]
    if not parts and not short:
        raise Unsupported("a character that JSON has no short form for")
    return parts[0] if not short else f"({'|'.join([*parts, *short])})"


def _bare(ranges: Ranges, end: int) -> str:
    """One of these characters, as it is. end: a character that only a single one stands for."""
    if ranges == [(end, end)]:
        raise Unsupported("the character that the closing tag begins with")
    found = _both(ranges, _both(_BARE, _without([(end, end)])))
    if not found:
        raise Unsupported("a character that is not written between tags")
    return _brackets(found)


def _both(some: Ranges, others: Ranges) -> Ranges:
    return sorted((max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) <= min(b, d))


def _brackets(ranges: Ranges) -> str:
    name = lambda code: chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08X}"
    return f"[{''.join(name(a) if a == b else f'{name(a)}-{name(b)}' for a, b in ranges)}]"
