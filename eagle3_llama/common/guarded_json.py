"""JSON that a client or a model has written. Whatever it is, reading it fails with a ValueError alone."""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 256  # levels: Python's own limit depends on where the text is read, and where it is written again


def read_json(text: str | bytes, strict: bool = True) -> Any:
    """The value of a JSON text. strict: control characters in strings are refused.

    Raises ValueError for what is no JSON, nests deeper than DEEPEST levels, or has a number that is not
    finite or has more digits than Python reads. So the value can be written as JSON again.
    """
    try:
        value = json.loads(text, strict=strict, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"it nests deeper than {DEEPEST} levels")


def _inside(outer: dict[str, Any] | list[Any]) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("it has a number that is too large")
    return number
