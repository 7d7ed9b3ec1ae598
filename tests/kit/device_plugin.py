"""A pytest plugin: the tests of other folders, with models on a device (rpc_device.py).

$EAGLE3_TEST_LAYERS is how many layers models have there, unless a test asks for another number than none.
"""

import functools
import os

import pytest
import rpc_device

import eagle3_llama  # noqa: F401  (before llama_cpp: it brings the library)

import llama_cpp

LAYERS = int(os.environ["EAGLE3_TEST_LAYERS"])


def on_device(init):
    @functools.wraps(init)
    def placed(self, *args, **settings):
        return init(self, *args, **{**settings, "n_gpu_layers": settings.get("n_gpu_layers") or LAYERS})

    return placed


llama_cpp.Llama.__init__ = on_device(llama_cpp.Llama.__init__)


@pytest.fixture(scope="session", autouse=True)
def device():
    with rpc_device.registered() as (found,):
        yield found
