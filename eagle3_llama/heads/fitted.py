"""Heads made ready for a target: converted, tried once by the self-test, kept in the cache.

A pair is known by the hashes of both, so other files of the same name are another pair. Its record, a JSON
file, is written last: without it, whatever else is in the folder is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from .. import __version__
from ..common.files import (
    cache_dir,
    locked,
    make_folder,
    parse_object,
    reading,
    remove_stale,
    replacing,
    sha256_of,
    write_json,
)
from ..common.model_reader import files_of, fingerprint, hub_hash
from ..common.notes import note
from ..common.progress import progress
from ..errors import EagleError, ErrorKind
from .convert import convert
from .convert.target import read_target

RULES = 2  # raise it when pairs must be converted or tried again
OUTTYPE = "q8_0"


@dataclasses.dataclass(frozen=True)
class HeadFiles:
    """A head that was fetched. name: for messages. files: name in a checkpoint's folder -> place."""

    name: str
    files: Mapping[str, Path]

    @property
    def gguf(self) -> Path | None:
        """The head itself, if it is a GGUF already."""
        return next((path for name, path in self.files.items() if name.endswith(".gguf")), None)

    @contextlib.contextmanager
    def as_source(self) -> Iterator[Path]:
        """The converter's source: the GGUF, or a folder that has these files and no others."""
        if self.gguf is not None:
            yield self.gguf
            return
        with tempfile.TemporaryDirectory(prefix="eagle3-head-") as tmp:
            folder = Path(tmp) / self.name.rpartition("/")[2]
            folder.mkdir()
            for name, path in self.files.items():
                try:
                    os.symlink(path.resolve(), folder / name)
                except OSError:  # Windows allows links to some users only
                    shutil.copyfile(path, folder / name)
            yield folder


@dataclasses.dataclass(frozen=True)
class PairRecord:
    """The record of a pair. path: the head's GGUF, None if it was refused. message: the self-test's line.

    content: the fingerprint of the file at `path`.
    """

    head: str
    target: str  # its fingerprint
    path: str | None
    message: str
    made: float  # seconds since 1970
    content: str

    def usable(self) -> bool:
        """True if its file is there as it was made."""
        if self.path is None or not Path(self.path).is_file():
            return False
        try:
            return fingerprint(self.path) == self.content
        except EagleError:
            return False


def fit(head: HeadFiles, target: Path) -> Path:
    """The head's GGUF for this target. Converts and tries the pair, if that was not done before.

    Raises EagleError HEAD_MISMATCH if the head is of no use for the target, and as convert() does. Then
    nothing stays that a later call would use.
    """
    seen = fingerprint(target)
    place = heads_dir() / f"{_pair(head, seen)}.json"
    record = _known(place)
    if record is None:
        waiting = f"waiting for another process that makes {head.name} ready for {target.name}"
        with locked(f"{place.stem}.head", waiting):
            record = _known(place) or _make(head, target, seen, place)
    if record.path is None:
        raise EagleError(ErrorKind.HEAD_MISMATCH, f"{head.name} does not fit {target.name}: {record.message}")
    return Path(record.path)


def heads_dir() -> Path:
    """The folder of prepared heads and their records."""
    return cache_dir() / "heads"


def records(target: Path) -> list[PairRecord]:
    """The heads that were made ready for a target, the latest first."""
    found = [read_record(place) for place in sorted(heads_dir().glob("*.json"))]
    seen = fingerprint(target) if found else ""  # it may take a while
    ours = [r for r in found if r is not None and r.target == seen and r.usable()]
    return sorted(ours, key=lambda r: -r.made)


def read_record(place: Path) -> PairRecord | None:
    """None if there is none, or if it is damaged."""
    try:
        with reading(place):
            data = parse_object(place.read_bytes(), str(place), ErrorKind.BAD_VALUE)
        record = PairRecord(**data)
    except (EagleError, TypeError):
        return None
    texts = (record.head, record.target, record.message, record.path or "", record.content)
    whole = all(isinstance(text, str) for text in texts) and isinstance(record.made, float)
    return record if whole else None


def _known(place: Path) -> PairRecord | None:
    """The record of a pair that need not be made (again)."""
    record = read_record(place)
    return record if record is not None and (record.path is None or record.usable()) else None


def _pair(head: HeadFiles, target: str) -> str:
    parts = sorted(f"{name} {fingerprint(path)}" for name, path in head.files.items())
    return hashlib.sha256("\n".join([__version__, str(RULES), *parts, target]).encode()).hexdigest()[:32]


def _make(head: HeadFiles, target: Path, seen: str, place: Path) -> PairRecord:
    read_target(target)  # whatever is wrong with it is said first
    make_folder(place.parent)
    remove_stale(place.parent)
    try:
        made, message = _ready(head, target, place.with_suffix(".gguf"))
        path, content = str(made), fingerprint(made)
    except _Useless as e:
        _check_whole([*head.files.values(), *files_of(target)])
        path, message, content = None, str(e), ""
    record = PairRecord(head.name, seen, path, message, time.time(), content)
    write_json(place, dataclasses.asdict(record))
    return record


def _check_whole(files: Iterable[Path]) -> None:
    """Raises EagleError BAD_FILE for a file of the Hub's cache that is not what the Hub has.

    A verdict about a damaged file must not be kept for the whole one, which has the same name.
    """
    for path in files:
        named = hub_hash(path)
        if named is None or len(named) != 64:  # only large files are called by the SHA-256 of their content
            continue
        if sha256_of(path) != named:
            raise EagleError(
                ErrorKind.BAD_FILE, f"{path} is damaged: remove {path.resolve()}, so that it is fetched again"
            )


def _ready(head: HeadFiles, target: Path, out: Path) -> tuple[Path, str]:
    """(the head's GGUF, what the self-test says). A GGUF that is right is used where it is."""
    with head.as_source() as source:
        if head.gguf is not None:
            message, layers = _try(head.gguf, target)
            if layers is None:
                return head.gguf, message
            convert(source, target, out, None, layers)
            return out, message
        note(f"converting {head.name} for {target.name}, once")
        with replacing(out) as part:  # renamed only after it was tried
            convert(source, target, part, OUTTYPE)
            message, layers = _try(part, target)
            if layers is not None:
                convert(source, target, part, OUTTYPE, layers)
        return out, message


class _Useless(Exception):
    """The self-test's line about a head that guesses no better than by chance."""


def _try(head: Path, target: Path) -> tuple[str, list[int] | None]:
    """(what the self-test says, layers with which the head does better). Raises _Useless."""
    from .self_test import Verdict, better_readings, is_useless, self_test, verdict

    with progress(Console(stderr=True), transient=True, begins=False) as bar:
        task = bar.add_task("self-test", total=None, unit="texts")
        try:
            found = self_test(
                head, target, on_passage=lambda done, of: bar.update(task, completed=done, total=of)
            )
        except EagleError as e:
            if e.kind is not ErrorKind.UNSUPPORTED:
                raise
            return f"not tried: {e}", None  # loading the pair says that it decodes plainly, and why
    for better in better_readings(found):
        note(f"self-test: {better}")
    kind, line = verdict(found)
    if is_useless(found):
        raise _Useless(line)
    if kind is not Verdict.WRONG:
        return line, None
    best = max(found.trials, key=lambda t: t.likelihood.mean).layers
    note(f"the self-test prefers layers {best} to {found.trials[0].layers}: converting with these")
    return line, best
