"""Rows of logits on targets that go back by checkpoints: every way of asking for them gives those of plain
decoding. Tokens that a memory decodes again come first in a batch, where a slot's first row is otherwise."""

import itertools
import random

import hybrid_models
import numpy as np
import pytest
from cores import THREADS
from test_memories import made  # noqa: F401  # the fixture
from tiers import each
from tiny_models import scripted

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.engine import Draft

from llama_cpp import LogitsProcessorList, StoppingCriteriaList

COMMON = {"n_ctx": 256, "n_threads": THREADS, "flash_attn": True, "verbose": False}
PROMPT, WORDS, N = [5, 17, 29, 41, 53], "a5 b7 c8", 40
# pure recurrent states, and hybrids with and without snapshots
TARGETS = ["mamba2", "jamba", "qwen35", "qwen3next", "granitehybrid", "kimi-linear", "nemotron_h", "lfm2"]


def drafting(target, text, head=None, **more):
    """A model whose memory keeps no snapshots, and whose drafts are often wrong."""
    llm, rng = EagleLlama(target, eagle=head, n_rs_seq=0, **COMMON, **more), random.Random(3)

    def propose(ask):
        right = text[len(llm._input_ids) + 1 :][: rng.randint(0, 3)]
        return Draft([t if rng.random() < 0.8 else (t + 1) % llm.n_vocab() for t in right])

    scripted(llm, propose)
    return llm


def by_criteria(llm):
    """The row behind each token, as a stopping criterion gets it."""
    rows = []
    criteria = StoppingCriteriaList([lambda ids, logits: rows.append(np.array(logits)) or False])
    tokens = list(itertools.islice(llm.generate(PROMPT, temp=0.0, stopping_criteria=criteria), N))
    return tokens, rows[:N]


def by_processor(llm):
    rows = []
    processor = LogitsProcessorList([lambda ids, logits: (rows.append(np.array(logits)), logits)[1]])
    tokens = list(itertools.islice(llm.generate(PROMPT, temp=0.0, logits_processor=processor), N))
    return tokens, rows[:N]


def by_scores(llm, save=False):
    """scores of llama-cpp-python, with logits_all. save: a state is saved between two tokens."""
    tokens = []
    for token in itertools.islice(llm.generate(PROMPT, temp=0.0), N):
        tokens.append(token)
        if save:
            llm.save_state()
    return tokens, list(llm.scores[len(PROMPT) - 1 : len(PROMPT) - 1 + N].copy())


def same(got, expected):
    assert got[0] == expected[0] and len(got[1]) == len(expected[1]) == N
    np.testing.assert_allclose(np.stack(got[1]), np.stack(expected[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", each(TARGETS, quick=["mamba2", "qwen35"]))
def test_rows_of_each_token(made, architecture):  # noqa: F811
    target, head = map(str, made(architecture))
    with EagleLlama(target, text=False, **COMMON) as plain:
        expected = by_criteria(plain)
    text = [*PROMPT, *expected[0]]
    for given in (None, head):
        with drafting(target, text, given) as llm:
            for way in (by_criteria, by_processor):
                same(way(llm), expected)
                assert llm.stats.accepted > 0 and llm.stats.drafted > llm.stats.accepted
                llm.stats.reset()
    with drafting(target, text, logits_all=True) as llm:
        for save in (False, True):
            same(by_scores(llm, save), expected)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A hybrid with a tokenizer."""
    model = hybrid_models.MODELS["tiny-hybrid"]
    target = tmp_path_factory.mktemp("hybrid") / "target.gguf"
    hybrid_models.target(target, model, hybrid_models.FOUND["tiny-hybrid", "Q8_0", 0.7])
    return str(target)


def logprobs(llm, **more):
    asked = {"max_tokens": N, "temperature": 0.0, "logprobs": 3, "seed": 1, **more}
    if more.get("stream"):
        chunks = [chunk["choices"][0] for chunk in llm(WORDS, **asked)]
        rows = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        return [x for row in rows for x in row["token_logprobs"]]
    return llm(WORDS, **asked)["choices"][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"echo": True}], ids=["whole", "stream", "echo"])
def test_logprobs(hybrid, more):
    """From the model itself and from a batcher."""
    with EagleLlama(hybrid, text=False, **COMMON) as plain:
        expected = [x or 0.0 for x in logprobs(plain, **more)]
        prompt = plain.tokenize(WORDS.encode())
        text = [*prompt, *itertools.islice(plain.generate(prompt, temp=0.0), N)]
    with drafting(hybrid, text) as llm:
        assert [x or 0.0 for x in logprobs(llm, **more)] == pytest.approx(expected, abs=1e-3)
        assert llm.stats.drafted > llm.stats.accepted > 0
    settings = BatchSettings(hybrid, n_parallel=2, n_rs_seq=0, n_ctx=256, n_threads=THREADS, flash_attn=True)
    with Batcher(settings) as batcher:
        with batcher.request(params=EagleParams()) as llm:
            assert [x or 0.0 for x in logprobs(llm, **more)] == pytest.approx(expected, abs=1e-3)
