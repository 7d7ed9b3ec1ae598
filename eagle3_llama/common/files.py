"""File helpers: OSErrors become EagleErrors, and an output file is either complete or not there at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind
from .notes import note

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_PART = re.compile(r"\..+\.(\d+|[0-9a-f]{8})\.part")  # the file that replacing() writes to
STALE = 24 * 3600.0  # seconds: nothing writes to a file for so long


def cache_dir() -> Path:
    """The folder for models, downloads and builds: EAGLE3_LLAMA_CACHE, or else ~/.cache/eagle3-llama.

    Raises EagleError BAD_FILE for a user without a home folder.
    """
    return expanded(os.environ.get("EAGLE3_LLAMA_CACHE") or "~/.cache/eagle3-llama")


def expanded(folder: str) -> Path:
    """A path that may begin with ~. Raises EagleError BAD_FILE if there is no home folder."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as e:
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{folder} needs a home folder, and this user has none: set HOME, or EAGLE3_LLAMA_CACHE",
        ) from e


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError into an EagleError of kind BAD_FILE that names `path`."""
    try:
        yield
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot read {path}: {e.strerror or e}") from e


def make_folder(folder: Path) -> None:
    """Makes a folder and those around it. Raises EagleError NO_SPACE or BAD_FILE."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _not_written(folder, e.errno, e.strerror or str(e)) from e


def check_writable(out: Path | None) -> None:
    """Raises EagleError if `out` cannot be written: before work whose result goes there. None: no file."""
    if out is None:
        return
    if out.is_dir():
        raise EagleError(ErrorKind.BAD_FILE, f"cannot write {out}: it is a folder")
    if not out.parent.is_dir():
        why = "is not a folder" if out.parent.exists() else "does not exist: create it"
        raise EagleError(ErrorKind.BAD_FILE, f"cannot write {out}: {out.parent} {why}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise EagleError(ErrorKind.BAD_FILE, f"cannot write {out}: {os.strerror(errno.EACCES)}")


def check_folder(folder: Path) -> None:
    """Raises EagleError BAD_FILE if `folder` is no folder that can be made or written to."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    check_writable(there / "file")


@contextlib.contextmanager
def replacing(out: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to. No two writers get the same one.

    mode: of the file, from which the umask takes some away.
    On success it is renamed to `out`, on failure it is deleted.
    Raises EagleError: NO_SPACE if the disk is full, BAD_FILE if `out` cannot be written.
    """
    # A process id would not do: it is 1 in every container, and threads share theirs.
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        remove_stale(out.parent, only=out.name)
        part.touch(mode, exist_ok=False)
        mode = part.stat().st_mode  # as the umask has it; some writers make a file that only its owner reads
        yield part
        os.chmod(part, mode)
        with part.open("rb+") as f:
            os.fsync(f.fileno())
        os.replace(part, out)
    except EagleError:
        raise
    except Exception as e:
        if (failed := _failed_write(e)) is None:
            raise
        raise _not_written(out, *failed) from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, as hexadecimal digits. Raises EagleError BAD_FILE."""
    digest = hashlib.sha256()
    with reading(path), path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(out: Path | None, value: Any) -> None:
    """Writes a value as JSON, nothing for None. Raises EagleError as replacing()."""
    if out is not None:
        with replacing(out) as part:
            part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def remove_stale(folder: Path, age: float = STALE, only: str | None = None) -> None:
    """Removes what killed processes left of files that replacing() was writing, `age` seconds ago or more.

    only: the name of the file that they wrote; None for all files of the folder.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            ours = _PART.fullmatch(path.name) and (only is None or path.name.startswith(f".{only}."))
            if ours and time.time() - path.stat(follow_symlinks=False).st_mtime > age:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(name: str, waiting: str) -> Iterator[None]:
    """Only one process and thread at a time is inside, of those with this cache folder and this name.

    waiting: a line for stderr, if another one is. Where files cannot be locked, it locks nothing.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError, EagleError):
            import fcntl  # not on Windows

            folder = cache_dir() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / name).open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note(waiting)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _failed_write(error: BaseException | None) -> tuple[int | None, str] | None:
    """(errno, message) of a write that failed, None if `error` is something else.

    PyTorch raises a RuntimeError while it handles the OSError, safetensors only mentions the number.
    """
    if isinstance(error, OSError):
        return error.errno, error.strerror or str(error)
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
        if number is not None and (number in _FULL or number == errno.EIO):
            return number, os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def _not_written(out: Path, number: int | None, why: str) -> EagleError:
    if number in _FULL:
        return EagleError(
            ErrorKind.NO_SPACE, f"no space left for {out}: free some space, or choose another --out"
        )
    return EagleError(ErrorKind.BAD_FILE, f"cannot write {out}: {why}")


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
