"""The server's replicas under Ray, as processes of this machine."""

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest
from server_tools import until

MISSING = "ray is not installed (360 MB): python3 scripts/_env.py --extra ray"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=MISSING)


def below(pid):
    """Processes that descend from pid: {id: command line}."""
    parents, found = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                parents[int(entry)] = int(stat.read().rpartition(")")[2].split()[1])
                found[int(entry)] = cmdline.read().replace(b"\0", b" ").decode("utf-8", "replace")
    mine = {pid}
    while more := {child for child, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {child: found[child] for child in mine - {pid}}


def replicas(server):
    return {
        pid for pid, command in below(server.process.pid).items() if command.startswith("ray::ServeReplica")
    }


def start(command, env):
    """(process, its lines so far, the thread that reads them)."""
    p = subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(p.stdout), daemon=True)
    reader.start()
    return p, lines, reader


def url_in(lines):
    """The address that the command has printed; None if it has not."""
    said = (re.search(r"http://\S+", line) for line in list(lines) if line.startswith("serving"))
    return next((m[0] for m in said if m), None)


@contextlib.contextmanager
def replicated(*options, env=None):
    """`python -m eagle3_llama.server.ray` with these options, ready: url, headers, process, lines."""
    folder, key = tempfile.mkdtemp(prefix="r", dir="/tmp"), secrets.token_hex(8)  # short: sockets lie in it
    own = {"EAGLE3_API_KEY": key, "RAY_TMPDIR": folder}
    own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = {**os.environ, **own, **(env or {})}
    command = [sys.executable, "-m", "eagle3_llama.server.ray", "--port", 0, "--num-cpus", 0.1, *options]
    p, lines, reader = start(command, env)
    seen = {}
    try:
        for more in range(4, -1, -1):
            with contextlib.suppress(AssertionError):  # what it has said is below
                until(lambda: url_in(lines) or p.poll() is not None, 300)
            if p.poll() is not None:
                reader.join(60)
            if url_in(lines) or not more or "timed out during startup" not in "".join(lines):
                break
            p, lines, reader = start(command, env)  # Ray gives a node 30 s to start, on any machine
        assert url_in(lines), "".join(lines)
        seen = below(p.pid)
        headers = {"Authorization": f"Bearer {key}"}
        yield SimpleNamespace(url=url_in(lines), headers=headers, process=p, lines=lines)
    finally:
        seen |= below(p.pid)
        if p.poll() is None:
            p.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(30)
        for pid in (p.pid, *seen) if p.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reader.join(5)
        shutil.rmtree(folder, ignore_errors=True)
