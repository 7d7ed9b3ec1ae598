"""Saves slots to files, restores and erases them, as llama.cpp's server does, including the head's state."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from ...common.files import remove_stale, replacing
from ...errors import EagleError, ErrorKind
from ..errors import ApiError
from ..jobs.work_queue import busy

MAX_FILES = 10_000  # in the folder
OWNER_ALONE = 0o600  # the mode of a file, which has what clients have written

STALE = 3600.0  # seconds: no slot takes so long to write

_writing = threading.Lock()  # two writers would each find room for one


def save(limit: int, batcher: Any, folder: str, slot: int, filename: str, client: str) -> dict[str, Any]:
    """Writes a slot's state to a file, whole or not at all.

    Raises ApiError 507 if the folder would then hold more than `limit` bytes, or if the disk is full.
    """
    started = time.perf_counter()
    n_saved = next((s["n_past"] for s in batcher.slots() if s["id"] == slot), 0)
    data = batcher.save_slot(slot, client)
    try:
        with _writing:
            _check_room(Path(folder), limit, filename, len(data))
            with replacing(Path(folder) / filename, OWNER_ALONE) as part:
                part.write_bytes(data)
    except EagleError as e:  # clients do not get its message, which names the server's folder
        full = ": the disk is full" if e.kind is ErrorKind.NO_SPACE else ""
        raise ApiError(507, f"cannot write {filename}{full}", code=e.kind.value) from e
    counts = {"n_saved": n_saved, "n_written": len(data)}
    return {"id_slot": slot, "filename": filename, **counts, "timings": {"save_ms": _ms(started)}}


def _check_room(folder: Path, limit: int, filename: str, size: int) -> None:
    remove_stale(folder, STALE)  # left by a server that was killed, they would take room for ever
    with os.scandir(folder) as entries:
        others = [entry for entry in entries if entry.name != filename]
    used = 0
    for entry in others:
        with contextlib.suppress(FileNotFoundError):  # somebody has made room meanwhile
            used += entry.stat(follow_symlinks=False).st_size
    if used + size > limit or len(others) >= MAX_FILES:
        message = f"no room for {filename} of {size} bytes: {len(others)} other files have {used} bytes"
        limits = f"the limits are {MAX_FILES} files and {limit} bytes"
        raise ApiError(507, f"{message}; {limits}", "filename", "slot_files_full")


def restore(batcher: Any, folder: str, slot: int, filename: str, client: str) -> dict[str, Any]:
    """Restores a slot's state from a file.

    Raises ApiError 404 if there is no such file, EagleError BAD_VALUE if it is damaged or of another model.
    """
    started = time.perf_counter()
    data = _read(Path(folder) / filename)
    counts = {"n_restored": batcher.load_slot(slot, data, client), "n_read": len(data)}
    return {"id_slot": slot, "filename": filename, **counts, "timings": {"restore_ms": _ms(started)}}


def erase(batcher: Any, slot: int) -> dict[str, Any]:
    """Empties a slot."""
    return {"id_slot": slot, "n_erased": batcher.erase_slot(slot)}


def _read(path: Path) -> bytes:
    """The bytes of a regular file. Does not follow links, which may leave the folder, or wait for pipes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ApiError(404, f"there is no file {path.name}", "filename", "no_such_file") from None
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):  # no more file descriptors
            raise busy("save or restore slots") from None
        raise ApiError(400, f"cannot read {path.name}: {e.strerror}", "filename", "bad_file") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ApiError(400, f"{path.name} is not a regular file", "filename", "bad_file")
        with open(fd, "rb", closefd=False) as f:
            return f.read()
    finally:
        os.close(fd)


def _ms(started: float) -> float:
    return round(1000 * (time.perf_counter() - started), 3)
