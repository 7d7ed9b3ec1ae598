"""A grammar's time: whoever takes more than there is fails alone."""

import functools
import itertools

import pytest
from batch_tools import jobs_at_once
from tiny_models import PROMPT

from eagle3_llama import EagleError, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.common.sampling_budget import ROW_SECONDS, ROWS, SamplingBudget


def spent(budget, *rows):
    """How many of these (seconds, tokens) it lets pass."""
    for i, (seconds, n) in enumerate(rows):
        try:
            budget.spend(seconds, n)
        except EagleError as e:
            assert e.kind is ErrorKind.BAD_ARGUMENT and "ms a token" in str(e)
            return i
    return len(rows)


def test_what_a_budget_lets_pass():
    row = ROW_SECONDS
    assert spent(SamplingBudget(100), *[(row, 1)] * 1000) == 1000  # what each token adds
    assert spent(SamplingBudget(100), *[(2 * row, 1)] * 1000) == ROWS - 1  # twice of it
    assert spent(SamplingBudget(100), *[(2 * row, 2)] * 1000) == 1000  # rounds of two tokens
    assert spent(SamplingBudget(100), *[(0.0, 1)] * 1000, (ROWS * row * 0.9, 1), (ROWS * row, 1)) == 1001
    assert spent(SamplingBudget(100), (ROWS * row * 1.1, 1)) == 0  # one expensive place
    assert spent(SamplingBudget(500_000), *[(10 * row, 1)] * 100) == 100  # a vocabulary ten times as large


@pytest.fixture
def batcher(endless):
    with Batcher(BatchSettings(*endless, n_parallel=3, n_ctx=256, n_threads=1)) as b:
        yield b


def test_a_slow_grammar_fails_alone(batcher, monkeypatch):
    """Its sampler's clock goes faster than its budget; others have grammars and processors, or none."""
    from llama_cpp.llama_grammar import LlamaGrammar

    def work(prompt, **more):
        with batcher.request() as llm:
            return list(itertools.islice(llm.generate(prompt, temp=0.0, **more), 30))

    others = [
        functools.partial(work, [1, 77]),
        functools.partial(work, [1, 99, 5], logits_processor=[lambda ids, scores: scores]),
    ]
    slow = functools.partial(work, PROMPT, grammar=LlamaGrammar.from_string("root ::= .*", verbose=False))
    expected = [other() for other in others]
    assert len(slow()) == 30  # within its time

    clock = batcher.engine.sampling_seconds
    monkeypatch.setattr(batcher.engine, "sampling_seconds", lambda slot: clock(slot) + 3 * ROW_SECONDS * 64)
    with pytest.raises(EagleError, match="takes too long"):
        slow()
    failed = []

    def fails():
        with pytest.raises(EagleError, match="takes too long"):
            slow()
        failed.append(True)

    assert jobs_at_once(batcher, [*others, fails])[:2] == expected and failed
    monkeypatch.undo()
    assert len(slow()) == 30


def test_the_time_of_each_sampler(batcher):
    """The native clock runs for the slot whose sampler works, and begins anew with each round."""
    with batcher.request() as llm:
        list(itertools.islice(llm.generate(PROMPT, temp=0.0), 10))
    seconds = batcher.inbox.run(lambda: [batcher.engine.sampling_seconds(slot) for slot in range(3)])
    assert sum(s > 0.0 for s in seconds) == 1 and seconds[0] < 60.0
