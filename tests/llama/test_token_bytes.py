"""Detokenizing a text that grows: the bytes are llama-cpp-python's, and only new tokens are looked up."""

import random

import pytest
from tiny_models import BOS, PROMPT

from eagle3_llama import EagleLlama  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.llama.token_bytes import KEPT, TokenBytes

from llama_cpp import Llama

SETTINGS = {"n_ctx": 256, "n_threads": 1}


@pytest.fixture(scope="module")
def plain(files):
    llm = Llama(files[0], verbose=False, **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module", params=["alone", "batcher"])
def ours(request, files):
    if request.param == "alone":
        with EagleLlama(files[0], verbose=False, **SETTINGS) as llm:
            yield llm
        return
    with Batcher(BatchSettings(files[0], n_parallel=1, **SETTINGS)) as b, b.request() as llm:
        yield llm


def test_the_bytes_are_llamas(plain, ours):
    """Of texts that grow, that are cut and changed, and of others in between."""
    rng = random.Random(0)
    for begin in ([], [BOS], [BOS, 310]):
        text = list(begin)
        for _ in range(400):
            what = rng.random()
            if what < 0.05:
                del text[rng.randrange(len(text) + 1) :]
            elif what < 0.1 and text:
                text[rng.randrange(len(text))] = rng.randrange(320)
            else:
                text += [rng.randrange(320) for _ in range(rng.choice([1, 1, 2, 9]))]
            special = rng.random() < 0.2
            assert ours.detokenize(text, special=special) == plain.detokenize(text, special=special)
            assert ours.detokenize(text[-3:], prev_tokens=text) == plain.detokenize(
                text[-3:], prev_tokens=text
            )


def test_a_growing_text_looks_up_its_new_tokens():
    """Not all of them again, whatever is asked for in between."""
    asked = []
    token_bytes = TokenBytes(lambda token, special: asked.append(token) or b"x", BOS)
    text = []
    for i in range(4 * KEPT):
        text.append(i)
        assert token_bytes(text, False) == b"x" * len(text)
        token_bytes(text[-2:], False)
        if len(text) > KEPT:
            assert asked == [i, *text[-2:]]
        asked.clear()


def test_completions_look_up_each_token_a_few_times(files):
    with EagleLlama(files[0], verbose=False, **SETTINGS) as llm:
        asked, own = [], llm._model.detokenize
        llm._model.detokenize = lambda tokens, special=False: (
            asked.append(len(tokens)) or own(tokens, special)
        )
        got = llm.create_completion(PROMPT, max_tokens=200, temperature=0.8, seed=1, logit_bias={2: -100})
        assert got["usage"]["completion_tokens"] >= 200 and sum(asked) <= 320  # tokens of the vocabulary
