"""What a model file or a request makes the server compute before the first token, in a process that may be killed.

A chat template is a program from a model file: Jinja's sandbox keeps it from files and attributes, and its range() from more
than 100,000 steps, but two such loops inside each other run for hours. Grammars and JSON schemas are programs from requests:
llama.cpp's parser recurses as deep as parentheses nest, and a grammar that no token satisfies aborts the process. A Python
thread cannot be stopped, and a thread left to spin would hold the interpreter's lock every other moment; a process can be
killed, whatever it is at. So both run in children (sandbox_child.py), each call within `seconds`.
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
    """One child and one call at a time, from any thread; a child that was killed is replaced."""

    def __init__(self, seconds: float, **setup: Any) -> None:
        self.seconds, self._setup = seconds, setup
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the child ahead of the first call, and waits for it; what fails here fails again, and is said, in a call."""
        with self._lock, contextlib.suppress(SandboxError, SandboxBusy):
            self._running()

    def call(self, **request: Any) -> Any:
        """The child's answer to one request. Raises SandboxError with a line for the client, or SandboxBusy."""
        if not self._lock.acquire(timeout=10 * self.seconds):
            raise SandboxBusy
        try:
            answer = self._exchange(self._running(), request, self.seconds)
        finally:
            self._lock.release()
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kills the child; no call starts another."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
            child.wait()

    def _running(self) -> subprocess.Popen:
        if self._closed:
            raise SandboxBusy
        if self._child is None or self._child.poll() is not None:
            env = {k: v for k, v in os.environ.items() if k != "EAGLE3_API_KEY"}
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGES, env.get("PYTHONPATH")]))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._child = subprocess.Popen([sys.executable, "-c", _CHILD], env=env, **pipes)
            self._exchange(self._child, {**self._setup, "seconds": self.seconds}, START_SECONDS)
        return self._child

    def _exchange(self, child: subprocess.Popen, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        timer = threading.Timer(seconds, child.kill)
        timer.daemon = True
        timer.start()
        try:
            send(child.stdin, request)
            return receive(child.stdout)
        except (OSError, EOFError, ValueError):
            child.kill()
            killed = child.wait()
            child.stdin.close()
            child.stdout.close()
            if self._closed:
                raise SandboxBusy from None
            slow = killed in (-signal.SIGKILL, -signal.SIGALRM)
            raise SandboxError(f"it took longer than {seconds:g} s" if slow else "it is too large, nested too deeply, or not supported") from None
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
