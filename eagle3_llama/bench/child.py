"""A process beside the benchmark that answers each line with a line, and what it came to if it ended."""

from __future__ import annotations

import functools
import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import EagleError, ErrorKind


class Crash(EagleError):
    """A mode's process ended, or cannot go on. str() says why, such as "crashed: SIGSEGV"."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.NATIVE, message)


class Child:
    """A running process. Its standard output has one line for each line that is written to it."""

    def __init__(self, command: Sequence[object], env: dict[str, str] | None = None) -> None:
        # the log goes to a file, because a pipe that nobody reads would fill up
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        words, pipe = [str(word) for word in command], subprocess.PIPE
        self._process = subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, stderr=self._log, env=env)
        assert self._process.stdin is not None and self._process.stdout is not None  # they are pipes
        self._in, self._out = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> str:
        """The next line, "" if the process has ended by itself. Raises Crash if a signal ended it."""
        line = self._out.readline().strip()
        if not line:
            self.close()
            if self._process.returncode < 0:
                raise Crash(f"crashed: {_name(-self._process.returncode)}")
        return line

    def ask(self, line: str) -> str:
        """Writes a line, and returns the answer as read() does."""
        try:
            self._in.write(line + "\n")
            self._in.flush()
        except (OSError, ValueError):  # the process has ended; read() tells how
            pass
        return self.read()

    def last_words(self) -> str:
        """The last line of the log. Ends the process."""
        self.close()
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["it printed nothing"])[-1]

    def close(self) -> None:
        try:
            self._in.close()
        except OSError:
            pass
        self._process.wait()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _builder() -> Path:
    return _root() / "native" / "build.py"


def in_checkout() -> bool:
    """True if of_checkout() and unpatched() find something: an installed package has no native/."""
    return _builder().is_file()


def _need_checkout() -> None:
    if not in_checkout():
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            "the installed package does not contain the unpatched llama.cpp, which the modes stock,"
            " stock_prompt_lookup, upstream and draft_model run: use a checkout of the project",
        )


def of_checkout(name: str) -> ModuleType:
    """The module `name` of scripts/measure/others, which an installed package has not. Raises EagleError."""
    _need_checkout()
    known = f"others.{name}"  # as the scripts beside that folder import it
    if known not in sys.modules:
        file = _root() / "scripts" / "measure" / "others" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(known, file)
        assert spec is not None and spec.loader is not None  # it is the path of a .py file
        module = sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


def built(option: str) -> bool:
    """True if unpatched() would take no time."""
    command = [sys.executable, str(_builder()), option, "--if-built", "--print-dir"]
    return in_checkout() and subprocess.run(command, capture_output=True).returncode == 0


@functools.cache
def unpatched(option: str) -> Path:
    """The folder that native/build.py makes of the unpatched llama.cpp with an option: --bench, --stock.

    The first call in a cache takes minutes and shows its progress. Raises EagleError.
    """
    _need_checkout()
    build = _builder()
    done = subprocess.run([sys.executable, build, option, "--print-dir"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise EagleError(ErrorKind.NATIVE, f"the unpatched llama.cpp could not be built: {build} {option}")
    return Path(done.stdout.strip())
