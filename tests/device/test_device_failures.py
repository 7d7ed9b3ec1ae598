"""Memory of a device that cannot be had, and a device that is lost."""

import signal
import subprocess
import sys

import pytest
from paths import ROOT
from tiny_models import take

from eagle3_llama import EagleError, EagleLlama, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.params import Tree

pytestmark = pytest.mark.thorough  # it needs the library of a device
COMMON = {"n_ctx": 256, "n_gpu_layers": 99, "flash_attn": True, "verbose": False}
N = 40
DRAFTS = {"chains": {"n_max": 3}, "trees": {"tree": Tree(12, 4, 4)}, "planner": {}}


def load(files, drafts="chains"):
    return EagleLlama(files[0], eagle_path=files[1], **COMMON, **DRAFTS[drafts])


def one_line(error):
    message = str(error)
    return "\n" not in message and any(word in message for word in ("memory", "n_ctx", "n_gpu_layers"))


def test_buffers_that_a_load_cannot_have(device, files):
    """Each one of a load and a text: one line says what to do, or it goes on without; the next load works."""
    device.reset()
    with load(files) as llm:
        text = take(llm, N)
    n = device.counts()["buffers"]
    assert n > 5
    failed = 0
    for k in range(n):
        with device.limited(buffers=k):
            try:
                with load(files) as llm:
                    assert take(llm, N) == text
            except EagleError as error:
                failed += 1
                assert one_line(error) and "damaged" not in str(error), (k, str(error))
    assert failed > 4
    with load(files) as llm:
        assert take(llm, N) == text


@pytest.mark.parametrize("drafts", DRAFTS)
def test_buffers_that_a_draft_cannot_have(device, files, drafts):
    """The generation fails in one line, or goes on without; the next one has the text."""
    with EagleLlama(files[0], n_max=0, **COMMON) as plain:
        text = take(plain, N)
    for k in range(4):
        with load(files, drafts) as llm:
            with device.limited(buffers=k):
                try:
                    assert take(llm, N) == text
                except EagleError as error:
                    assert error.kind is ErrorKind.MEMORY and one_line(error), str(error)
            assert take(llm, N) == text


@pytest.mark.parametrize("size", [0, 1 << 16, 1 << 20])
def test_buffers_that_a_prompt_cannot_have(device, files, size):
    """Capture begins, so that the context reserves its graphs again, and cannot."""
    prompt = [1, *(3 + i % 250 for i in range(100))]
    with EagleLlama(files[0], eagle_path=files[1], n_max=0, **COMMON) as llm:
        text = take(llm, N, prompt)
        with device.limited(size=size):
            try:
                llm.eagle_params = EagleParams(2)
                llm.reset()
                assert take(llm, N, prompt) == text
            except EagleError as error:
                assert error.kind is ErrorKind.MEMORY and one_line(error), str(error)
        llm.eagle_params = EagleParams(2)
        assert take(llm, N, prompt) == text and llm.stats.drafted > 0


def test_a_request_fails_alone(device, files):
    """Others of the batcher go on, and so does the next one."""
    with Batcher(BatchSettings(*files, n_parallel=2, n_ctx=128, n_threads=1, n_gpu_layers=99)) as batcher:
        with batcher.request(params=EagleParams(0)) as llm:
            text = take(llm, N)
        with device.limited(buffers=0), batcher.request(params=EagleParams(tree=Tree(40, 6, 8))) as llm:
            try:
                assert take(llm, N) == text
            except EagleError as error:
                assert one_line(error)
        with batcher.request(params=EagleParams(tree=Tree(40, 6, 8))) as llm:
            assert take(llm, N) == text


_LOSES = """
import itertools, sys
sys.path.insert(0, sys.argv[1])
import rpc_device
from eagle3_llama import EagleLlama
with rpc_device.registered() as (device,):
    llm = EagleLlama(sys.argv[2], eagle_path=sys.argv[3], n_max=3, n_ctx=256, n_gpu_layers=99, verbose=False)
    tokens = llm.generate([1, 60, 70], temp=0.0)
    print(len(list(itertools.islice(tokens, 5))), flush=True)
    device.end()
    list(itertools.islice(tokens, 5))
"""


def test_a_device_that_is_lost(files):
    """ggml ends the process. One line says why, without a trace of its stack."""
    command = [sys.executable, "-c", _LOSES, str(ROOT / "tests" / "kit"), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "5\n" and done.returncode == -signal.SIGABRT
    line = done.stderr.strip()
    assert line.startswith("eagle3-llama: the device has failed, which ends") and "\n" not in line
