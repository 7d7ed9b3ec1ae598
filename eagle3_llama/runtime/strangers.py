"""Other builds of ggml and llama.cpp in this process: the loader takes what is there for any of its name.

LD_LIBRARY_PATH, LD_PRELOAD and other packages bring them. Our libraries would call their functions: slower or
wrong without a word, or not at all.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from ..errors import EagleError, ErrorKind
from .hook import SUFFIX

_ORDER = ("libggml-base", "libggml-cpu", "libggml", "libllama")  # each needs those before it
_MAPS = Path("/proc/self/maps")
_opened: set[Path] = set()


def open_ours(lib_dir: Path) -> None:
    """Opens the libraries that others need, by their paths: then no folder is searched for them.

    Raises EagleError LIBRARY if another one of such a name is there already.
    """
    if lib_dir in _opened:  # what comes later finds ours
        return
    check(lib_dir)
    for name in _ORDER:
        path = lib_dir / f"{name}{SUFFIX}"
        if sys.platform == "linux" and path.is_file():
            ctypes.CDLL(str(path))
    _opened.add(lib_dir)


def check(lib_dir: Path) -> None:
    """Raises EagleError LIBRARY if this process has a library from elsewhere that is called as one of ours.

    Only Linux tells what a process has.
    """
    ours = {path.name for path in lib_dir.glob(f"lib*{SUFFIX}*")}
    folder = lib_dir.resolve()
    for path in mapped():
        if path.name in ours and path.resolve().parent != folder:
            raise EagleError(
                ErrorKind.LIBRARY,
                f"this process has {path}, another build of {path.name}, which would be used in place of the"
                f" one in {lib_dir}: start the program without it (LD_LIBRARY_PATH, LD_PRELOAD), or import"
                " eagle3_llama before what loads it",
            )


def mapped() -> list[Path]:
    """The files of libraries in this process; none where the system does not tell."""
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = {line[line.index("/") :].removesuffix(" (deleted)") for line in lines if "/" in line}
    return sorted(Path(name) for name in found if ".so" in name)
