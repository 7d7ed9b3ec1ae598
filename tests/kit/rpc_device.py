"""A device on any machine: ggml's RPC backend on the loopback interface, served by a child process's CPU.

Its memory is not the host's, its copies and graphs are asynchronous, and its sums are the CPU's bit for bit
(those of plain weights: EAGLE3_LLAMA_INTERLEAVE=0, EAGLE3_LLAMA_AMX=0). So the text must be that of plain
decoding. Its calls are counted: native/tests/device/counted_device.cpp.

    with registered() as (device,):                 # models that are loaded here can use it
        llm = EagleLlama(path, n_gpu_layers=99)
        device.counts()["synchronize"]
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))
SOURCES = ("ggml/src/ggml-rpc/ggml-rpc.cpp", "ggml/src/ggml-rpc/transport.cpp")
OWN = ROOT / "native" / "tests" / "device" / "counted_device.cpp"
NO_LIMIT = 2**63 - 1


class Device:
    """One server, and the device of this process that it computes for. Counters and limits are of all."""

    def __init__(self):
        self.library = ctypes.CDLL(str(built()))
        self.serve(0)
        atexit.register(self.end)

    def serve(self, port):
        """Starts the server at this port, 0 for one that is free: after end(), the device is there again."""
        command = [sys.executable, __file__, str(port), built(), *libraries()]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.child.stdout.readline())
        self.endpoint = f"127.0.0.1:{self.port}"
        self._await()

    def _await(self):
        """Until it listens: the RPC backend ends the process where it cannot connect."""
        host, port = self.endpoint.split(":")
        end = time.monotonic() + 60
        while True:
            assert self.child.poll() is None, "the RPC server has ended"
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                break
            assert time.monotonic() < end, "the RPC server does not listen"
            time.sleep(0.02)

    def register(self):
        self.registration = register(self.library, self.endpoint)

    def unregister(self):
        unload = ctypes.CDLL(str(libraries()[-1])).ggml_backend_unload
        unload.argtypes = [ctypes.c_void_p]
        unload(self.registration)

    def counts(self):
        """{what: how often, or bytes} since reset()."""
        names = self.library.counted_device_names
        names.restype = ctypes.c_char_p
        fields = names().decode().split()
        out = (ctypes.c_uint64 * len(fields))()
        self.library.counted_device_read(out)
        return dict(zip(fields, out))

    def reset(self):
        self.library.counted_device_reset()

    @contextlib.contextmanager
    def limited(self, size=NO_LIMIT, buffers=NO_LIMIT):
        """In this block no buffer above `size` bytes can be had, and no more than so many buffers."""
        limit = self.library.counted_device_limit
        limit.argtypes = [ctypes.c_uint64, ctypes.c_int64]
        limit(size, buffers)
        try:
            yield
        finally:
            limit(NO_LIMIT, NO_LIMIT)

    def end(self):
        """Kills the server, as if the device were lost."""
        with self.child:
            self.child.kill()


def register(library, endpoint):
    """Makes the device at this endpoint one of the process. library: built(), loaded after libraries()."""
    find = library.counted_device_register
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    registration = find(endpoint.encode())
    assert registration
    return registration


@contextlib.contextmanager
def registered(n=1):
    """n devices, for models that are loaded in this block. Others do not see them."""
    devices = [_device(i) for i in range(n)]
    for device in devices:
        device.register()
    try:
        yield devices
    finally:
        for device in devices:
            device.unregister()


@contextlib.contextmanager
def weights_as_in_the_file():
    """In this block, models on the CPU multiply as the device does: no weight is laid out anew."""
    import llama_cpp

    module = llama_cpp.llama_cpp
    default = module.llama_model_default_params

    def as_in_the_file():
        params = default()
        params.use_extra_bufts = False
        return params

    module.llama_model_default_params = as_in_the_file
    try:
        yield
    finally:
        module.llama_model_default_params = default


@functools.cache
def _device(_):
    """Its server ends with this process: what a failed test did not free may still be on it."""
    return Device()


@functools.cache
def libraries():
    """Those of ggml that this process has loaded, the one that refers to the others last."""
    from eagle3_llama.runtime import hook, library

    library.load()
    folder = library.find_lib_dir()
    found = [folder / f"lib{name}{hook.SUFFIX}" for name in ("ggml-base", "ggml-cpu", "ggml")]
    found = [str(path) for path in found if path.is_file()]
    load(found)
    return found


def load(paths):
    """For those that are loaded later: the device's library names none of ggml's."""
    for path in paths:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


@functools.cache
def built():
    """The device's library, compiled once for a tree and a compiler."""
    import fetch
    from locks import locked

    libraries()
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
    with fetch.using_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR")) as (tree, key):
        made_of = f"{key} {compiler} {OWN.read_text(encoding='utf-8')}"
        folder = fetch.cache_dir() / "test-device"
        out = folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if not out.is_file():
                _compile(compiler, tree, out)
    return out


def _compile(compiler, tree, out):
    command = [*compiler.split(), *"-std=c++17 -O1 -shared -fPIC -fvisibility=hidden -pthread".split()]
    command += ["-DGGML_BACKEND_SHARED", "-DGGML_SHARED"]
    command += ["-I", tree / "ggml/include", "-I", tree / "ggml/src"]
    command += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    with tempfile.TemporaryDirectory(dir=out.parent) as tmp:
        made = Path(tmp) / out.name
        done = subprocess.run(
            [*map(str, command), str(OWN), *(str(tree / s) for s in SOURCES), "-o", str(made)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        os.replace(made, out)


def serve(port, device, *ggml):
    """Tells its port on stdout, and serves until stdin ends: when the process that started it does."""
    load(ggml)
    library = ctypes.CDLL(device)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended
        probe.bind(("127.0.0.1", int(port)))
        port = probe.getsockname()[1]
    print(port, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    library.counted_device_serve(f"127.0.0.1:{port}".encode())


if __name__ == "__main__":
    serve(*sys.argv[1:])
