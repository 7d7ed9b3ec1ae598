"""The sizes of a text memory, a prompt cache and a store of responses, as users give them."""

from __future__ import annotations

import re
from typing import Any

from ..errors import EagleError, ErrorKind

LEAST_SIZE = 1 << 16  # bytes; native/src/text/text_memory.hpp
MOST_SIZE = 1 << 40
PROMPT_CACHE = 1 << 30  # bytes that a prompt cache may have if nobody says otherwise
RESPONSE_STORE = 1 << 26  # bytes of the server's stored responses if nobody says otherwise
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(given: int | str, name: str = "text_memory") -> int:
    """Bytes, from a number or from a text such as 64M (K, M, G: powers of 1,024). 0: no memory.

    name: what the size is of, for the error.

    Raises EagleError BAD_ARGUMENT.
    """
    size: Any = given
    if isinstance(given, str) and (match := re.fullmatch(r"\s*(\d{1,15})\s*([KMG]?)(i?B)?\s*", given, re.I)):
        size = int(match[1]) << _UNITS[match[2].upper()]
    if type(size) is not int or not (size == 0 or LEAST_SIZE <= size <= MOST_SIZE):
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"{name} is {given!r:.40}, expected 0, or bytes from {LEAST_SIZE:,} on, such as 64M",
        )
    return size


def check_memory(size: int, prompts: bool, text: bool, draft_model: Any = None) -> None:
    """Raises EagleError BAD_ARGUMENT for a text memory that no draft would be made from."""
    why = "text=False" if not text else "draft_model makes all drafts" if draft_model is not None else None
    if size and why:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"text_memory has no effect, because {why}: leave one out")
    if prompts and not size:
        raise EagleError(ErrorKind.BAD_ARGUMENT, "text_memory_prompts needs a text_memory, such as 64M")
