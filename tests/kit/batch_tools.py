"""A batcher of tiny models, a plain Llama beside it, and texts of both: what tests of batching share."""

import ctypes
import random
import threading

import pytest
import tiny_models
from threads import held, outcome, wait_for

from eagle3_llama.batching import Batcher, BatchSettings  # before llama_cpp: it brings the library

import llama_cpp
from llama_cpp import Llama

N_CTX, EOS = 512, 2


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def tiny(request, tmp_path_factory):
    at = tmp_path_factory.mktemp("tiny")
    return str(tiny_models.target(at / "target.gguf", kind=request.param)), str(
        tiny_models.head(at / "head.gguf")
    )


@pytest.fixture
def batcher(tiny):
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=3, n_ctx=N_CTX, n_threads=1))
    yield b
    b.close()


@pytest.fixture
def plain(tiny):
    llm = Llama(tiny[0], n_ctx=N_CTX, n_threads=1, flash_attn=True, verbose=False)
    yield llm
    llm.close()


def take(llm, n, prompt, **sampling):
    """At most n tokens, up to the end of generation; Llama's generate goes on beyond it."""
    out = []
    for token in llm.generate(prompt, **sampling):
        out.append(token)
        if len(out) == n or token == EOS:
            break
    return out


def alone(plain, n, prompt, seed=None, **sampling):
    plain.reset()
    if seed is not None:
        plain.set_seed(seed)
    return take(plain, n, prompt, **sampling)


def prompts(n, seed=0):
    rng = random.Random(seed)
    return [[1, *(rng.randrange(3, 250) for _ in range(rng.choice([3, 20, 70, 130, 300])))] for _ in range(n)]


def jobs_at_once(batcher, works):
    """Runs each work in a thread of its own; their requests get their slots together."""
    got = [None] * len(works)

    def run(i):
        got[i] = outcome(works[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    with held(batcher):
        for thread in threads:
            thread.start()
        wait_for(lambda: batcher.waiting() == len(works))
    for thread in threads:
        thread.join(60)
    return got


def shared_rounds_fail(batcher, monkeypatch, times=1):
    """llama.cpp aborts the decode of a round of several slots, so many times. The sizes of the rounds."""
    engine, sizes, left = batcher.engine, [], [times]
    own, abort = engine.round, ctypes.c_bool(False)
    callback = llama_cpp.ggml_abort_callback(lambda _: abort.value)
    llama_cpp.llama_set_abort_callback(batcher.base._ctx.ctx, callback, None)

    def round_(asks, samplers):
        sizes.append(len(asks))
        abort.value = len(asks) > 1 and left[0] > 0
        left[0] -= abort.value
        try:
            return own(asks, samplers)
        finally:
            abort.value = False

    monkeypatch.setattr(engine, "round", round_)
    batcher._abort = callback  # it must live as long as the context
    return sizes
