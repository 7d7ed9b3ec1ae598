"""The last token of a prompt whose beginning a slot holds is decoded in the round of the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from batch_tools import alone, batcher, jobs_at_once, plain, shared_rounds_fail, take, tiny  # noqa: F401
from threads import ended, held, wait_for

from eagle3_llama import EagleParams
from eagle3_llama.batching import Batcher, BatchSettings

from llama_cpp import LlamaGrammar

SHARED = [1, *range(20, 90)]
PROMPTS = [[*SHARED, 100 + i] for i in range(3)]


@pytest.fixture
def chunks(batcher, monkeypatch):
    """The tokens of each chunk of a prompt that is decoded by itself."""
    seen, prefill = [], batcher.engine.prefill

    def watched(tokens, *args, **kwargs):
        seen.append(list(tokens))
        return prefill(tokens, *args, **kwargs)

    monkeypatch.setattr(batcher.engine, "prefill", watched)
    return seen


def fill_slots(batcher):
    """Each slot then holds one of the prompts, and a text behind it."""

    def work(prompt):
        with batcher.request(params=EagleParams(n_max=0)) as llm:
            return take(llm, 4, prompt, temp=0.0)

    got = jobs_at_once(batcher, [lambda p=p: work(p) for p in PROMPTS])
    assert all(isinstance(text, list) for text in got), got


KINDS = {
    "greedy": dict(temp=0.0),
    "drawn": dict(temp=0.9, top_k=50),
    "penalties": dict(repeat_penalty=1.3, frequency_penalty=0.4, temp=0.7),
    "mirostat": dict(mirostat_mode=2, temp=0.8),
    "grammar": dict(grammar="root ::= [a-z ]+", temp=0.8),
}


def sampling(kind):
    kw = dict(KINDS[kind])
    if "grammar" in kw:
        kw["grammar"] = LlamaGrammar.from_string(kw["grammar"], verbose=False)
    return kw


@pytest.mark.parametrize("params", [None, EagleParams(n_max=0), EagleParams(n_max=3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_as_alone(batcher, plain, chunks, kind, params):
    fill_slots(batcher)
    chunks.clear()
    before = batcher.snapshot()

    def work(prompt):
        with batcher.request(params=params) as llm:
            llm.set_seed(5)
            return take(llm, 30, prompt, **sampling(kind))

    got = jobs_at_once(batcher, [lambda p=p: work(p) for p in PROMPTS])
    assert got == [alone(plain, 30, p, seed=5, **sampling(kind)) for p in PROMPTS]
    now = batcher.snapshot()
    assert chunks == []
    assert now["prompt_tokens"] - before["prompt_tokens"] == len(PROMPTS)
    assert now["reused_tokens"] - before["reused_tokens"] == len(PROMPTS) * len(SHARED)


def test_it_joins_a_text_under_way(batcher, plain, chunks):
    """One that comes while another generates takes no pass of its own, and the other one's text stays."""
    fill_slots(batcher)
    chunks.clear()
    texts, begun, go_on, over = {}, threading.Event(), threading.Event(), threading.Event()

    def first():
        with batcher.request() as llm:
            texts[0] = []
            for token in llm.generate(PROMPTS[0], temp=0.0):
                texts[0].append(token)
                if len(texts[0]) == 3:
                    begun.set()
                    assert go_on.wait(60)
                if len(texts[0]) == 40:
                    break
            assert over.wait(60)  # what was made ahead may be read before the other one begins

    def second():
        try:
            with batcher.request() as llm:
                texts[1] = take(llm, 20, PROMPTS[1], temp=0.0)
        finally:
            over.set()

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert begun.wait(60)
    chunks.clear()  # a lone one's last token is a chunk
    with held(batcher):
        two.start()
        wait_for(lambda: batcher.waiting() == 1)
        go_on.set()
        wait_for(lambda: any(s.job is not None and s.job.state.name == "GENERATING" for s in batcher._slots))
    ended(one, two, seconds=120)
    assert texts[0] == alone(plain, 40, PROMPTS[0], temp=0.0)
    assert texts[1] == alone(plain, 20, PROMPTS[1], temp=0.0)
    assert chunks == []


def test_processors_see_the_whole_prompt(batcher, chunks):
    fill_slots(batcher)
    chunks.clear()
    seen = {0: [], 1: [], 2: []}

    def work(i):
        def look(ids, scores):
            seen[i].append(ids.tolist())
            return scores

        with batcher.request(params=EagleParams(n_max=2)) as llm:
            return take(llm, 6, PROMPTS[i], temp=0.0, logits_processor=[look])

    texts = jobs_at_once(batcher, [lambda i=i: work(i) for i in range(3)])
    assert chunks == []
    for i, text in enumerate(texts):
        assert seen[i][: len(text)] == [[*PROMPTS[i], *text[:k]] for k in range(len(text))]


def test_rows_for_the_reader_and_logprobs(batcher, plain, chunks):
    fill_slots(batcher)
    chunks.clear()
    asked = dict(max_tokens=5, temperature=0.0, logprobs=3)

    def work(prompt):
        with batcher.request() as llm:
            return llm.create_completion(prompt, **asked)["choices"][0]

    got = jobs_at_once(batcher, [lambda p=p: work(p) for p in PROMPTS])
    assert chunks == []
    for prompt, choice in zip(PROMPTS, got):
        with batcher.request() as llm:
            want = llm.create_completion(prompt, **asked)["choices"][0]
        assert choice["text"] == want["text"]
        assert choice["logprobs"]["tokens"] == want["logprobs"]["tokens"]
        np.testing.assert_array_equal(
            choice["logprobs"]["token_logprobs"], want["logprobs"]["token_logprobs"]
        )
        assert choice["logprobs"]["top_logprobs"] == want["logprobs"]["top_logprobs"]


def test_a_failed_round_is_tried_one_by_one(batcher, plain, chunks, monkeypatch):
    fill_slots(batcher)
    chunks.clear()
    shared_rounds_fail(batcher, monkeypatch)

    def work(prompt):
        with batcher.request() as llm:
            return take(llm, 12, prompt, temp=0.0)

    got = jobs_at_once(batcher, [lambda p=p: work(p) for p in PROMPTS])
    assert got == [alone(plain, 12, p, temp=0.0) for p in PROMPTS]
    assert chunks == []


def test_an_echoed_prompt_is_decoded_by_itself(batcher, chunks):
    """All its rows are wanted, so none of them is taken from a slot."""
    fill_slots(batcher)
    chunks.clear()

    def work(prompt):
        with batcher.request() as llm:
            return llm.create_completion(prompt, max_tokens=1, echo=True, logprobs=1, temperature=0.0)

    jobs_at_once(batcher, [lambda p=p: work(p) for p in PROMPTS])
    assert sorted(sum(chunks, [])) == sorted(sum(PROMPTS, []))


def test_a_prompt_of_one_token_has_nothing_to_hold(tiny, plain):
    with Batcher(BatchSettings(*tiny, n_parallel=2, n_ctx=128, n_threads=1)) as b:

        def work():
            with b.request() as llm:
                return take(llm, 8, [1], temp=0.0)

        assert jobs_at_once(b, [work, work]) == [alone(plain, 8, [1], temp=0.0)] * 2
