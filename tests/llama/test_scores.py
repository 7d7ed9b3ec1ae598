"""logits_all, scores, sample(): what a caller of llama_cpp.Llama reads there."""

import itertools
import random

import numpy as np
import pytest
from tiny_models import PROMPT, draft_from, take

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library

from llama_cpp import Llama, LogitsProcessorList

CTX = {
    "n_ctx": 256,
    "n_batch": 32,
    "n_threads": 1,
    "n_threads_batch": 1,
    "flash_attn": True,
    "verbose": False,
}
TEXT = [1, *(3 + i * 7 % 300 for i in range(90))]  # three batches


@pytest.fixture(scope="module")
def plain(files):
    llm = Llama(files[0], logits_all=True, **CTX)
    yield llm
    llm.close()


@pytest.fixture
def eagle(files):
    llm = EagleLlama(files[0], eagle_path=files[1], logits_all=True, **CTX)
    yield llm
    llm.close()


def same_scores(plain, eagle):
    assert eagle.n_tokens == plain.n_tokens and eagle.eval_tokens == plain.eval_tokens
    assert eagle.scores.shape == plain.scores.shape and eagle.scores.dtype == plain.scores.dtype
    assert eagle._scores.shape == plain._scores.shape
    np.testing.assert_allclose(eagle._scores, plain._scores, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.array(eagle.eval_logits), np.array(plain.eval_logits), rtol=1e-3, atol=1e-3)


def test_eval_fills_scores(plain, eagle):
    """In one chunk, in several, after a reset, after a rewind: as perplexity scripts use it."""
    for chunks in ([TEXT], [TEXT[:5], TEXT[5:6], TEXT[6:]], [TEXT[:40]]):
        for llm in (plain, eagle):
            llm.reset()
            for chunk in chunks:
                llm.eval(chunk)
        same_scores(plain, eagle)
    for llm in (plain, eagle):
        llm.n_tokens = 10
        llm.eval([7, 8])
    same_scores(plain, eagle)

    def perplexity(llm):
        llm.reset()
        llm.eval(TEXT)
        return np.exp(-np.mean([Llama.logits_to_logprobs(llm.scores[i])[t] for i, t in enumerate(TEXT[1:])]))

    assert perplexity(eagle) == pytest.approx(perplexity(plain), rel=1e-3)


@pytest.mark.parametrize(
    "params",
    [EagleParams(n_max=3), EagleParams(tree="12x3x4"), EagleParams(n_max=0)],
    ids=["chain", "tree", "plain"],
)
def test_generation_fills_scores(plain, eagle, params):
    """At every token, with prompts of which a part was there."""
    eagle.eagle_params = params
    plain.reset()
    eagle.reset()
    texts = []
    draft_from(eagle, texts, random.Random(4))
    for prompt in (PROMPT, PROMPT[:4] + [9, 9]):
        texts.append(prompt + take(plain, 40, prompt))
        plain.reset()
        before = eagle.stats.accepted
        pairs = zip(plain.generate(prompt, temp=0.0), eagle.generate(prompt, temp=0.0))
        for one, other in itertools.islice(pairs, 20):
            assert one == other
            same_scores(plain, eagle)
        assert params.n_max == 0 or eagle.stats.accepted > before


def test_scores_come_with_a_state(plain, eagle):
    """Of a state that has none, nothing is known: not the rows of another text."""
    for llm in (plain, eagle):
        llm.reset()
        llm.eval(TEXT)
    state = eagle.save_state()
    eagle.reset()
    eagle.eval(TEXT[10:])
    eagle.load_state(state)
    same_scores(plain, eagle)
    eagle.reset()
    eagle.eval(PROMPT)
    eagle.load_state(plain.save_state())
    same_scores(plain, eagle)
    state.scores = state.scores[:0]
    eagle.load_state(state)
    assert eagle._scores.shape == plain._scores.shape and np.isnan(eagle._scores).all()


def test_send_fills_scores(plain, eagle):
    plain.reset()
    begun = take(plain, 3)
    generator = eagle.generate(PROMPT, temp=0.0)
    assert list(itertools.islice(generator, 3)) == begun
    generator.send([9, 10])
    plain.reset()
    plain.eval([*PROMPT, *begun, 9, 10])
    same_scores(plain, eagle)


def test_sample_after_eval(plain, eagle, files):
    """All rows of the last batch with logits_all, otherwise the last row. A processor's error is raised."""
    without = EagleLlama(files[0], eagle_path=files[1], **CTX)
    for llm in (plain, eagle, without):
        llm._sampler = None
        llm.reset()
        llm.eval(TEXT[:20])
    sampled, expected = ([llm.sample(temp=0.0, idx=i) for i in range(20)] for llm in (eagle, plain))
    assert sampled == expected
    assert without.sample(temp=0.0) == without.sample(temp=0.0, idx=19) == plain.sample(temp=0.0)
    with pytest.raises(EagleError, match="idx is 3: the logits of that position are not there"):
        without.sample(temp=0.0, idx=3)

    def boom(ids, scores):
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        without.sample(temp=0.0, logits_processor=LogitsProcessorList([boom]))
    without.reset()
    with pytest.raises(EagleError, match="nothing to sample from"):
        without.sample()
    with pytest.raises(EagleError, match="nothing to sample from"):
        next(without.generate([]))
    without.close()


def _goes_on(llm):
    return list(itertools.islice(llm.generate([], reset=False, temp=0.0), 8))


@pytest.mark.parametrize("go_on", [lambda llm: [llm.sample()], _goes_on], ids=["sample", "generate"])
def test_going_on_after_a_generation(plain, files, go_on):
    """From the row after its last token, though a rejected draft was decoded behind it.

    sample() uses the generation's sampler.
    """
    eagle = EagleLlama(files[0], eagle_path=files[1], n_max=4, **CTX)
    plain.reset()
    answer = take(plain, 30)
    draft_from(eagle, [PROMPT + answer], random.Random(5))
    for n in range(1, 10):
        assert take(eagle, n) == answer[:n]
        more = go_on(eagle)
        assert more == answer[n - 1 :][: len(more)]
    eagle.close()


def test_a_sampler_of_a_finished_generation(plain, eagle):
    """Whose processor fails then: the error is this call's, not the next generation's."""
    calls = itertools.count()

    def boom(ids, scores):
        if next(calls) > 3:
            raise ValueError("boom")
        return scores

    list(itertools.islice(eagle.generate(PROMPT, logits_processor=LogitsProcessorList([boom])), 2))
    with pytest.raises(ValueError, match="boom"):
        for _ in range(5):
            eagle.sample()
    plain.reset()
    assert take(eagle, 5) == take(plain, 5)


def test_n_ctx_is_rounded_up(files):
    """By the context, to a multiple of 256 tokens: all of them can be used."""
    llm = EagleLlama(files[0], eagle_path=files[1], logits_all=True, **{**CTX, "n_ctx": 100})
    assert llm.n_ctx() == 256 and len(llm.scores) == 256
    llm.eval([1, *[5] * 199])
    assert len(take(llm, 20, [1, *[5] * 200])) == 20
    llm.close()


def test_tokens_of_a_tree_are_known(files):
    """input_ids holds the accepted ones in their order: the next prompt is compared with them."""
    plain = Llama(files[0], **CTX)
    answer = take(plain, 60)
    plain.close()
    llm = EagleLlama(files[0], eagle_path=files[1], tree="12x3x4", **CTX)
    draft_from(llm, [PROMPT + answer], random.Random(6))
    got = []
    for token in itertools.islice(llm.generate(PROMPT, temp=0.0), 50):
        got.append(token)
        assert llm._input_ids.tolist() == PROMPT + got[:-1]
    assert llm.stats.accepted > 20 and got == answer[:50]
    llm.close()
