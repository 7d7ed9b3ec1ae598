"""Targets whose sliding window is pruned (swa_full=False): a text that is cut back has lost its window."""

import numpy as np
import pytest
from cores import THREADS
from test_memories import made  # noqa: F401  # the fixture
from tiny_models import take

from eagle3_llama import EagleLlama
from eagle3_llama.runtime import costs
from eagle3_llama.runtime.binding import llama_cpp

WINDOWS = ["gemma2", "gemma3", "gpt-oss", "cohere2"]  # of 32 tokens
COMMON = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64, "n_threads": THREADS, "verbose": False}
TEXT = [3 + 7 * i * i % 120 for i in range(700)]  # the window's layers have 256 cells
CUTS = [690, 500, 300, 20]  # tokens that stay


@pytest.fixture(scope="module", params=WINDOWS)
def target(request, made):  # noqa: F811
    return str(made(request.param, with_head=False)[0])


def load(target, **settings):
    return EagleLlama(target, swa_full=False, **COMMON | settings)


def logits(llm):
    row = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.array(np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)))


def of(llm, ids):
    """The logits of the last of these tokens, which are evaluated in an empty context."""
    llm.reset()
    llm.eval(ids)
    return logits(llm)


def by_eval(llm, n):
    llm.n_tokens = n
    llm.eval([9, 8])


def by_eval_twice(llm, n):
    llm.n_tokens = n + 50
    llm.eval([])
    by_eval(llm, n)


def by_a_prompt(llm, n):
    take(llm, 1, [*TEXT[:n], 9, 8])


def by_sampling(llm, n):
    llm.n_tokens = n
    llm.sample(temp=0.0)
    llm.eval([9, 8])


def by_a_state(llm, n):
    state = llm.save_state()
    state.n_tokens = n
    llm.reset()
    llm.load_state(state)
    llm.eval([9, 8])


WAYS = [by_eval, by_eval_twice, by_a_prompt, by_sampling, by_a_state]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_text_that_is_cut_back_goes_on_as_if_it_were_new(target, way):
    with load(target) as llm, load(target) as fresh:
        for n in CUTS:
            llm.reset()
            llm.eval(TEXT)
            way(llm, n)
            assert llm.n_tokens == n + 2 and llm.input_ids[:n].tolist() == TEXT[:n]
            np.testing.assert_allclose(logits(llm), of(fresh, [*TEXT[:n], 9, 8]), atol=2e-5)


@pytest.mark.parametrize("way", [by_eval, by_a_prompt], ids=lambda way: way.__name__)
def test_where_llama_cpp_python_decodes_itself(target, way):
    """With a draft model of its own, its code cuts texts back, and does not ask what the memory has lost."""

    def nothing(ids, **_):
        return np.empty(0, np.intc)

    with load(target, draft_model=nothing, logits_all=True) as llm, load(target) as fresh:
        for n in CUTS:
            llm.reset()
            llm.eval(TEXT)
            way(llm, n)
            assert llm.n_tokens == n + 2 and llm.input_ids[:n].tolist() == TEXT[:n]
            np.testing.assert_allclose(logits(llm), of(fresh, [*TEXT[:n], 9, 8]), atol=2e-5)


def test_costs_are_measured_where_the_text_cannot_go_back(target):
    """Behind many tokens, then behind its first few, which the window has lost."""
    with load(target) as llm:
        found = costs.measure(llm.engine, 1024, 64, budget=0.2)
        assert found.one_row > 0 and llm.engine.n_past() == 0
