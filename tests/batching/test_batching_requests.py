"""A batcher's request does what a Llama does, hears of its rounds, and counts them."""

import threading

import numpy as np
import pytest
from batch_tools import N_CTX, alone, batcher, jobs_at_once, plain, take, tiny  # noqa: F401 - fixtures too
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.llama.usage import TokenUsage

from llama_cpp import Llama


def test_logits_are_kept_where_asked_for(batcher, plain):
    """Logprobs of generated tokens and of the prompt, as a Llama with logits_all gives them."""
    full = Llama(
        batcher.settings.model, n_ctx=N_CTX, n_threads=1, flash_attn=True, logits_all=True, verbose=False
    )
    ask = dict(max_tokens=12, temperature=0.0, logprobs=3)
    for prompt, echo in ((PROMPT, False), ("x5 g8", True)):
        ask["prompt"] = prompt
        expected = full.create_completion(**ask, echo=echo)["choices"][0]
        with batcher.request() as llm:
            got = llm.create_completion(**ask, echo=echo)
        assert got["choices"][0]["text"] == expected["text"]
        ours, theirs = (c["logprobs"]["token_logprobs"] for c in (got["choices"][0], expected))
        np.testing.assert_allclose(
            [x for x in ours if x is not None], [x for x in theirs if x is not None], rtol=1e-4, atol=1e-5
        )
        assert got["usage"]["completion_tokens_details"].keys() == {
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        }
    full.close()


def test_a_request_has_what_a_llama_has(batcher, plain):
    """Methods that it inherits read them. The context's own things stay with the batcher's model."""
    with batcher.request() as llm:
        for name, value in vars(plain).items():
            if name != "_stack":  # it frees the model
                assert type(getattr(llm, name)) is type(value) or name in ("_logits_all", "_flash_attn"), name
        assert llm._ctx is batcher.base._ctx and llm._text is not batcher.base._text
        for name in ("_engine", "_stack", "nothing_of_the_kind"):
            assert not hasattr(llm, name)


def test_what_was_used():
    one, two = TokenUsage(5, 2, 7, 4, 3), TokenUsage(1, 1, 1, 1, 0)
    assert sum((one, two), TokenUsage()) == TokenUsage(6, 3, 8, 5, 3) and one + two - two == one
    assert one.body() == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_criterion_sees_each_row(batcher, plain):
    """One at a time: only logprobs need all of them kept."""
    seen = []

    def criterion(ids, row):
        seen.append(int(row.argmax()))
        return len(seen) == 40

    with batcher.request(params=EagleParams(n_max=4)) as llm:
        got = take(llm, 99, PROMPT, temp=0.0, stopping_criteria=criterion)
        assert got == alone(plain, 39, PROMPT, temp=0.0) == seen[:-1]
        assert llm._scores.shape == (1, plain.n_vocab())


def test_the_reader_hears_of_rounds(batcher):
    """on_wait() comes once for the prompt's token and once for each round's, whatever a round brings."""
    with batcher.request(params=EagleParams(n_max=4)) as llm:
        tokens, waits = [], []
        llm.on_wait = lambda: waits.append(len(tokens))
        for token in llm.generate(PROMPT, temp=0.0):
            tokens.append(token)
            if len(tokens) >= 40:
                break
        assert waits[:2] == [0, 1] and waits == sorted(set(waits)) and len(waits) == 1 + llm.stats.rounds


def test_sent_tokens_are_refused(batcher, plain):
    """A request cannot take them. The error says so, and the next generation is as ever."""
    expected = alone(plain, 20, PROMPT, temp=0.0)
    with batcher.request(params=EagleParams(4)) as llm:
        steps = llm.generate(PROMPT, temp=0.0)
        assert [next(steps), next(steps)] == expected[:2]
        with pytest.raises(EagleError, match="no sent tokens"):
            steps.send([5])
        assert take(llm, 20, PROMPT, temp=0.0) == expected
        assert llm.lora_path is None


def test_tokens_gather(tiny, plain, monkeypatch):
    """With an interval, a request gets several rounds' tokens together, and its last ones without delay."""
    wait, woken = threading.Event.wait, []

    def watched(event, timeout=None):
        result = wait(event, timeout)
        if timeout == 9.0:
            woken.append(result)
        return result

    monkeypatch.setattr(threading.Event, "wait", watched)
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=1, n_ctx=N_CTX, interval=9.0))
    waits = []
    with b.request(params=EagleParams(n_max=2)) as llm:
        llm.on_wait = lambda: waits.append(llm.n_tokens)
        text = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"]
    assert text == plain.create_completion(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"]
    assert len(waits) <= 3 and llm.stats.rounds > 9 and woken[-1]
    b.close()


def test_levels_of_a_tree_are_counted(batcher):
    """By position, not by node: 20 nodes are on three levels. A chain has a node on each."""
    for params, n_levels in ((EagleParams(tree="20x3x4"), 3), (EagleParams(5), 5)):
        before = batcher.snapshot()
        with batcher.request(params=params) as llm:
            take(llm, 30, PROMPT, temp=0.0)
            assert len(llm.stats.accepted_at) == n_levels and llm.stats.drafted >= n_levels
        after = batcher.snapshot()
        drafts = after["drafts"] - before["drafts"]
        at = [n - m for n, m in zip(after["drafted_at"], [*before["drafted_at"], *[0] * n_levels])]
        assert drafts == at[0] >= at[-1] > 0 and len(after["drafted_at"]) == n_levels
        assert len(after["accepted_at"]) == n_levels


def test_stats_of_a_request_count_rounds(batcher):
    """Not the chunks of its prompt, which an echo with logprobs brings."""
    text = " ".join(chr(97 + i % 26) for i in range(100))  # more than one chunk
    with batcher.request(params=EagleParams(4)) as llm:
        batcher._scheduler._prompt_rate = 1.0
        llm.create_completion(text, max_tokens=12, temperature=0.0, logprobs=2, echo=True)
        s = llm.stats
        assert 0 <= s.accepted == sum(s.accepted_at) <= s.drafted and 0 < s.rounds <= 12
        assert s.tokens <= 1 + s.rounds + s.accepted


@pytest.mark.parametrize("params", [EagleParams(40), EagleParams(tree="40x6x4")], ids=str)
def test_a_fixed_draft_beside_others(endless, monkeypatch, params):
    """It has all that it asks for while it is alone. Others would wait for its rows."""
    given = BatchSettings(*endless, n_parallel=2, n_ctx=N_CTX, n_threads=1, shared_draft=8)
    with Batcher(given) as b:
        drafted, own = [], b.engine.round

        def round_(asks, samplers):
            rounds = own(asks, samplers)
            drafted.append([(ask.params.planned, r.drafted) for ask, r in zip(asks, rounds)])
            return rounds

        monkeypatch.setattr(b.engine, "round", round_)

        def work(more, n):
            with b.request(params=more) as llm:
                return take(llm, n, PROMPT, temp=0.0)

        alone_ = work(params, 60)
        assert max(n for rounds in drafted for _, n in rounds) == 40
        drafted.clear()
        together = jobs_at_once(b, [lambda: work(params, 60), lambda: work(EagleParams(0), 60)])
        assert together == [alone_, alone_]
        shared = [rounds for rounds in drafted if len(rounds) == 2]
        assert shared and max(n for rounds in shared for _, n in rounds) == 8
