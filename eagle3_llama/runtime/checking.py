"""Runs eagle3-proof, which checks a library on this processor, in a child process, and judges how it ends.

native/proof.py uses this file too, before anything is installed: it needs the standard library only.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = "eagle3-proof"
FILE = PROGRAM + (".exe" if sys.platform == "win32" else "")
PATIENCE = 180.0  # seconds without a new step; a step takes milliseconds, a second under sanitizers
_ROWS_DIFFER, _CANNOT = 3, 4  # exit codes of eagle3-proof
_SCORING = 60.0  # seconds to say how well a CPU backend suits; it takes milliseconds
_OF_THE_USER = ("EAGLE3_LLAMA_AMX", "EAGLE3_LLAMA_INTERLEAVE")  # they hide a part of the library
_BACKEND = re.compile(r"libggml-cpu-(.+)\.so")


class Fault(NamedTuple):
    kind: str  # "failed", "rows" (only the rows differ), "cannot" (it could not be run at all)
    text: str  # such as "products in q4_0 (AMX) end with SIGSEGV"


def check(
    folder: Path,
    arguments: Sequence[object] = (),
    patience: float = PATIENCE,
    env: dict[str, str] | None = None,
) -> Fault | None:
    """Runs eagle3-proof of this folder. None if all is right."""
    if sys.platform == "win32":  # its pipes cannot be waited for, and a process there ends by no signal
        return Fault("cannot", f"on Windows {PROGRAM} is run by hand")
    with tempfile.TemporaryDirectory(prefix="eagle3-proof-") as tmp, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                [str(folder / PROGRAM), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**_environment(), "TMPDIR": tmp, **(env or {})},
                preexec_fn=_no_core_file,
            )
        except OSError as error:  # built for another system
            return Fault("cannot", f"{PROGRAM} does not run: {error.strerror}")
        with child:
            step, ended = _follow(child, patience)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    return _judge(step, child.returncode if ended else None, said)


def score(folder: Path, backend: Path) -> int:
    """How well a CPU backend suits this processor, by ggml's own rule; 0 for not at all.

    Also 0 if the child that asks it does not survive that. Raises OSError if eagle3-proof does not run.
    """
    try:
        done = subprocess.run(
            [str(folder / PROGRAM), "--score", str(backend)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            timeout=_SCORING,
            preexec_fn=_no_core_file,
        )
        return int(done.stdout) if done.returncode == 0 else 0
    except (subprocess.TimeoutExpired, ValueError):
        return 0


def backend_file(name: str) -> str:
    """The file of a CPU backend that is loaded when it is needed, by its name, such as "haswell"."""
    return f"libggml-cpu-{name}.so"  # on macOS too: it is a module


def backend_name(file: str) -> str | None:
    """The name of the CPU backend in a file that is called so. None for other files."""
    match = _BACKEND.fullmatch(file)
    return match[1] if match else None


def _environment() -> dict[str, str]:
    """What eagle3-proof runs with: this process's, without the user's choices. Leaks are no faults."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_USER}
    return {**kept, "ASAN_OPTIONS": "detect_leaks=0"}  # of a sanitized library


def _no_core_file() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _follow(child: subprocess.Popen[bytes], patience: float) -> tuple[str, bool]:
    """The last line that the child wrote, and whether it ended by itself."""
    told, ended = b"", False
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        try:
            while selector.select(patience):
                data = os.read(child.stdout.fileno(), 4096)
                if not data:
                    child.wait(patience)
                    ended = True
                    break
                told += data
        except subprocess.TimeoutExpired:
            pass
        finally:
            child.kill()
    lines = told.decode(errors="replace").splitlines()
    return (lines[-1] if lines else ""), ended


def _judge(step: str, code: int | None, said: list[str]) -> Fault | None:
    """What the end of the child means. code: its exit code, or None if it had to be ended."""
    last = said[-1] if said else ""
    subject = re.sub(r" \(CPU\)$", "", step)
    plural = subject.startswith("products")
    if code is None:
        return Fault("failed", f"{subject or 'the start'} {'do' if plural else 'does'} not end")
    if code == 0 and step == "ok":
        return None
    if code < 0:
        name = _signal_name(-code)
        return Fault("failed", f"{subject or 'the start'} {'end' if plural else 'ends'} with {name}")
    if code == _CANNOT or not step:
        return Fault("cannot", last or f"{PROGRAM} ends with exit code {code}")
    if code == _ROWS_DIFFER:
        return Fault("rows", last)
    are = "are" if plural else "is"
    return Fault("failed", f"{subject} {are} wrong ({last or f'exit code {code}'})")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
