"""Where layers and caches can be: each place works, with plain decoding's text, or is refused in one line."""

import random

import pytest
from tiny_models import PROMPT, draft_from, take

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.params import Tree

import llama_cpp

pytestmark = pytest.mark.thorough  # it needs the library of a device
N = 60
COMMON = {"n_ctx": 256, "n_threads": 1, "flash_attn": True, "verbose": False}
PLACES = {
    "the output matrix alone": {"n_gpu_layers": 1},
    "half of the layers": {"n_gpu_layers": 3},
    "all layers on two devices": {"n_gpu_layers": 99},
    "most of them on the second": {"n_gpu_layers": 99, "tensor_split": [0.25, 0.75]},
    "the second device": {"n_gpu_layers": 99, "split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE, "main_gpu": 1},
    "the cache on the host": {"n_gpu_layers": 99, "offload_kqv": False},
    "half, and the cache on the host": {"n_gpu_layers": 3, "offload_kqv": False},
}
DRAFTS = {"chains": {"n_max": 3}, "trees": {"tree": Tree(12, 4, 4)}}
TENSORS = {"n_gpu_layers": 99, "split_mode": 3}  # llama.h: LLAMA_SPLIT_MODE_TENSOR


@pytest.fixture(scope="module", params=PLACES)
def place(request, two_devices, files):
    """(settings, plain decoding's text there)"""
    settings = {**COMMON, **PLACES[request.param]}
    with EagleLlama(files[0], n_max=0, **settings) as plain:
        return settings, take(plain, N)


@pytest.mark.parametrize("scripted", [False, True], ids=["the head's", "scripted"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_text_in_every_place(two_devices, files, place, drafts, scripted):
    """Scripted drafts have many lengths, and so do the graphs that are kept."""
    settings, text = place
    with EagleLlama(files[0], eagle_path=files[1], **settings, **DRAFTS[drafts]) as llm:
        if scripted:
            draft_from(llm, [PROMPT + text], random.Random(1))
        two_devices[0].reset()
        for _ in range(2):
            assert take(llm, N) == text
        assert two_devices[0].counts()["graphs"] > 0 and llm.stats.drafted > N / 2
        assert not scripted or llm.stats.accepted > N / 2


def test_slots_on_two_devices(two_devices, files):
    with EagleLlama(files[0], n_max=0, n_gpu_layers=99, **COMMON) as plain:
        prompts = [[1, 60 + i, 70] for i in range(4)]
        texts = [take(plain, N, prompt) for prompt in prompts]
    with Batcher(BatchSettings(*files, n_parallel=4, n_ctx=256, n_threads=1, n_gpu_layers=99)) as batcher:
        for prompt, text in zip(prompts, texts):
            with batcher.request() as llm:
                assert take(llm, N, prompt) == text


def test_tensors_split_over_devices(two_devices, files):
    """A head's cannot be split, nor does such a cache take trees: one warning, and plain decoding."""
    with EagleLlama(files[0], n_max=0, **COMMON, **TENSORS) as plain:
        text = take(plain, N)
    with pytest.warns(RuntimeWarning, match="split over devices") as warned:
        llm = EagleLlama(files[0], eagle_path=files[1], n_max=3, **COMMON, **TENSORS)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert take(llm, N) == text and llm.stats.drafted == 0
    draft_from(llm, [PROMPT + text], random.Random(1))
    assert take(llm, N) == text and llm.stats.accepted > N / 4
    assert not llm.engine.can_tree
    llm.close()
    with EagleLlama(files[0], text=True, **COMMON, **TENSORS) as llm:
        assert take(llm, N) == text


def test_rows_split_over_devices(two_devices, files):
    """The RPC backend has no such buffers. The file is whole, and the error does not blame it."""
    with pytest.raises(EagleError, match="split_mode.*n_gpu_layers") as error:
        EagleLlama(files[0], n_gpu_layers=99, split_mode=llama_cpp.LLAMA_SPLIT_MODE_ROW, **COMMON)
    assert "\n" not in str(error.value) and "damaged" not in str(error.value)


@pytest.mark.parametrize("layers", [99, 3])
def test_saved_states_on_two_devices(two_devices, files, layers):
    """Rows of trees that were moved are saved where they are now."""
    settings = {"tree": Tree(12, 4, 4), "n_gpu_layers": layers, **COMMON}
    with EagleLlama(files[0], eagle_path=files[1], **settings) as llm:
        text = take(llm, N)
        draft_from(llm, [PROMPT + text], random.Random(1))
        assert take(llm, N // 2) == text[: N // 2] and llm.stats.accepted > N / 4
        state = llm.save_state()
        take(llm, N, [1, 90, 91])
        llm.load_state(state)
        assert take(llm, N // 2, PROMPT + text[: N // 2]) == text[N // 2 :]
