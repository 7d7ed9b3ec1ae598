"""Runs eagle3-proof, which checks a library on this processor, in a child process, and judges how it ends.

native/proof.py uses this file too, before anything is installed: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = "eagle3-proof"
FILE = PROGRAM + (".exe" if sys.platform == "win32" else "")
_ROWS_DIFFER = 3  # an exit code of eagle3-proof
_CANNOT = 4  # another one
_LOOK = 1.0  # seconds until the next look at what the child's threads do
_OF_THE_USER = ("EAGLE3_LLAMA_AMX", "EAGLE3_LLAMA_INTERLEAVE")  # they hide a part of the library
_BACKEND = re.compile(r"libggml-cpu-(.+)\.so")


class Limits(NamedTuple):
    """Time limits of a check, in seconds: it computes for 2, with sanitizers for 5, under emulation for 200.

    A machine that is busy with something else makes a check long, not wrong. So what it computes has a limit,
    and how long it may take has one far beyond that, which only says that nothing is known.
    """

    computing: int = 120  # seconds of all threads together, in one step (eagle3-proof renews it)
    asleep: float = 180.0  # in which all threads wait, so that nothing will come (seen on Linux alone)
    wall: float = 3600.0  # for the whole


LIMITS = Limits()


class Fault(NamedTuple):
    kind: str  # "failed", "rows" (only the rows differ), "cannot" (it was not checked)
    text: str  # such as "products in q4_0 (AMX) end with SIGSEGV"


def check(
    folder: Path, arguments: Sequence[object] = (), limits: Limits = LIMITS, env: dict[str, str] | None = None
) -> Fault | None:
    """Runs eagle3-proof of this folder. None if all is right. env: variables that it sees besides."""
    if sys.platform == "win32":  # its pipes cannot be waited for, and a process there ends by no signal
        return Fault("cannot", f"on Windows {PROGRAM} is run by hand")
    with tempfile.TemporaryDirectory(prefix="eagle3-proof-") as tmp, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                [str(folder / PROGRAM), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**_environment(folder), "TMPDIR": tmp, **(env or {})},
                preexec_fn=limited(limits.computing),
            )
        except OSError as error:  # built for another system
            return Fault("cannot", f"{PROGRAM} does not run: {error.strerror}")
        with child:
            step, end = _follow(child, limits)
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip().splitlines()
    if end == "late":
        longest = f"{limits.wall / 60:.0f} minutes" if limits.wall >= 120 else f"{limits.wall:.0f} s"
        return Fault("cannot", f"{_subject(step)[0]} took more than {longest}, as the machine is too busy")
    return _judge(step, child.returncode if end == "ended" else None, message)


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
            env=_environment(folder),
            timeout=LIMITS.wall,
            preexec_fn=limited(LIMITS.computing),
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


def of_the_user() -> dict[str, str]:
    """The user's choices that eagle3-proof does not see: without them, it checks the whole library."""
    return {name: os.environ[name] for name in _OF_THE_USER if name in os.environ}


def _environment(folder: Path) -> dict[str, str]:
    """The environment of eagle3-proof: this process's, without the user's choices. Leaks are no faults.

    Its libraries are those of the folder, whatever others are found before them.

    Its threads sleep while they wait. Where others want the cores, they would compute tenfold by spinning.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_USER}
    if others := kept.get("LD_LIBRARY_PATH"):
        kept["LD_LIBRARY_PATH"] = f"{folder}{os.pathsep}{others}"
    return {**kept, "ASAN_OPTIONS": "detect_leaks=0", "OMP_WAIT_POLICY": "passive"}  # ASan: if sanitized


def limited(computing: int) -> Callable[[], None] | None:
    """For a child's preexec_fn: SIGXCPU ends it after so many seconds of computing. No core file is left."""
    if sys.platform == "win32":
        return None

    def restrict() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = computing if most == resource.RLIM_INFINITY else min(computing, most)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, most))

    return restrict


def _follow(child: subprocess.Popen[bytes], limits: Limits) -> tuple[str, str]:
    """The last line that the child wrote, and "ended" if it did, "asleep" or "late" if it was killed."""
    told = b""
    writes = True
    end = "late"
    asleep = None
    start = time.monotonic()
    since = start
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        try:
            while (now := time.monotonic()) - start < limits.wall:
                if not writes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_LOOK)
                        end = "ended"
                        break
                elif selector.select(_LOOK):
                    data = os.read(child.stdout.fileno(), 4096)
                    told += data
                    writes = bool(data)
                before, asleep = asleep, _asleep(child.pid)
                if asleep is None or asleep != before:
                    since = now
                elif now - since > limits.asleep:
                    end = "asleep"
                    break
        finally:
            child.kill()
    lines = told.decode(errors="replace").splitlines()
    return (lines[-1] if lines else ""), end


def _asleep(pid: int) -> int | None:
    """How often a process's threads went to sleep, if all of them do. None if one does not, or no Linux."""
    threads = Path(f"/proc/{pid}/task")
    try:
        told = b"".join((threads / name / "status").read_bytes() for name in os.listdir(threads))
    except OSError:
        return None
    times = [int(n) for n in re.findall(rb"^voluntary_ctxt_switches:\s*(\d+)", told, re.MULTILINE)]
    states = re.findall(rb"^State:\s*(\w)", told, re.MULTILINE)
    return sum(times) if times and set(states) == {b"S"} else None


def _subject(step: str) -> tuple[str, bool]:
    """The name of a step in a sentence, and whether it is a plural."""
    subject = re.sub(r" \(CPU\)$", "", step) or "the start"
    return subject, subject.startswith("products")


def _judge(step: str, code: int | None, message: list[str]) -> Fault | None:
    """The meaning of the child's end. code: its exit code, or None if it had to be ended."""
    last = message[-1] if message else ""
    subject, plural = _subject(step)
    if code is None or (sys.platform != "win32" and code == -signal.SIGXCPU):
        return Fault("failed", f"{subject} {'do' if plural else 'does'} not end")
    if code == 0 and step == "ok":
        return None
    if code < 0:
        name = signal_name(-code)
        return Fault("failed", f"{subject} {'end' if plural else 'ends'} with {name}")
    if code == _CANNOT or not step:
        return Fault("cannot", last or f"{PROGRAM} ends with exit code {code}")
    if code == _ROWS_DIFFER:
        return Fault("rows", last)
    are = "are" if plural else "is"
    return Fault("failed", f"{subject} {are} wrong ({last or f'exit code {code}'})")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
