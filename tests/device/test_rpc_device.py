"""The device of the tests itself: who sees it, and when its server ends."""

import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT
from threads import wait_for

pytestmark = [
    pytest.mark.thorough,  # it needs the library of a device
    pytest.mark.skipif(sys.platform == "win32", reason="as on Linux and macOS"),
]

_HOLDS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import rpc_device
with rpc_device.registered() as (device,):
    print(device.child.pid, flush=True)
    time.sleep(600)
"""


def test_only_its_block_sees_it():
    import ctypes

    import rpc_device

    count = ctypes.CDLL(rpc_device.libraries()[-1]).ggml_backend_dev_count
    before = count()
    for n in (1, 2):
        with rpc_device.registered(n):
            assert count() == before + n
        assert count() == before


def test_the_server_ends_with_a_killed_process():
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, ROOT / "tests" / "kit"], stdout=subprocess.PIPE, text=True
    ) as child:
        server = int(child.stdout.readline())
        assert runs(server)
        child.send_signal(signal.SIGKILL)
    wait_for(lambda: not runs(server), seconds=60)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
