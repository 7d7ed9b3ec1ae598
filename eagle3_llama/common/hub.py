"""Files of the Hugging Face Hub by name: hf:repo, hf:repo/file, hf:repo:Q4_K_M. huggingface_hub fetches them.

Its cache, tokens, offline mode and progress bars are used as they are. Sources: the Hub's cache layout,
https://huggingface.co/docs/huggingface_hub/guides/manage-cache, and llama.cpp's names of split files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind
from . import extras
from .model_reader import PART
from .notes import note

PREFIX = "hf:"
ORDER = ("Q4_K_M", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "BF16", "F16", "F32")  # where no format is asked for
TIMEOUT = 10.0  # seconds for a listing
MOST_SHOWN = 8  # file names in a message
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^:]+)|:(?P<format>[\w.-]+))?")
_NO_MODEL = re.compile(r"(^|/)(eagle3?-[^/]*|[^/]*mmproj[^/]*|[^/]*imatrix[^/]*)$", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class HubName:
    """The name after hf:. At most one of file and format is given."""

    repo: str
    file: str | None = None
    format: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Raises EagleError BAD_ARGUMENT."""
        found = _NAME.fullmatch(text.removeprefix(PREFIX).replace(os.sep, "/"))
        if found is None or not _is_inside(found["file"] or "x"):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"{text!r:.120} is no name on the Hugging Face Hub: expected hf:OWNER/REPO,"
                " hf:OWNER/REPO/FILE or hf:OWNER/REPO:FORMAT, such as hf:Qwen/Qwen3-1.7B-GGUF:Q8_0",
            )
        return cls(found["repo"], found["file"], found["format"])

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"/{self.file}" if self.file else "")


_cache: ContextVar[str | os.PathLike[str] | None] = ContextVar("hub_cache", default=None)


@contextlib.contextmanager
def cached_in(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Repositories that are opened meanwhile have this cache folder. None: the usual one."""
    token = _cache.set(folder)
    try:
        yield
    finally:
        _cache.reset(token)


class Repository:
    """The files of one repository. cache_dir, local_dir: as in huggingface_hub.hf_hub_download.

    cache_dir: None is that of cached_in().

    Every method raises EagleError: LIBRARY without huggingface_hub, BAD_FILE for what cannot be fetched,
    NO_SPACE.
    """

    def __init__(
        self,
        repo: str,
        cache_dir: str | os.PathLike[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.repo, self._local_dir = repo, local_dir
        self._cache_dir = cache_dir if cache_dir is not None else _cache.get()
        self._hub, self._offline = _huggingface_hub(), False
        self._sizes: dict[str, int | None] = {}

    def files(self) -> list[str]:
        """Paths of its files. Those that were fetched before, if the Hub cannot be asked."""
        try:
            with _fetching(self.repo):  # model_info() fails at once; other listings try for half a minute
                info = self._hub.HfApi().model_info(
                    self.repo, revision="main", timeout=TIMEOUT, files_metadata=True
                )
            self._sizes = {file.rfilename: file.size for file in info.siblings or ()}
            found = list(self._sizes)
        except EagleError as e:
            found = self._at_hand()
            if not found:
                raise
            self._offline = True  # waiting for it once is enough
            if not self._hub.constants.HF_HUB_OFFLINE:
                note(f"{e}: taking what was fetched before")
        return sorted(name for name in found if _is_inside(name))

    def fetch(self, name: str, most: int | None = None) -> Path:
        """A file's place on this machine. Fetches it if it is not there, or is not the latest.

        most: bytes that it may have.
        """
        if not _is_inside(name):
            raise EagleError(
                ErrorKind.BAD_FILE, f"{self.repo} has a file of the name {name!r:.80}: not fetched"
            )
        where = {
            "cache_dir": self._cache_dir,
            "local_dir": self._local_dir,
            "local_files_only": self._offline,
        }
        if most is not None and (size := self._sizes.get(name) or 0) > most:
            raise EagleError(
                ErrorKind.BAD_VALUE, f"{self.repo}/{name} has {size} bytes: at most {most} are read"
            )
        with _fetching(f"{self.repo}/{name}"):
            return Path(self._hub.hf_hub_download(self.repo, name, **where))

    def fetch_model(self, file: str | None = None, format: str | None = None) -> Path:
        """A model's GGUF, all parts of a split one; the path of the first part.

        file: a name or a glob. format: such as Q4_K_M. Without both, the only model, or the first that is
        there in ORDER; a line on stderr says which.
        """
        names = self.files()
        ggufs = [name for name in names if name.endswith(".gguf")]
        if file is not None:
            found = [file] if file in names else fnmatch.filter(firsts(names), file)
            found = [name for name in found if not _NO_MODEL.search(name)] or found
            name = only(found, f"{self.repo} for {file}", names)
        else:
            models = [name for name in firsts(ggufs) if not _NO_MODEL.search(name)]
            name = choose(models, format, self.repo, ggufs or names)
            if len(models) > 1 and format is None:
                note(f"{PREFIX}{self.repo} has {len(models)} models: took {name}")
        return [self.fetch(part) for part in parts(name, names)][0]

    def _at_hand(self) -> list[str]:
        """Files of the snapshot that was fetched last."""
        if self._local_dir is not None:
            folder = Path(self._local_dir)
        else:
            cache = Path(self._cache_dir or self._hub.constants.HF_HUB_CACHE)
            place = cache / f"models--{self.repo.replace('/', '--')}"
            try:
                folder = place / "snapshots" / (place / "refs" / "main").read_text().strip()
            except OSError:
                return []
        found = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
        return [path.relative_to(folder).as_posix() for path in found]


def repository_of(path: Path) -> str | None:
    """The repository that a file in the Hub's cache came from."""
    for folder in path.absolute().parents:
        if folder.name.startswith("models--") and folder.name.count("--") >= 2:
            return folder.name.removeprefix("models--").replace("--", "/", 1)
    return None


def choose(
    names: list[str], format: str | None, where: str, there: list[str], order: Iterable[str] = ORDER
) -> str:
    """The file of a format, else the only one, else the first in `order`. there: what a message shows.

    Raises EagleError BAD_FILE that names the candidates, if there are none or several.
    """
    if format is not None:
        return only(of_format(names, format), f"{where} for {format}", names or there)
    if len(names) > 1:
        for each in order:
            if found := of_format(names, each):
                return only(found, where, names)
    return only(names, where, there)


def of_format(names: Iterable[str], format: str) -> list[str]:
    """The files that have the format as a word in their names: model-Q4_K_M.gguf, Q4_K_M/model.gguf."""
    word = re.compile(rf"(^|[-./]){re.escape(format)}([-./]|$)", re.IGNORECASE)
    return [name for name in names if word.search(name)]


def only(found: list[str], where: str, there: list[str]) -> str:
    """The one file. Raises EagleError BAD_FILE that names the candidates, if it is not one."""
    if len(found) == 1:
        return found[0]
    if found:
        raise EagleError(ErrorKind.BAD_FILE, f"several files of {where}: name one of {_listed(found)}")
    raise EagleError(ErrorKind.BAD_FILE, f"no file of {where}: it has {_listed(there)}")


def firsts(names: Iterable[str]) -> list[str]:
    """The files without the later parts of split models."""
    return [name for name in names if (part := PART.search(name)) is None or int(part[1]) == 1]


def parts(name: str, names: Iterable[str]) -> list[str]:
    """All parts of a split model in order, or the file. Raises EagleError BAD_FILE if one is missing."""
    found = PART.search(name)
    if found is None:
        return [name]
    wanted = [f"{name[: found.start()]}-{i + 1:05d}-of-{found[2]}.gguf" for i in range(int(found[2]))]
    missing = sorted(set(wanted) - set(names))
    if missing:
        raise EagleError(ErrorKind.BAD_FILE, f"{name} is split, and {_listed(missing)} is not beside it")
    return wanted


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_SHOWN
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:MOST_SHOWN])
    return (shown or "nothing") + (f" and {more} more" if more > 0 else "")


def _is_inside(name: str) -> bool:
    """True if a name from a listing stays inside the folder that it is joined to, on every system."""
    words = name.split("/")
    return name.isprintable() and "\\" not in name and ":" not in name and not {"", ".", ".."} & set(words)


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as e:
        raise extras.missing(f"{PREFIX} names need", "hub", e) from e
    return huggingface_hub


@contextlib.contextmanager
def _fetching(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # which exceptions an HTTP client has depends on the version of huggingface_hub
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise EagleError(ErrorKind.NO_SPACE, f"no space left for {what}: free some space") from e
        raise EagleError(ErrorKind.BAD_FILE, f"cannot fetch {what}: {_reason(e)}") from e


def _reason(error: Exception) -> str:
    """One line for an exception of huggingface_hub, whose own messages have several."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "its owner grants access: ask for it on its page, and log in with `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return (
            "the Hub has no such repository, or it is private: check the name, or log in with `hf auth login`"
        )
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError"}:
        return (
            "it was not fetched before, and the Hub cannot be reached: check the network and HF_HUB_OFFLINE"
        )
    if "EntryNotFoundError" in kinds:
        return "the repository has no such file"
    if kinds & {"ConnectError", "ConnectionError", "TimeoutException", "Timeout"}:
        return f"the Hub cannot be reached ({_line(error)})"
    return _line(error)


def _line(error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in message[:300])  # a server may have written it
