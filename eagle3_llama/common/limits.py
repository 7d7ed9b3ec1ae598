"""Limits of a round, as eagle3.h has them. Reading them loads no native code.

The header is in lib/ of an installed package, and in native/include of a checkout.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import EagleError, ErrorKind

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "lib" / "eagle3.h", _PACKAGE.parent / "native" / "include" / "eagle3.h")


def _read_limit(name: str) -> int:
    for path in _PLACES:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if found := re.search(rf"^ *EAGLE3_MAX_{name} *= *(\d+),", text, re.MULTILINE):
                return int(found[1])
    raise EagleError(ErrorKind.LIBRARY, f"no eagle3.h with EAGLE3_MAX_{name}: reinstall eagle3-llama")


MAX_ROWS = _read_limit("ROWS")  # in a round: the most whose bits do not depend on how many there are
MAX_DRAFT = _read_limit("DRAFT")  # draft tokens of a slot: the sampled token needs a row, too
MAX_WIDTH = _read_limit("WIDTH")  # children of a node
