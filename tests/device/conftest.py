"""Models that are loaded in this folder's tests can use a device: see tests/kit/rpc_device.py."""

import sys

import pytest
import tiny_models
from tiny_models import HEADS_OF_64


def _registered(n):
    if sys.platform == "win32":
        pytest.skip("the device's library is compiled and loaded as on Linux and macOS")
    import rpc_device

    with rpc_device.registered(n) as devices:
        yield devices if n > 1 else devices[0]


@pytest.fixture(scope="module")
def device():
    yield from _registered(1)


@pytest.fixture(scope="module")
def two_devices():
    yield from _registered(2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target whose text does not end, and a head."""
    d = tmp_path_factory.mktemp("device")
    target = tiny_models.target(d / "target.gguf", ends=False, **HEADS_OF_64)
    return str(target), str(tiny_models.head(d / "head.gguf", n_embd=HEADS_OF_64["n_embd"]))
