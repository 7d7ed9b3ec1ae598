"""Rounds may use fewer threads than the context has: the bits are the same, and a user can turn it off.

native/tests/thread_test.cpp has the choice itself, on simulated machines.
"""

import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.runtime.session import FIXED_THREADS

from llama_cpp import llama_n_threads, llama_n_threads_batch

KINDS = {
    "plain": EagleParams(n_max=0),
    "chain": EagleParams(n_max=4),
    "planned": EagleParams(),
    "tree": EagleParams(tree="12x3x4"),
}


def answer(files, n_threads, params, **settings):
    """The text of an answer and the logprobs of its tokens, bit for bit."""
    llm = EagleLlama(
        files[0],
        eagle_path=files[1],
        n_ctx=512,
        n_batch=64,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        verbose=False,
        **settings,
    )
    try:
        llm.eagle_params = params
        done = llm.create_completion(PROMPT, max_tokens=24, temperature=0.8, seed=5, logprobs=4)
        return done["choices"][0]
    finally:
        llm.close()


# trees need flash attention
@pytest.mark.parametrize(
    "kind, flash_attn", [(k, fa) for k in KINDS for fa in (True, False) if fa or k != "tree"]
)
def test_bits_do_not_depend_on_the_number_of_threads(files, kind, flash_attn):
    alone = answer(files, 1, KINDS[kind], flash_attn=flash_attn)
    assert len(alone["logprobs"]["tokens"]) > 4
    for n_threads in (2, 3):
        assert answer(files, n_threads, KINDS[kind], flash_attn=flash_attn) == alone


def test_rounds_leave_the_users_numbers_as_they_were(files):
    llm = EagleLlama(files[0], eagle_path=files[1], n_ctx=256, n_threads=3, n_threads_batch=2, verbose=False)
    try:
        assert 1 <= llm.engine.threads <= 3
        for i, _ in enumerate(llm.generate(PROMPT, temp=0.0)):
            assert llama_n_threads(llm._ctx.ctx) == 3
            assert llama_n_threads_batch(llm._ctx.ctx) == 2
            assert 1 <= llm.engine.threads <= 3
            if i == 8:
                break
    finally:
        llm.close()


def test_a_load_measures_each_number_and_keeps_the_text(files):
    llm = EagleLlama(files[0], eagle_path=files[1], n_ctx=256, n_threads=4, verbose=False)
    try:
        llm.eval(PROMPT)
        llm.engine.measure_threads()
        assert llm.engine.n_past() == len(PROMPT)
        assert llm.engine.threads in (4, 3, 2, 1)
    finally:
        llm.close()


def test_it_can_be_turned_off(files, monkeypatch):
    monkeypatch.setenv(FIXED_THREADS, "1")
    llm = EagleLlama(files[0], eagle_path=files[1], n_ctx=256, n_threads=4, verbose=False)
    try:
        llm.engine.measure_threads()
        assert llm.engine.threads == 4
    finally:
        llm.close()
