"""What can go wrong with files, as EagleErrors; and an output that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def cache_dir() -> Path:
    """The folder of models, downloads and builds: EAGLE3_LLAMA_CACHE or ~/.cache/eagle3-llama."""
    return Path(os.environ.get("EAGLE3_LLAMA_CACHE") or Path.home() / ".cache" / "eagle3-llama").expanduser()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError into EagleError BAD_FILE that names `path`."""
    try:
        yield
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot read {path}: {e.strerror or e}") from e


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A sibling temporary path to write to; it becomes `out` on success and is removed on any failure.

    Raises EagleError NO_SPACE when the disk is full, BAD_FILE when `out` cannot be written.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as f:
            os.fsync(f.fileno())
        os.replace(part, out)
    except OSError as e:
        if e.errno in _FULL:
            raise EagleError(
                ErrorKind.NO_SPACE, f"no space left for {out}: free some, or write elsewhere with --out"
            ) from e
        raise EagleError(ErrorKind.BAD_FILE, f"cannot write {out}: {e.strerror or e}") from e
    finally:
        part.unlink(missing_ok=True)


def parse_object(text: bytes, what: str, kind: ErrorKind) -> dict[str, Any]:
    """A JSON object with unique keys; raises EagleError of `kind` that begins with `what`."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise EagleError(kind, f"{what} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise EagleError(kind, f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value
