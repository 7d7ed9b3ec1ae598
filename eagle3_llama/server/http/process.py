"""The server's process: its socket, its signals, and draining at the end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI

from ...errors import EagleError, ErrorKind
from ..errors import MAX_HEADERS
from ..settings import ServerSettings
from .app import create_app
from .connection_limits import connection_limit, protocol

M_MMAP_THRESHOLD, LARGE = -3, 1 << 17  # from malloc.h; glibc's initial threshold in bytes
OVERTIME = 5.0  # seconds past --grace until the process ends although a native call still runs
AT_ONCE = 2.0  # the same after a second signal


def serve(settings: ServerSettings) -> None:
    """Loads the model and serves until SIGTERM or SIGINT. Raises EagleError if it cannot start."""
    most = connection_limit(settings.max_connections)
    listener = listen_at(settings)
    log_to_stderr()
    keep_memory_flat()
    # imported here, because it loads libllama: a port in use is reported before that
    from ...batching.batcher import Batcher, BatchSettings

    batcher = Batcher(BatchSettings(**settings.batch()))
    app = create_app(settings, batcher)
    server = DrainingServer(uvicorn_config(app, most), settings, app.state.server.gate, _describe(batcher))
    try:
        server.run(sockets=[listener])
    finally:
        # threads that were cancelled still use the model, until the call that they are in returns
        if not server.gate.wait(0.0 if server.force_exit else OVERTIME):
            os._exit(128 + signal.SIGTERM)
        batcher.close(0.0)


def _describe(batcher: Any) -> str:
    """The head, the slots and the threads, as they are and not as they were asked for."""
    count = lambda n, what: f"{n} {what}{'' if n == 1 else 's'}"
    head = "no head"
    if kind := batcher.engine.drafter:
        head = f"{'head' if kind == 'head' else 'draft model'} {os.path.basename(batcher.settings.eagle)}"
    slots = f"{count(batcher.n_parallel, 'slot')} of {batcher.n_ctx} tokens"
    return f"{head}, {slots}, {count(batcher.base.n_threads, 'thread')}"


def uvicorn_config(app: FastAPI, most: int, parser: str | None = None) -> uvicorn.Config:
    """uvicorn's configuration for a server with up to `most` connections. parser: see protocol()."""
    return uvicorn.Config(
        app,
        http=protocol(most, parser),
        ws="none",  # there is no such route; uvicorn would count the connection no longer
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEADERS,
        lifespan="on",
    )


def keep_memory_flat() -> None:
    """Keeps glibc's mmap threshold at its initial value, so that freed large blocks go back to the system.

    By default, glibc raises the threshold when a large block is freed. Then compute buffers and samplers'
    arrays come from the heap and fragment it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)


def listen_at(settings: ServerSettings) -> socket.socket:
    """A bound socket. Raises EagleError if the address cannot be used.

    IPPROTO_TCP is explicit, because asyncio disables Nagle's algorithm (40 ms per answer) only then.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as e:
        message = f"cannot listen on {settings.host}:{settings.port}: {e.strerror or e}"
        raise EagleError(ErrorKind.BAD_ARGUMENT, message) from e
    return listener


def log_to_stderr() -> None:
    """Prints the line of each request without a prefix. Warnings of libraries keep their usual form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("eagle3_llama.server.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False


class DrainingServer(uvicorn.Server):
    """On the first signal, refuses new requests with 503 and gives running ones `grace` seconds to finish.

    On the second signal, stops at once.
    """

    def __init__(self, config: uvicorn.Config, settings: ServerSettings, gate: Any, about: str = "") -> None:
        super().__init__(config)
        self.settings, self.gate, self.about = settings, gate, about
        self._draining: asyncio.Task | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"serving {os.path.basename(self.settings.model)} at http://{shown}:{port}", flush=True)
        if self.about:
            print(self.about, flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal handler: runs in the main thread, between any two of its instructions."""
        if self.gate.draining:
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # what is cut off now is no error
            with contextlib.suppress(RuntimeError):
                _stop_at(AT_ONCE)
            return
        self.gate.draining = True
        with contextlib.suppress(RuntimeError):  # no more threads: draining must begin all the same
            _stop_at(self.settings.grace + OVERTIME)
        loop = getattr(self, "_loop", None)
        if loop is None:
            self.should_exit = True
        else:
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._wait_for_requests())

    async def _wait_for_requests(self) -> None:
        sending = lambda: bool(self.server_state.tasks)
        try:
            await self.gate.drain(self.settings.grace, sending)
        finally:
            self.should_exit = True


def _stop_at(seconds: float) -> None:
    """Ends the process after this time even if a native call hangs, because --grace promises that."""
    timer = threading.Timer(seconds, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()
