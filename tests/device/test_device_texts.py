"""The text on a device: bit for bit that of plain decoding there, and of the CPU with weights as in the file.

EAGLE3_TEST_PROMPTS=100 tries more prompts.
"""

import os
import random

import numpy as np
import pytest
import rpc_device
import tiny_models
from batch_tools import jobs_at_once
from tiny_models import HEADS_OF_64, draft_from

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.params import Tree

import llama_cpp

pytestmark = pytest.mark.thorough  # it needs the library of a device
FORMATS = ("F32", "Q8_0", "Q4_0")
LAYERS = {"all layers": 99, "half of them": 3}  # the output matrix counts as one
N, N_PROMPTS = 16, int(os.environ.get("EAGLE3_TEST_PROMPTS", "20"))
SAMPLING = ({"temp": 0.0}, {"temp": 0.9, "top_k": 40})
COMMON = {"n_ctx": 128, "n_batch": 64, "n_threads": 1, "flash_attn": True, "verbose": False}


def asked():
    """[(prompt, sampling)]: greedy and sampled in turns."""
    rng = random.Random(7)
    prompts = [[1, *(rng.randrange(3, 250) for _ in range(rng.choice([3, 9, 40])))] for _ in range(N_PROMPTS)]
    return [(prompt, SAMPLING[i % 2]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=FORMATS)
def made(request, tmp_path_factory, files):
    """(target, head)"""
    folder = tmp_path_factory.mktemp("t")
    return str(tiny_models.target(folder / "t.gguf", kind=request.param, ends=False, **HEADS_OF_64)), files[1]


@pytest.fixture(scope="module")
def answers(device, made):
    """answers(layers): plain decoding's texts. All layers: the CPU's, with weights as in the file."""
    with rpc_device.weights_as_in_the_file(), EagleLlama(made[0], n_max=0, **COMMON) as llm:
        device.reset()
        on_cpu = texts(llm)
        assert device.counts()["graphs"] == 0
    with EagleLlama(made[0], n_max=0, n_gpu_layers=LAYERS["half of them"], **COMMON) as llm:
        half = texts(llm)
    return {"all layers": on_cpu, "half of them": half}.__getitem__


def texts(llm):
    return [tiny_models.take(llm, N, prompt, **sampling) for prompt, sampling in asked()]


def scripted(llm, answers, **_):
    """Trees in which the right token is the last one of each level, so that what stays has to move."""
    draft_from(llm, [prompt + text for (prompt, _), text in zip(asked(), answers)], random.Random(3))


KINDS = {
    "plain": {"n_max": 0},
    "chain of 7": {"n_max": 7},
    "tree": {"tree": Tree(12, 4, 4)},
    "scripted chains": {"n_max": 3},
    "scripted trees": {"tree": Tree(12, 4, 4)},
    "planner": {},
    "planner and text": {"text": True},
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_slot(device, made, answers, cheap_rows, kind, layers):
    target, head = made
    with EagleLlama(target, eagle_path=head, n_gpu_layers=LAYERS[layers], **COMMON, **KINDS[kind]) as llm:
        if "scripted" in kind:
            scripted(llm, answers(layers))
        device.reset()
        assert texts(llm) == answers(layers)
        assert device.counts()["graphs"] > N_PROMPTS
        assert kind == "plain" or llm.stats.drafted > N_PROMPTS
        assert "scripted" not in kind or llm.stats.accepted > N_PROMPTS


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("params", [EagleParams(3), EagleParams(tree=Tree(12, 4, 4)), EagleParams()])
def test_four_slots(device, made, answers, cheap_rows, params, layers):
    target, head = made
    settings = BatchSettings(target, head, n_parallel=4, n_ctx=128, n_threads=1, n_gpu_layers=LAYERS[layers])

    def work(i):
        prompt, sampling = asked()[i]
        with batcher.request(params=params) as llm:
            return tiny_models.take(llm, N, prompt, **sampling)

    with Batcher(settings) as batcher:
        for first in range(0, N_PROMPTS, 4):
            some = range(first, first + 4)
            got = jobs_at_once(batcher, [lambda i=i: work(i) for i in some])
            assert got == answers(layers)[first : first + 4]


@pytest.mark.parametrize("v", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("layers", LAYERS)
def test_trees_in_caches_of_every_kind(device, made, layers, v):
    """What stays of a tree is moved, whatever its bytes mean: the next row has the bits of a fresh one."""
    type_k, type_v = llama_cpp.GGML_TYPE_Q8_0, getattr(llama_cpp, f"GGML_TYPE_{v}")
    settings = {"n_gpu_layers": LAYERS[layers], "type_k": type_k, "type_v": type_v, **COMMON}
    with (
        EagleLlama(made[0], n_max=0, **settings) as plain,
        EagleLlama(made[0], eagle_path=made[1], tree=Tree(12, 4, 4), **settings) as llm,
    ):
        answers = texts(plain)
        scripted(llm, answers)
        for (prompt, sampling), text in zip(asked(), answers):
            assert tiny_models.take(llm, N, prompt, **sampling) == text
            held = [*prompt, *text][: llm.engine.n_past() + 1]
            llm.engine.steps.decode(held[-1], [])
            ours = logits(llm)
            llm.engine.steps.commit(0)
            plain.reset()
            plain.eval(held)
            assert ours == logits(plain)
        assert llm.stats.accepted > N_PROMPTS


def logits(llm):
    """The bytes of the last row's."""
    row = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).tobytes()
