"""Seeds: each that is given is a fixed one, also those that llama.cpp takes for a random one."""

import itertools

import pytest

from eagle3_llama import EagleLlama  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.cli.answer_options import AnswerOptions

ONES = (1 << 32) - 1
SEEDS = [ONES, -1, (1 << 63) - 1, ONES + (1 << 32), -(1 << 32) - 1]
CTX = {"n_ctx": 256, "n_threads": 1, "verbose": False}
HOT = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = [1, 60, 70]


def by_generate(llm, seed):
    llm.set_seed(seed)
    return list(itertools.islice(llm.generate(PROMPT, temp=2.0, top_k=0, top_p=1.0, min_p=0.0), 24))


def by_call(llm, seed):
    return llm(PROMPT, max_tokens=24, seed=seed, **HOT)["choices"][0]["text"]


def by_mirostat(llm, seed):
    return llm(PROMPT, max_tokens=24, seed=seed, temperature=2.0, mirostat_mode=2)["choices"][0]["text"]


@pytest.mark.parametrize("way", [by_generate, by_call, by_mirostat])
def test_a_given_seed_is_fixed(endless, way):
    """In a call of its own, and as the request of a batcher, which the server makes."""
    with EagleLlama(endless[0], text=False, **CTX) as llm:
        texts = [way(llm, seed) for seed in SEEDS]
        assert texts == [way(llm, seed) for seed in SEEDS]
        others = [way(llm, seed) for seed in (0, 1, ONES - 1, 1 << 32)]
        assert len(set(map(str, texts))) == 1 and str(texts[0]) not in map(str, others)
        assert others[0] == others[3]  # the low 32 bits count
    with Batcher(BatchSettings(endless[0], n_parallel=1, n_ctx=256, n_threads=1, text=False)) as batcher:
        with batcher.request() as request:
            assert [way(request, seed) for seed in (-1, ONES)] == texts[:2]


def test_choices_of_one_seed_differ(endless):
    """Choice i has seed + i: that in the place of a random one is not its neighbour's."""
    with EagleLlama(endless[0], text=False, **CTX) as llm:
        assert len({by_call(llm, seed) for seed in (ONES - 2, ONES - 1, ONES, ONES + 1)}) == 4


def test_the_seed_of_a_command(endless):
    from pathlib import Path

    texts = []
    for _ in range(2):
        llm = AnswerOptions(Path(endless[0]), n_ctx=256, threads=1, seed=ONES).load()
        texts.append(list(itertools.islice(llm.generate(PROMPT, temp=2.0, top_k=0), 24)))
        llm.close()
    assert texts[0] == texts[1]
