"""A replica under Ray that loses its device: its process ends, and another one takes its place."""

import itertools
import textwrap

import httpx
import pytest
import rpc_device
from paths import ROOT
from ray_servers import needs_ray, replicas, replicated
from server_tools import until

# Each Python process of the server runs this first. The one that loads the model gets the device.
_DEVICE = """
import importlib.machinery, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "eagle3_llama.batching.batcher" or "default_worker" not in sys.argv[0]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        usual = spec.loader.exec_module
        def exec_module(module):
            usual(module)
            sys.path.append(os.environ["TEST_KIT"])
            import ctypes, rpc_device
            rpc_device.libraries()
            rpc_device.register(ctypes.CDLL(str(rpc_device.built())), os.environ["TEST_DEVICE"])
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def say(client, seed):
    body = {"prompt": [1, 60, 70, seed], "max_tokens": 24, "temperature": 0}
    return client.post("/v1/completions", json=body)


@pytest.mark.thorough
@needs_ray
def test_the_replica_is_replaced(files, tmp_path):
    """The request that it was at fails; those before and after have their text, from two processes."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(_DEVICE))
    device = rpc_device.Device()
    env = {
        "PYTHONPATH": str(tmp_path),
        "TEST_KIT": str(ROOT / "tests" / "kit"),
        "TEST_DEVICE": device.endpoint,
    }
    options = [
        "--model",
        files[0],
        "--eagle",
        files[1],
        "--n-gpu-layers",
        99,
        "--num-gpus",
        0,
        "--threads",
        1,
        "--n-ctx",
        256,
    ]
    try:
        with (
            replicated(*options, env=env) as server,
            httpx.Client(base_url=server.url, timeout=300, headers=server.headers) as client,
        ):
            before = say(client, 1)
            assert before.status_code == 200, before.text
            (first,) = replicas(server)
            device.end()
            assert say(client, 2).status_code >= 500
            device.serve(device.port)
            until(lambda: replicas(server) - {first} and client.get("/ready").status_code == 200, 300)
            for n in itertools.count():  # Ray may still send one to the replica that has ended
                after = say(client, 1)
                if after.status_code == 200 or n == 5:
                    break
            assert after.json()["choices"] == before.json()["choices"]
            lines = [line for line in server.lines if "the device has failed" in line]
            assert lines, "".join(server.lines)
    finally:
        device.end()
