"""File helpers: OSErrors become EagleErrors, and an output file is either complete or not there at all."""

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
    """The folder for models, downloads and builds: EAGLE3_LLAMA_CACHE, or else ~/.cache/eagle3-llama."""
    return Path(os.environ.get("EAGLE3_LLAMA_CACHE") or Path.home() / ".cache" / "eagle3-llama").expanduser()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError into an EagleError of kind BAD_FILE that names `path`."""
    try:
        yield
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot read {path}: {e.strerror or e}") from e


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to.

    On success it is renamed to `out`, on failure it is deleted.
    Raises EagleError: NO_SPACE if the disk is full, BAD_FILE if `out` cannot be written.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # as the umask has it; some writers make a file that only its owner reads
        yield part
        os.chmod(part, mode)
        with part.open("rb+") as f:
            os.fsync(f.fileno())
        os.replace(part, out)
    except OSError as e:
        if e.errno in _FULL:
            raise EagleError(
                ErrorKind.NO_SPACE, f"no space left for {out}: free some space, or choose another --out"
            ) from e
        raise EagleError(ErrorKind.BAD_FILE, f"cannot write {out}: {e.strerror or e}") from e
    finally:
        part.unlink(missing_ok=True)


def parse_object(text: bytes, what: str, kind: ErrorKind) -> dict[str, Any]:
    """Parses a JSON object whose keys are unique. `what` names the text in messages.

    Raises EagleError of kind `kind` for anything else.
    """
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
