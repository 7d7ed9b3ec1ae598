"""What a model file or a request makes the server compute before the first token, in a process that may be killed.

A chat template is a program from a model file: Jinja's sandbox keeps it from files and attributes, and its range() from more
than 100,000 steps, but two such loops inside each other run for hours. Grammars and JSON schemas are programs from requests:
llama.cpp's parser recurses as deep as parentheses nest, and a grammar that no token satisfies aborts the process. A Python
thread cannot be stopped, and a thread left to spin would hold the interpreter's lock every other moment; a process can be
killed, whatever it is at. So both run in children (sandbox_child.py), a few of each kind, each call within `seconds`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

START_SECONDS = 60.0  # a child loads libllama, and the vocabulary of a model
MAX_MESSAGE = 1 << 26
# nothing is imported from the folder that the server was started in
_CHILD = "import sys; sys.path[:] = filter(None, sys.path); from eagle3_llama.server.sandbox_child import main; main()"
_PACKAGES = str(Path(__file__).resolve().parents[2])


class SandboxError(Exception):
    """What was asked for was refused, took too long or killed the child."""


class SandboxBusy(Exception):
    """Others were being served all the time, or the server is shutting down."""


class Sandbox:
    """A few children, each with one call at a time, from any thread. One that was killed is replaced in the background: the others
    serve meanwhile, so that who brings a child down waits for nobody but himself."""

    CHILDREN = 2

    def __init__(self, seconds: float, **setup: Any) -> None:
        self.seconds, self._setup = seconds, setup
        self._changed = threading.Condition()
        self._children: set[subprocess.Popen] = set()  # that have started
        self._free: list[subprocess.Popen] = []  # of these; the last has its caches warm
        self._starting: set[subprocess.Popen] = set()
        self._missing = self.CHILDREN  # neither started nor starting
        self._failures: list[Exception] = []  # why starts did not end well
        self._closed = False

    def start(self) -> None:
        """Starts the children ahead of the first call, and waits for one; what fails here fails again, and is said, in a call."""
        with contextlib.suppress(SandboxError, SandboxBusy):
            self._put(self._take())

    def call(self, **request: Any) -> Any:
        """A child's answer to one request. Raises SandboxError with a line for the client, or SandboxBusy."""
        child = self._take()
        try:
            answer = self._exchange(child, request, self.seconds)
        except BaseException:
            with self._changed:
                self._fill()
            raise
        self._put(child)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kills the children; no call starts another."""
        with self._changed:
            self._closed = True
            children = [*self._children, *self._starting]
            self._changed.notify_all()
        for child in children:
            child.kill()
            child.wait()

    def _take(self) -> subprocess.Popen:
        """A child that is free: one of those that serve is, before ten calls have had their time; a first one, when it has started."""
        began = time.monotonic()
        with self._changed:
            n_failures = len(self._failures)
            while not self._closed:
                while self._free:
                    if (child := self._free.pop()).poll() is None:
                        return child
                    self._drop(child)
                if len(self._failures) > n_failures and not self._children and not self._starting:
                    raise SandboxError(str(self._failures[-1]))
                if len(self._failures) == n_failures:
                    self._fill()
                left = began + (10 * self.seconds if self._children else START_SECONDS) - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
        raise SandboxBusy

    def _put(self, child: subprocess.Popen) -> None:
        with self._changed:
            self._free.append(child)
            self._changed.notify()

    def _fill(self) -> None:
        """Starts what is missing, in threads. The lock is held."""
        for _ in range(0 if self._closed else self._missing):
            self._missing -= 1
            child = self._spawn()
            self._starting.add(child)
            threading.Thread(target=self._wait_for, args=(child,), daemon=True).start()

    def _wait_for(self, child: subprocess.Popen) -> None:
        try:
            self._exchange(child, {**self._setup, "seconds": self.seconds}, START_SECONDS)
            ready = True
        except (SandboxError, SandboxBusy) as e:
            self._failures.append(e)
            ready = False
        with self._changed:
            self._starting.discard(child)
            if ready:
                self._children.add(child)
                self._free.append(child)
            self._changed.notify_all()

    @staticmethod
    def _spawn() -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if k != "EAGLE3_API_KEY"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGES, env.get("PYTHONPATH")]))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "-c", _CHILD], env=env, **pipes)

    def _drop(self, child: subprocess.Popen) -> int:
        """Ends a child; its exit status."""
        child.kill()
        status = child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):  # what was not sent yet
                pipe.close()
        with self._changed:
            self._children.discard(child)
            self._missing += 1
            self._changed.notify_all()
        return status

    def _exchange(self, child: subprocess.Popen, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        timer = threading.Timer(seconds, child.kill)
        timer.daemon = True
        timer.start()
        try:
            send(child.stdin, request)
            return receive(child.stdout)
        except (OSError, EOFError, ValueError):
            killed = self._drop(child)
            if self._closed:
                raise SandboxBusy from None
            slow = killed in (-signal.SIGKILL, -signal.SIGALRM)
            raise SandboxError(
                f"it took longer than {seconds:g} s"
                if slow
                else "it is too large, nested too deeply, or not supported"
            ) from None
        finally:
            timer.cancel()


def send(pipe: BinaryIO, message: dict[str, Any]) -> None:
    """One message: its length in 4 bytes, then JSON."""
    data = json.dumps(message).encode()
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> dict[str, Any]:
    """The next message; EOFError at the end."""
    head = pipe.read(4)
    size = struct.unpack("<I", head)[0] if len(head) == 4 else 0
    data = pipe.read(size) if 0 < size <= MAX_MESSAGE else b""
    if not data or len(data) != size:
        raise EOFError
    return json.loads(data)
