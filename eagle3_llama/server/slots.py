"""Slots saved to files and restored, as llama.cpp's server does it; here with the head's state."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from ..common.files import replacing
from ..errors import EagleError, ErrorKind
from .errors import ApiError

MAX_FILES = 10_000  # in the folder, however small

_writing = threading.Lock()  # two files of one name share their temporary one


def save(limit: int, batcher: Any, folder: str, slot: int, filename: str) -> dict[str, Any]:
    """Writes a slot's state; the file appears whole or not at all. Raises ApiError 507 if the folder would hold more than `limit` bytes."""
    started = time.perf_counter()
    n_saved = next((s["n_past"] for s in batcher.slots() if s["id"] == slot), 0)
    data = batcher.save_slot(slot)
    try:
        with _writing:
            _check_room(Path(folder), limit, filename, len(data))
            with replacing(Path(folder) / filename) as part:
                part.write_bytes(data)
    except EagleError as e:  # its line names the server's folder
        full = ": the disk is full" if e.kind is ErrorKind.NO_SPACE else ""
        raise ApiError(507, f"{filename} cannot be written here{full}", code=e.kind.value) from e
    return {
        "id_slot": slot,
        "filename": filename,
        "n_saved": n_saved,
        "n_written": len(data),
        "timings": {"save_ms": _ms(started)},
    }


def _check_room(folder: Path, limit: int, filename: str, size: int) -> None:
    sizes = [
        entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder) if entry.name != filename
    ]
    if sum(sizes) + size > limit or len(sizes) >= MAX_FILES:
        said = f"{filename} would have {size} bytes; the {len(sizes)} other files have {sum(sizes)} of the {limit} bytes, or {MAX_FILES} files, allowed"
        raise ApiError(507, said, "filename", "slot_files_full")


def restore(batcher: Any, folder: str, slot: int, filename: str) -> dict[str, Any]:
    """Reads a slot's state; ApiError 404 for no such file, EagleError BAD_VALUE for a damaged or foreign one."""
    started = time.perf_counter()
    data = _read(Path(folder) / filename)
    n = batcher.load_slot(slot, data)
    return {
        "id_slot": slot,
        "filename": filename,
        "n_restored": n,
        "n_read": len(data),
        "timings": {"restore_ms": _ms(started)},
    }


def _read(path: Path) -> bytes:
    """A regular file's bytes: no link out of the folder is followed, and no pipe waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ApiError(404, f"there is no file {path.name}", "filename", "no_such_file") from None
    except OSError as e:
        raise ApiError(400, f"cannot read {path.name}: {e.strerror}", "filename", "bad_file") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ApiError(400, f"{path.name} is no regular file", "filename", "bad_file")
    with open(fd, "rb") as f:
        return f.read()


def _ms(started: float) -> float:
    return round(1000 * (time.perf_counter() - started), 3)
