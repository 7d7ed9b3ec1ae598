"""A batcher of tiny models, a plain Llama beside it, and texts of both: what tests of batching share."""

import random

import pytest
import tiny_models

from eagle3_llama.batching import Batcher, BatchSettings  # before llama_cpp: it brings the library

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
