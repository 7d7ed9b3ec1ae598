"""Bounds of a JSON schema's numbers as GBNF, which llama.cpp's converter passes over.

A bounded number is written without an exponent. In the schema, a constant stands in its place; in the grammar
that the converter makes of it, the rules of the number do.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, NamedTuple

from .marks import Marks

DIGITS = 16  # before and behind the point, as llama.cpp's own rule for numbers has it
_POINT = f'("." [0-9]{{1,{DIGITS}}})'
_KEYS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


class Bound(NamedTuple):
    """strict: the value itself is outside."""

    value: Decimal
    strict: bool = False


def with_numbers(schema: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """A schema of type number with bounds, as the constant that put_numbers() looks for: one of the marks.

    The schema itself if it has no bounds, or some that this file does not write.
    """
    if schema.get("type") != "number" or "enum" in schema or "const" in schema:
        return schema
    values = [schema.get(key) for key in _KEYS]
    given = [v for v in values if v is not None]
    if not given or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in given):
        return schema
    exact = {repr(v): Decimal(repr(v)) for v in given}
    if any(len(part) > DIGITS for v in exact.values() for part in _parts(abs(v))):
        return schema
    # with 0 added, a negative zero is none
    least, over, most, under = (None if v is None else exact[repr(v)] + 0 for v in values)
    lows = [Bound(v, strict) for v, strict in ((least, False), (over, True)) if v is not None]
    highs = [Bound(v, strict) for v, strict in ((most, False), (under, True)) if v is not None]
    low = max(lows, default=None)
    high = min(highs, key=lambda b: (b.value, not b.strict), default=None)
    if not _grammar("", low, high):
        return schema
    other = {k: v for k, v in schema.items() if k not in _KEYS}
    return {**other, "const": f"{marks.word}:{_text(low)}:{_text(high)}"}


def put_numbers(grammar: str, marks: Marks) -> str:
    """A grammar with the rules of the numbers in the place of their constants."""
    constant = re.compile(rf'"\\"{marks.word}:([^:"]*):([^:"]*)\\""')
    found = dict.fromkeys(constant.findall(grammar))
    names = {mark: f"bounded-{marks.word}-{i}" for i, mark in enumerate(found)}
    lines = [line for mark, name in names.items() for line in _grammar(name, *map(_bound, mark))]
    text = constant.sub(lambda found: names[found.group(1), found.group(2)], grammar)
    return "\n".join([text.rstrip("\n"), *lines, ""]) if lines else grammar


def _text(bound: Bound | None) -> str:
    return "" if bound is None else f"{'x' if bound.strict else ''}{bound.value:f}"


def _bound(text: str) -> Bound | None:
    return Bound(Decimal(text.removeprefix("x")), text.startswith("x")) if text else None


def _grammar(name: str, low: Bound | None, high: Bound | None) -> list[str]:
    """The rules of the numbers between two bounds; none if there is no such number."""
    flipped = lambda bound: bound and Bound(-bound.value, bound.strict)
    above = _Digits(f"{name}-p", max(low or Bound(Decimal(0)), Bound(Decimal(0))), high)
    below = _Digits(
        f"{name}-n", max(flipped(high) or Bound(Decimal(0), True), Bound(Decimal(0), True)), flipped(low)
    )
    parts = [*above.numbers(), *(f'"-" ({text})' for text in below.numbers())]
    return [f"{name} ::= {' | '.join(parts)}", *above.lines, *below.lines] if parts else []


class _Digits:
    """The rules of the numbers from `low` on, which is not negative, up to `high`.

    Digit by digit: as long as all digits are those of a bound, the next one is bound by it.
    """

    def __init__(self, name: str, low: Bound, high: Bound | None) -> None:
        self.name, self.low, self.high, self.lines = name, low, high, list[str]()
        self._made: dict[tuple[int, int, bool, bool], str | None] = {}

    def numbers(self) -> list[str]:
        """Alternatives by the number of digits before the point; [] if no number is between the bounds."""
        if self.high is not None and self.high.value < 0:
            return []
        first = len(_parts(self.low.value)[0])
        last = DIGITS if self.high is None else len(_parts(self.high.value)[0])
        bound = {first, *([] if self.high is None else [last])}
        found = [
            self._from(n, 0, n == first, self.high is not None and n == last)
            for n in sorted(bound)
            if n <= last
        ]
        if (most := last - (self.high is not None)) > first:
            found.append(f"[1-9] [0-9]{{{first},{most - 1}}} {_POINT}?")
        return [text for text in found if text is not None]

    def _from(self, n: int, at: int, low: bool, high: bool) -> str | None:
        """What may follow `at` digits of a number with n before its point. None: nothing, not even its end.

        low, high: the digits so far are those of this bound.
        """
        low = low and (self.low.strict or _rest(self.low, at))  # else whatever follows is not below it
        if not low and not high:
            return _free(n, at)
        if high and not low and at >= n and self.high and not self.high.strict and not _rest(self.high, at):
            return f'("." [0]{{1,{DIGITS}}})?' if at == n else f"[0]{{0,{n + DIGITS - at}}}"
        key = n, at, low, high
        if key not in self._made:
            self._made[key] = None
            ends, ways = at >= n and self._may_end(n, at, low, high), self._ways(n, at, low, high)
            if ends or ways:
                self._made[key] = name = f"{self.name}-{n}-{at}{'-l' * low}{'-h' * high}"
                text = " | ".join(ways)
                self.lines.append(f"{name} ::= {f'({text})?' if ends and ways else text or chr(34) * 2}")
        return self._made[key]

    def _ways(self, n: int, at: int, low: bool, high: bool) -> list[str]:
        if at >= n + DIGITS:
            return []
        least = _digit(self.low, n, at) if low else int(at == 0 and n > 1)
        most = _digit(self.high, n, at) if high and self.high is not None else 9
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for digit in range(least, most + 1):
            kinds.setdefault((low and digit == least, high and digit == most), []).append(digit)
        point = '"." ' if at == n else ""
        after = {kind: self._from(n, at + 1, *kind) for kind in kinds}
        return [
            f"{point}[{ds[0]}-{ds[-1]}] {after[kind]}"
            for kind, ds in kinds.items()
            if after[kind] is not None
        ]

    def _may_end(self, n: int, at: int, low: bool, high: bool) -> bool:
        """True if the digits so far are a number between the bounds."""
        if low:  # and it is strict, or has further digits
            return False
        return not (high and self.high is not None and self.high.strict and not _rest(self.high, at))


def _free(n: int, at: int) -> str:
    """Any digits after `at` of them, of which n are before the point."""
    if at <= n:
        first = "[1-9] " if at == 0 and n > 1 else ""
        left = n - at - bool(first)
        return f"{first}{f'[0-9]{{{left}}} ' if left else ''}{_POINT}?"
    left = n + DIGITS - at
    return f"[0-9]{{0,{left}}}" if left else '""'


def _parts(value: Decimal) -> tuple[str, str]:
    whole, _, rest = f"{value:f}".partition(".")
    return whole.lstrip("0") or "0", rest.rstrip("0")


def _rest(bound: Bound, at: int) -> bool:
    """True if a bound has digits other than 0 after `at` of them."""
    return bool("".join(_parts(bound.value))[at:].strip("0"))


def _digit(bound: Bound, n: int, at: int) -> int:
    """The digit of a bound, whose digits before the point are n."""
    whole, rest = _parts(bound.value)
    return int(whole[at] if at < n else rest[at - n] if at - n < len(rest) else "0")
