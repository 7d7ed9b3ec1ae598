"""The server as a process: socket, signals, draining."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

import uvicorn

from ..errors import EagleError, ErrorKind
from .app import create_app
from .header_timeout import PatientProtocol
from .settings import ServerSettings

M_MMAP_THRESHOLD, LARGE = -3, 1 << 17  # malloc.h; glibc's own value to begin with
OVERTIME = 5.0  # past --grace, for a native call that does not come back


def serve(settings: ServerSettings) -> None:
    """Loads the model and serves until SIGTERM or SIGINT. Raises EagleError for what stands in the way."""
    listener = listen_at(settings)
    log_to_stderr()
    keep_memory_flat()
    from ..batching.batcher import (  # loads libllama; a port that is taken is said sooner
        Batcher,
        BatchSettings,
    )

    try:
        batcher = Batcher(BatchSettings(**settings.batch()))
    except ValueError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"{settings.model} cannot be loaded: {e}") from e
    app = create_app(settings, batcher)
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        lifespan="on",
    )
    server = DrainingServer(config, settings, app.state.server.gate)
    try:
        server.run(sockets=[listener])
    finally:
        if server.gate.inside:  # threads that did not come back within --grace still use the model
            os._exit(128 + signal.SIGTERM)
        batcher.close(0.0)


def keep_memory_flat() -> None:
    """Has glibc go on giving large blocks back when they are freed. Left alone, it takes ever larger ones from the heap once one has
    been freed, where a graph's buffers and a sampler's array leave holes of all sizes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)


def listen_at(settings: ServerSettings) -> socket.socket:
    """A bound socket. IPPROTO_TCP is said, for only then does asyncio turn Nagle's algorithm off: 40 ms an answer."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as e:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"cannot listen on {settings.host}:{settings.port}: {e.strerror or e}"
        ) from e
    return listener


def log_to_stderr() -> None:
    """One line a request as it is; warnings of libraries in the usual form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("eagle3_llama.server.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False


class DrainingServer(uvicorn.Server):
    """The first signal drains: new requests are told 503, running ones have `grace` seconds. The second one stops at once."""

    def __init__(self, config: uvicorn.Config, settings: ServerSettings, gate: Any) -> None:
        super().__init__(config)
        self.settings, self.gate = settings, gate
        self._draining: asyncio.Task | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        host, port = sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {os.path.basename(self.settings.model)} at http://{shown}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Runs in the main thread, between any two of its instructions."""
        if self.gate.draining:
            self.should_exit = self.force_exit = True
            return
        self.gate.draining = True
        _stop_at(self.settings.grace + OVERTIME)
        loop = getattr(self, "_loop", None)
        if loop is None:
            self.should_exit = True
        else:
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._wait_for_requests())

    async def _wait_for_requests(self) -> None:
        try:
            await self.gate.drain(
                self.settings.grace, lambda: bool(self.server_state.tasks)
            )  # answers being sent
        finally:
            self.should_exit = True


def _stop_at(seconds: float) -> None:
    """Ends the process even if a native call hangs: --grace is a promise."""
    timer = threading.Timer(seconds, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()
