"""Runs chat templates and grammars in child processes with a time limit.

A chat template is a program from a model file, which may loop for ever. Grammars and JSON schemas are
programs from requests. llama.cpp's parsers, that of answers too, recurse as deep as a text nests, until the
stack overflows and the process ends. A schema may take any time to convert. Python cannot stop a thread, and
a thread in an endless loop would slow down all others; but a process can always be killed. So all of it runs
in children (child.py), a few of each kind: templates, answers, and grammars with schemas.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ...runtime import library
from .cpu_time import NOBODY, current, spend
from .turns import Turns, Waiter

log = logging.getLogger("eagle3_llama.server")

START_SECONDS = 60.0  # time limit for a child to start: it loads libllama and the model's vocabulary
REAP_SECONDS = 5.0  # from the end of a child's pipe to its own end, which follows at once
MAX_MESSAGE = 1 << 26
RECEIVED: dict[str, Any] = {"received": True}  # what a child says before it works on a request
# ends of a child that neither a request nor a limit causes: somebody else wanted it to end
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
# the filter removes the working directory, so that a child imports nothing from there
_CHILD = """
import sys; sys.path[:] = filter(None, sys.path)
from eagle3_llama.server.sandbox.child import main; main()
"""
_PACKAGES = str(Path(__file__).resolve().parents[3])


class SandboxError(Exception):
    """The child refused the request, took too long, or crashed."""


class SandboxBusy(Exception):
    """No child can answer now: none became free in time, none can be started, somebody else ended the child
    that was at work, or the server is shutting down."""


class SandboxBroken(SandboxBusy):
    """No child can start, for a reason that no request causes. The log has it."""


class _NotReceived(SandboxBusy):
    """The child had been ended before it received the request."""


class Sandbox:
    """A few child processes, each with one call at a time. Calls may come from any thread.

    The clients for whom threads call take turns: see Turns.

    A child that was killed is replaced in the background. The other children serve meanwhile, so that a
    request that kills a child delays no other request. If the system has no more file descriptors, processes
    or threads, the child stays missing, and each further call tries again to start it.
    """

    CHILDREN = 2
    PAUSES = True  # whether a client that has taken too much waits; not where its request has a slot

    def __init__(self, seconds: float, **setup: Any) -> None:
        """Raises EagleError LIBRARY if what the children load has to be compiled first, and cannot be."""
        library.complete()  # here: a child has a time limit, and nobody sees what it says
        self.seconds, self._setup = seconds, setup
        self._changed = threading.Condition()
        # a child is in one of these two from its start to its end: what they lack is missing
        self._starting: set[subprocess.Popen[bytes]] = set()
        self._children: set[subprocess.Popen[bytes]] = set()  # those that have started
        # those without a call; the last one has the warmest caches
        self._free: list[subprocess.Popen[bytes]] = []
        self._start_seconds = 0.0  # processor time that the last one took to start
        self._failed = 0  # number of children that failed to start
        self._why = SandboxBusy()  # why the last of them did
        self._closed = False
        self._turns = Turns()

    def start(self) -> None:
        """Starts the children before the first call and waits for one. Calls report errors, not this."""
        with contextlib.suppress(SandboxError, SandboxBusy):
            self._put(*self._take())

    def call(self, **request: Any) -> Any:
        """A child's answer to one request. Raises SandboxBusy, or SandboxError with a line for the client.

        SandboxBroken, a SandboxBusy, if no child can start.

        What it took is counted, see spent.py; a child that it ended has to be started again.
        """
        answer = self._answer(request)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer["result"]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(self.CHILDREN):  # each may have been killed while it was free, and look alive still
            with contextlib.suppress(_NotReceived):
                return self._ask(request)
        return self._ask(request)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        (child, turn), began = self._take(), time.monotonic()
        try:
            answer = self._exchange(child, request, self.seconds)
        except BaseException:
            spend(time.monotonic() - began + self._start_seconds)
            self._drop(child)  # whatever went wrong, it may still be at work on this request
            self._end(turn)
            with contextlib.suppress(SandboxBusy):  # then the next call tries again
                self._fill()
            raise
        spend(answer.pop("seconds", 0.0))
        self._put(child, turn)
        return answer

    def close(self) -> None:
        """Kills the children. Later calls raise SandboxBusy."""
        with self._changed:
            self._closed = True
            children = [*self._children, *self._starting]
            self._changed.notify_all()
        for child in children:
            self._drop(child)

    def _take(self) -> tuple[subprocess.Popen[bytes], Waiter]:
        """Waits for a free child: for ten calls' time limit, or START_SECONDS if none has started yet."""
        with self._changed:
            turn = self._turns.wait(current() if self.PAUSES else replace(current(), pause=NOBODY.pause))
            try:
                return self._wait_for_turn(turn), turn
            except BaseException:
                self._end(turn)
                raise

    def _wait_for_turn(self, turn: Waiter) -> subprocess.Popen[bytes]:
        began, failed = time.monotonic(), self._failed
        while not self._closed:
            for child in [c for c in self._free if c.poll() is not None]:
                self._free.remove(child)
                self._drop(child)
            if self._turns.next(len(self._free)) is turn:
                self._turns.begin(turn)
                self._changed.notify_all()  # there may be another one for the next
                return self._free.pop()
            if self._failed > failed and not self._children and not self._starting:
                raise type(self._why)(*self._why.args)
            if self._failed == failed:
                self._fill()
            left = began + (10 * self.seconds if self._children else START_SECONDS) - time.monotonic()
            if left <= 0:
                break
            self._changed.wait(min(left, turn.asker.pause() or left))
        raise SandboxBusy

    def _put(self, child: subprocess.Popen[bytes], turn: Waiter) -> None:
        with self._changed:
            self._free.append(child)
            self._end(turn)

    def _end(self, turn: Waiter) -> None:
        with self._changed:
            self._turns.end(turn)
            self._changed.notify_all()

    def _fill(self) -> None:
        """Starts the missing children, each with a thread that waits for it.

        Raises SandboxBusy if one cannot be started and no other child is there to wait for.
        """
        with self._changed:
            try:
                while not self._closed and len(self._starting) + len(self._children) < self.CHILDREN:
                    self._start_one()
            except (OSError, RuntimeError) as e:  # no more file descriptors, processes, memory or threads
                log.warning("cannot start a child process for templates or grammars: %s", e)
                if not self._starting and not self._children:
                    raise SandboxBusy from e

    def _start_one(self) -> None:
        child = self._spawn()
        self._starting.add(child)
        try:
            threading.Thread(target=self._wait_for, args=(child,), daemon=True).start()
        except BaseException:
            self._drop(child)
            raise

    def _wait_for(self, child: subprocess.Popen[bytes]) -> None:
        try:
            self._start_seconds = self._started(child)
        except BaseException as e:
            with self._changed:
                self._failed += 1
                self._why = e if isinstance(e, SandboxBusy) else SandboxBusy()
                self._drop(child)
            return
        with self._changed:
            self._starting.discard(child)
            self._children.add(child)
            self._free.append(child)
            self._changed.notify_all()

    def _started(self, child: subprocess.Popen[bytes]) -> float:
        """The seconds of the processor that a child took to start. Raises SandboxBroken and SandboxBusy."""
        try:
            ready = self._exchange(child, {**self._setup, "seconds": self.seconds}, START_SECONDS)
            if "cannot" not in ready:
                return float(ready["seconds"])
            why = ready["cannot"]
        except SandboxError as e:  # it says what a request would be told
            slow = "took longer" in str(e)
            why = str(e) if slow else f"it ended with the status {child.poll()}"
        log.error("a child process for templates or grammars cannot start: %s", why)
        raise SandboxBroken(why)

    @staticmethod
    def _spawn() -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if k != "EAGLE3_API_KEY"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGES, env.get("PYTHONPATH")]))
        command, pipe, null = [sys.executable, "-c", _CHILD], subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=null)

    def _drop(self, child: subprocess.Popen[bytes]) -> int:
        """Kills a child and returns its exit status. May be called again."""
        child.kill()
        status = child.wait()
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):  # closing sends what is still in the buffer
                pipe.close()
        with self._changed:
            self._starting.discard(child)
            self._children.discard(child)
            self._changed.notify_all()
        return status

    def _exchange(
        self, child: subprocess.Popen[bytes], request: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Sends a request and waits for the answer. If this raises, the caller drops the child.

        SandboxBusy if somebody else ended the child: that says nothing of the request. It is _NotReceived
        if the child had not yet said that it has the request.
        """
        assert child.stdin and child.stdout  # pipes, by _spawn()
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as e:  # the system has no more threads
            raise SandboxBusy from e
        received = False
        try:
            send(child.stdin, request)
            received = receive(child.stdout) == RECEIVED
            return receive(child.stdout)
        except (OSError, EOFError, ValueError):
            status = _status(child)
            slow = late.is_set() or status == -signal.SIGALRM
            if self._closed:
                raise SandboxBusy from None
            if status in _FROM_OUTSIDE and not slow:
                raise (SandboxBusy if received else _NotReceived) from None
            message = f"it took longer than {seconds:g} s"
            raise SandboxError(message if slow else "it is too large, too deep, or not supported") from None
        finally:
            timer.cancel()


def _status(child: subprocess.Popen[bytes]) -> int | None:
    """The exit status of a child that has closed its pipe, None if it has not ended and is killed now."""
    try:
        return child.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return None


def send(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Writes one message: its length in 4 bytes, then JSON."""
    data = json.dumps(message).encode()
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> dict[str, Any]:
    """Reads the next message. Raises EOFError at the end."""
    head = pipe.read(4)
    size = struct.unpack("<I", head)[0] if len(head) == 4 else 0
    data = pipe.read(size) if 0 < size <= MAX_MESSAGE else b""
    if not data or len(data) != size:
        raise EOFError
    return json.loads(data)
