"""Lines for the user that are neither a result nor a warning."""

from __future__ import annotations

import contextlib
import sys


def note(line: str) -> None:
    """Prints a line on stderr. Control codes in it, as names from elsewhere may have, are not printed."""
    clean = "".join(c if c.isprintable() else "?" for c in " ".join(line.split()))
    with contextlib.suppress(OSError):  # nobody can read it, as on a full disk
        print(f"[{clean}]", file=sys.stderr, flush=True)
