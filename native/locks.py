"""Locks of folders that processes share. A lock ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """One process at a time. waiting: what to say where another one has the lock."""
    with path.open("w") as file:
        if not take(file):
            if waiting:
                print(f"eagle3-llama: {waiting}", file=sys.stderr, flush=True)
            while not take(file):
                time.sleep(0.5)
        yield


def take(file: IO[str]) -> bool:
    """Locks an open file for this process. False if another one has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
