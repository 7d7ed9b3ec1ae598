"""Calls CMake and ninja, and shows how far they are. Standard library only."""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import toolchain
from fetch import BuildError, say


class Work(NamedTuple):
    """One build folder and what comes out of it."""

    place: Path
    cmake: str
    ninja: str
    programs: list[str]
    extra: list[str]  # of mtmd and e3chat: what is built beside what every load needs
    kind: str  # "", "sanitized-" or "stock-"
    variants: bool = False  # several CPU backends

    @property
    def stock(self) -> bool:
        return self.kind == "stock-"


def configure(work: Work, options: dict[str, str]) -> Path:
    place, cmake = work.place, work.cmake
    version = subprocess.run(
        [cmake, "--version"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()[2]
    build_dir = (place / f"cmake-{version}").resolve()
    if not (build_dir / "build.ninja").is_file():  # configuring never finished
        shutil.rmtree(build_dir, ignore_errors=True)
    command = [
        cmake,
        "-S",
        str(place / "native"),
        "-B",
        str(build_dir),
        "-G",
        "Ninja",
        "--no-warn-unused-cli",
    ]
    command += [f"-DCMAKE_MAKE_PROGRAM={work.ninja}", f"-DEAGLE3_LLAMA_CPP_TREE={place / 'llama.cpp'}"]
    # what an earlier build of this folder left out
    stale = {each.option for each in toolchain.INSTRUCTION_SETS if each.option} - set(options)
    command += [f"-U{name}" for name in sorted(stale)]
    command += [f"-D{name}={value}" for name, value in sorted(options.items())]
    env = {k: v for k, v in os.environ.items() if k != "CMAKE_GENERATOR"}
    for _ in range(2):
        again = build_dir.is_dir()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        if done.returncode == 0 or not again:
            break
        shutil.rmtree(build_dir)  # it may name a compiler or CMake that is gone: try again from scratch
    (place / "configure.log").write_text(done.stdout)
    if done.returncode != 0:
        raise BuildError(
            f"CMake cannot configure the build (see above; full log: {place / 'configure.log'})", done.stdout
        )
    return build_dir


def compile_all(work: Work, build_dir: Path, targets: list[str]) -> None:
    place = work.place
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(toolchain.cores())
    command = [work.ninja, "-C", str(build_dir), "-j", jobs, *targets]
    env = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}
    last: collections.deque[str] = collections.deque(maxlen=40)
    with (
        (place / "build.log").open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
        ) as process,
    ):
        try:
            what = {"sanitized-": ", sanitized", "stock-": ", unpatched"}.get(work.kind, "")
            progress = _Progress(f"compiling{what}")
            for line in process.stdout:
                log.write(line)
                last.append(line)
                progress.line(line)
        except BaseException:
            process.terminate()
            raise
    progress.end()
    if process.returncode != 0:
        raise BuildError(f"the compiler failed (see above; full log: {place / 'build.log'})", "".join(last))


class _Progress:
    """Shows [done/total]: on one line of a terminal, or every 30 s on a new line of a log."""

    def __init__(self, what: str) -> None:
        self.what, self.tty = what, sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def line(self, text: str) -> None:
        match, now = re.match(r"\[(\d+)/(\d+)\] ", text), time.monotonic()
        if match and now - self.shown >= (0.5 if self.tty else 30):
            self.shown = now
            status = f"eagle3-llama: {self.what} {match[1]}/{match[2]}, {now - self.start:.0f} s"
            print(
                f"\r{status}" if self.tty else status,
                end="" if self.tty else "\n",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        seconds = time.monotonic() - self.start
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr)
        if seconds > 2:
            say(f"{self.what} took {seconds:.0f} s")
