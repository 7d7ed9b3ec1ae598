"""Chooses among the CPU backends of a library for every processor, and loads the one that is chosen.

native/build.py makes such a library with EAGLE3_VARIANTS=ON, for wheels: libggml-cpu-haswell.so and so on,
the *variants*. ggml says how well each suits the processor. The best one has to pass eagle3-proof in a child
process, once for each processor and library; the next lower one follows where it fails. The result is kept in
the cache. A library that was built for one processor has no variants, and nothing here concerns it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..common.files import cache_dir, make_folder, remove_stale, replacing
from ..common.notes import note
from ..errors import EagleError, ErrorKind
from . import checking, machine
from .hook import SUFFIX

VARIABLE = "EAGLE3_LLAMA_CPU"
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class CpuBackend(NamedTuple):
    name: str  # such as "haswell"
    dropped: list[list[str]]  # [name, why] of those that suit the processor better and fail, the best first
    remark: str  # what else there is to say, or ""

    @property
    def file(self) -> str:
        return checking.backend_file(self.name)


_chosen: dict[Path, CpuBackend] = {}  # by the folder of the library


def names(lib_dir: Path) -> list[str]:
    """The variants in this folder. Empty for a library that was built for one processor."""
    found = (checking.backend_name(path.name) for path in lib_dir.iterdir()) if lib_dir.is_dir() else ()
    return sorted(filter(None, found))


def choose(lib_dir: Path) -> CpuBackend | None:
    """The variant for this processor, None if the library has none. The first call on a processor checks it.

    EAGLE3_LLAMA_CPU names another one. Raises EagleError LIBRARY if that cannot be used, or none can.
    """
    if lib_dir not in _chosen:
        there = names(lib_dir)
        asked = os.environ.get(VARIABLE, "")
        if asked and asked not in there:
            which = f"its variants are {', '.join(there)}" if there else "it was built for one processor"
            raise _error(f"{VARIABLE} is {asked}, which the library in {lib_dir} has not: {which}")
        if not there:
            return None
        key = _key(lib_dir, asked)
        choice = _read(key, there)
        if choice is None:
            choice, keep = _prove(lib_dir, asked, _scores(lib_dir, there))
            if keep:
                _write(key, choice)
        _chosen[lib_dir] = choice
    return _chosen[lib_dir]


def load(lib_dir: Path) -> None:
    """Loads the chosen variant into this process, by its path, before anyone needs a CPU backend.

    Left to itself, ggml would look for one beside python and in the working directory.
    """
    choice = choose(lib_dir)
    if choice is None:
        return
    ggml = ctypes.CDLL(str(lib_dir / f"libggml{SUFFIX}"))
    ggml.ggml_backend_reg_by_name.restype = ggml.ggml_backend_load.restype = ctypes.c_void_p
    if ggml.ggml_backend_reg_by_name(b"CPU"):
        return
    with _silent(ggml):
        for path in _others(lib_dir):  # those of GPUs; without its driver, one does not load
            ggml.ggml_backend_load(os.fsencode(path))
        if ggml.ggml_backend_load(os.fsencode(lib_dir / choice.file)):
            return
        # An emulator runs this process alone, so that a child had the answers of another processor.
        scores = {name: _score_within(lib_dir, name) for name in names(lib_dir)}
        _chosen[lib_dir], _ = _prove(lib_dir, os.environ.get(VARIABLE, ""), scores)
        if not ggml.ggml_backend_load(os.fsencode(lib_dir / _chosen[lib_dir].file)):
            raise _error(f"no CPU backend in {lib_dir} can be loaded: reinstall eagle3-llama")


def _prove(lib_dir: Path, asked: str, scores: dict[str, int]) -> tuple[CpuBackend, bool]:
    """Checks the variants that this processor can run, the best first, until one is right.

    scores: how well each suits, 0 for not at all. Returns the choice, and whether it may be kept.
    """
    fitting = sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])
    if asked and asked not in fitting:
        can = ", ".join(fitting) or "none of them"
        raise _error(f"{VARIABLE} is {asked}, which this processor cannot run: it can run {can}")
    dropped: list[list[str]] = []
    rows: list[CpuBackend] = []  # sums that are right, but not the same bits for one row and for several
    candidates = [asked] if asked else fitting
    for name in candidates:
        note(f"checking the variant {name} on this processor, once")
        fault = checking.check(lib_dir, [lib_dir / checking.backend_file(name)])
        if fault is None:
            return CpuBackend(name, dropped, ""), True
        if fault.kind == "cannot":  # another time it may be possible
            return CpuBackend(name, dropped, f"not checked here: {fault.text}"), False
        if fault.kind == "rows":
            rows.append(CpuBackend(name, list(dropped), fault.text))
        dropped.append([name, fault.text])
        if len(dropped) < len(candidates):
            note(f"{fault.text} on this processor: trying the variant {candidates[len(dropped)]}, not {name}")
    if rows:
        return rows[0], True
    raise _error(_none_left(lib_dir, asked, dropped))


def _none_left(lib_dir: Path, asked: str, dropped: list[list[str]]) -> str:
    if asked:
        return f"{VARIABLE} is {asked}, and {dropped[0][1]} on this processor: unset {VARIABLE}"
    failed = "; ".join(f"{name}: {why}" for name, why in dropped) or "none is made for it"
    return (
        f"no CPU backend in {lib_dir} works on this processor ({failed}): build the library here, from the "
        "sources (pip install .)"
    )


def _scores(lib_dir: Path, there: list[str]) -> dict[str, int]:
    """How well each variant suits this processor, 0 for not at all. A child asks: an answer may be a trap."""
    try:
        return {name: checking.score(lib_dir, lib_dir / checking.backend_file(name)) for name in there}
    except OSError:  # eagle3-proof is gone, or may not be run from there
        return {name: _score_within(lib_dir, name) for name in there}


def _score_within(lib_dir: Path, name: str) -> int:
    try:
        return int(ctypes.CDLL(str(lib_dir / checking.backend_file(name))).ggml_backend_score())
    except (OSError, AttributeError):
        return 0


def _others(lib_dir: Path) -> list[Path]:
    ours = {"libggml-base.so", "libggml-cpu.so", *map(checking.backend_file, names(lib_dir))}
    return sorted(path for path in lib_dir.glob("libggml-*.so") if path.name not in ours)


class _silent:
    """ggml says on stderr what it loads. Only while it does: whoever logs its messages goes on doing so."""

    def __init__(self, ggml: Any) -> None:
        self._ggml = ggml
        self._before = (ctypes.c_void_p(), ctypes.c_void_p())
        self._nothing = _LOG(lambda *_: None)

    def __enter__(self) -> None:
        self._ggml.ggml_log_get(*map(ctypes.byref, self._before))
        self._ggml.ggml_log_set(self._nothing, None)

    def __exit__(self, *_: object) -> None:
        self._ggml.ggml_log_set(*self._before)


def _key(lib_dir: Path, asked: str) -> str:
    """The key of the choice: this processor, these files of the library, and what was asked for."""
    stats = [(path.name, path.stat()) for path in sorted(lib_dir.iterdir())]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    key = repr([machine.cpu(), str(lib_dir.resolve()), files, asked])
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _place(key: str) -> Path:
    """Raises EagleError as cache_dir()."""
    return cache_dir() / "variants" / f"{key}.json"


def _read(key: str, there: list[str]) -> CpuBackend | None:
    """The choice that was kept. None if there is none, or what is there is no such file."""
    try:
        name, dropped, remark = json.loads(_place(key).read_text(encoding="utf-8"))
        pairs = [[str(which), str(why)] for which, why in dropped]
    except (EagleError, OSError, ValueError, TypeError):
        return None
    return CpuBackend(name, pairs, remark) if name in there and isinstance(remark, str) else None


def _write(key: str, choice: CpuBackend) -> None:
    """Without a place to write to, the next process checks again."""
    with contextlib.suppress(EagleError):
        path = _place(key)
        make_folder(path.parent)
        remove_stale(path.parent)
        with replacing(path) as part:
            part.write_text(json.dumps(choice) + "\n", encoding="utf-8")


def _error(message: str) -> EagleError:
    return EagleError(ErrorKind.LIBRARY, message)
