"""Rounds with other drafters in the head's place: perfect, wrong at a chosen position, random.

Tiny random models; the text is compared with llama_cpp.Llama on the same file.
"""

import itertools
import os
import random
import sys
import time

import numpy as np
import pytest
import tiny_models
from threads import ended, started
from tiers import each
from tiny_models import PROMPT, scripted, take, wanted

from eagle3_llama import (  # before llama_cpp: it brings the library
    EagleError,
    EagleLlama,
    EagleParams,
    ErrorKind,
)
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.engine import Draft

from llama_cpp import Llama

N_CTX, EOS = 512, 2


@pytest.fixture
def eagle(files):
    llm = EagleLlama(files[0], eagle_path=files[1], n_ctx=N_CTX, n_batch=64, verbose=False)
    yield llm
    llm.close()


@pytest.fixture
def plain(files):
    llm = Llama(files[0], n_ctx=N_CTX, n_batch=64, verbose=False)
    yield llm
    llm.close()


def drafts(llm, propose):
    """propose(tokens so far, n) says what is drafted, or None: then the head drafts."""

    def given(ask):
        n = wanted(ask.params)
        tokens = propose([*llm._input_ids.tolist(), ask.token], n)
        return None if tokens is None else Draft(tokens[:n])

    scripted(llm, given)


def endless(llm, n):
    """(prompt, the next n tokens), without an end token. Which prompts qualify depends on the CPU."""
    for start in range(60, 120):
        prompt = [1, start, *PROMPT[2:]]
        answer = take(llm, n, prompt)
        if EOS not in answer:
            return prompt, answer
    raise AssertionError("every prompt's answer ends")


def truth(answer, prompt=PROMPT):
    """The perfect drafter's knowledge: what follows the sequence in `answer`."""
    full = [*prompt, *answer]
    return lambda seq, n: full[len(seq) : len(seq) + n]


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 4])
def test_fails_at_each_position(plain, eagle, wrong_at):
    prompt, answer = endless(plain, 120)
    eagle.eagle_params = EagleParams(n_max=4)
    right = truth(answer, prompt)

    def propose(seq, n):
        tokens = right(seq, n)
        return [*tokens[:wrong_at], *((t + 1) % tiny_models.N_VOCAB for t in tokens[wrong_at:])]

    drafts(eagle, propose)
    assert take(eagle, 100, prompt) == answer[:100]
    s = eagle.stats
    assert s.rounds == -(-99 // (wrong_at + 1))  # the first token comes from the prompt
    assert s.accept_per_position == [1.0] * wrong_at + [0.0] * (4 - wrong_at)
    assert s.drafted == 4 * s.rounds and s.mean_accepted_length == wrong_at + 1


@pytest.mark.parametrize("n_max", [1, 7, 31, 63])
def test_perfect_drafter(plain, eagle, n_max):
    prompt, answer = endless(plain, 300)
    eagle.eagle_params = EagleParams(n_max=n_max)
    drafts(eagle, truth(answer, prompt))
    assert take(eagle, 200, prompt) == answer[:200]
    assert eagle.stats.rounds == -(-199 // (n_max + 1))


SAMPLINGS = [
    {"temp": 0.0},
    {"temp": 1.0, "top_k": 0, "top_p": 1.0},
    {"temp": 0.8, "repeat_penalty": 1.2, "frequency_penalty": 0.2},
    {"temp": 0.9, "mirostat_mode": 1},
    {"temp": 0.9, "mirostat_mode": 2},
    {"temp": 0.9, "min_p": 0.1, "typical_p": 0.8},
]


# llama/test_same_text.py has each of them in quick
@pytest.mark.parametrize("sampling", each(SAMPLINGS, quick=[SAMPLINGS[2], SAMPLINGS[4]]))
def test_thousands_of_rounds(files, plain, eagle, sampling):
    """Random mixtures of right and wrong draft tokens, random lengths, to the context's end, twice.

    Then the head must draft as a head does that has only read the text.
    """
    rng = random.Random(3)
    eagle.eagle_params = EagleParams(n_max=6)
    known = [None]

    def propose(seq, n):
        if rng.random() < 0.2:
            return None
        right = truth(*known[0])(seq, n)
        return [
            t if rng.random() < 0.8 else rng.randrange(tiny_models.N_VOCAB)
            for t in right[: rng.randint(0, n)]
        ]

    drafts(eagle, propose)
    total = 0
    for start in range(6):
        prompt = [1, *(60 + start * 7 + i for i in range(rng.randint(1, 90)))]
        answer = take(plain, N_CTX - len(prompt), prompt, **sampling)
        known[0] = (answer, prompt)
        assert take(eagle, len(answer), prompt, **sampling) == answer
        total += len(answer)
    assert eagle.stats.rounds > total / 6 and eagle.stats.accepted > total / 3

    eagle.reset()  # a reused prefix would leave one pair of the old text in the head
    text = take(eagle, 300, prompt[:40], **sampling)
    seen = prompt[:40] + text[:-1]
    engine, token = eagle.engine, text[-1]
    assert engine.n_past() == len(seen)
    fresh = EagleLlama(files[0], eagle_path=files[1], n_ctx=N_CTX, n_batch=64, verbose=False)
    fresh.eval(seen)
    ours, theirs = engine.steps.draft(token, EagleParams(6)), fresh.engine.steps.draft(token, EagleParams(6))
    assert ours[0] == theirs[0]
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4)
    fresh.close()


@pytest.mark.parametrize("n_max", [1, 5, 16])
def test_context_end(plain, eagle, n_max):
    """Every cell is used, none beyond it, and both say the same when it is full."""

    def until_full(llm):
        out = []
        with pytest.raises(Exception) as e:
            for token in llm.generate(PROMPT, temp=0.0):
                out.append(token)
        return out, e.value

    expected, _ = until_full(plain)
    eagle.eagle_params = EagleParams(n_max=n_max)
    drafts(eagle, truth(expected))
    got, error = until_full(eagle)
    assert got == expected and len(got) == N_CTX - len(PROMPT) + 1
    assert isinstance(error, EagleError) and "fit" in str(error)
    assert take(eagle, 20) == expected[:20]  # and it goes on living


def test_prompt_over_many_batches(plain, eagle):
    prompt = [1, *(3 + i % 250 for i in range(300))]
    eagle.eagle_params = EagleParams(n_max=3)  # the planner might find that nothing pays
    assert take(eagle, 30, prompt) == take(plain, 30, prompt)
    assert eagle.stats.drafted > 0


def test_prompt_that_does_not_fit(plain, eagle):
    with pytest.raises((EagleError, ValueError)):
        take(eagle, 1, [1] * (N_CTX + 1))
    assert take(eagle, 5) == take(plain, 5)


def test_drafts_obey_the_parameters(eagle):
    engine = eagle.engine

    def draft(**params):
        engine.rewind(0)
        engine.prefill(PROMPT)
        return engine.steps.draft(5, EagleParams(**params))

    tokens, probs = draft(n_max=8)
    assert len(tokens) == 8 and all(0 < p <= 1 for p in probs)
    assert set(tokens) <= set(engine.head.d2t().tolist())
    assert engine.steps.draft(5, EagleParams(8)) == ([], [])  # nothing was committed since
    least = sorted(probs)[4]
    n = next(i for i, p in enumerate(probs) if p < least)
    assert draft(n_max=8, p_min=least) == (tokens[:n], probs[:n])
    assert draft(n_max=8, p_min=least, n_min=n + 1) == ([], [])
    assert draft(n_max=8, p_min=1.0) == ([], [])


def test_only_mapped_tokens_reach_the_head_kv(files, eagle):
    """Rejected rows are never fed: the head's state after a wrong draft is that after none."""
    engine = eagle.engine
    for wrong in ([], [7, 8, 9]):
        eagle.reset()
        engine.rewind(0)
        engine.prefill(PROMPT)
        engine.steps.draft(5, EagleParams(3))
        engine.steps.decode(5, wrong)
        engine.steps.commit(1)
        last = engine.steps.draft(6, EagleParams(4))
        first = last if not wrong else first  # noqa: F821
    assert first == last


def test_calls_out_of_order(eagle):
    engine = eagle.engine
    engine.prefill(PROMPT)
    sampler = eagle._init_sampler(temp=0.0)
    with pytest.raises(EagleError, match="decode first"):
        engine.steps.verify(address(sampler.sampler))
    engine.steps.decode(5, [6])
    with pytest.raises(EagleError, match="sampler is NULL"):
        engine.steps.verify(0)
    for call in (
        lambda: engine.steps.decode(5, []),
        lambda: engine.prefill([5]),
        lambda: engine.steps.draft(5, EagleParams(1)),
    ):
        with pytest.raises(EagleError, match="commit it first"):
            call()
    with pytest.raises(EagleError, match="cannot keep 3 of 2"):
        engine.steps.commit(3)
    engine.steps.commit(2)
    with pytest.raises(EagleError, match="no slot 7"):
        engine.n_past(7)
    with pytest.raises(EagleError, match="not in the vocabulary"):
        engine.steps.decode(tiny_models.N_VOCAB, [])
    with pytest.raises(EagleError, match="cannot rewind"):
        engine.rewind(100)
    assert engine.n_past() == len(PROMPT) + 2


@pytest.mark.skipif(
    sys.platform != "linux", reason="GNU's OpenMP counts every thread that ever computed, idle or not"
)
def test_no_threads_are_left_behind(files):
    """Otherwise the next thread's decode sleeps at its barriers and takes three times as long."""
    threads = lambda: set(os.listdir("/proc/self/task"))
    llm = EagleLlama(
        files[0], eagle_path=files[1], n_ctx=N_CTX, n_threads=4, n_threads_batch=4, verbose=False
    )
    before = threads()
    generator = llm.generate(PROMPT, temp=0.0)
    next(generator)
    workers = threads() - before
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert workers or "libgomp" not in maps.read()
    generator.close()
    end = time.monotonic() + 120
    while workers & threads():  # an ending thread may still be listed
        assert time.monotonic() < end
        time.sleep(0.005)
    llm.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system sets no thread's cores")
def test_more_threads_than_cores(files, plain):
    """Threads that wait for one another on one core make room for one another, and the text is the same."""
    answer, cores, got = take(plain, 40), os.sched_getaffinity(0), []

    def generate():
        os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
        with EagleLlama(
            files[0], eagle_path=files[1], n_ctx=N_CTX, n_threads=3, n_threads_batch=3, verbose=False
        ) as llm:
            got.extend(take(llm, 40))

    thread, _ = started(generate)
    ended(thread)
    assert got == answer


def test_drafting_switched_off_and_on(plain, eagle):
    """n_max = 0 captures nothing; afterwards the head starts with the text that comes."""
    answer = take(plain, 90)
    generator = eagle.generate(PROMPT, temp=0.0)
    got = []
    for n_max in (2, 0, 3, 0, 1):
        eagle.eagle_params = EagleParams(n_max)
        got += itertools.islice(generator, 15)
        generator.close()
        generator = eagle.generate(PROMPT + got, temp=0.0)
    assert got == answer[:75]


def test_damaged_states_are_refused(plain, eagle):
    take(eagle, 20)
    state = eagle.engine.state()
    for damaged in (b"", state[:-1], state[: len(state) // 2], b"x" + state[1:], state + b"x"):
        with pytest.raises(EagleError) as e:
            eagle.engine.set_state(damaged)
        assert e.value.kind is ErrorKind.BAD_VALUE
    eagle.engine.set_state(state)
    assert eagle.engine.state() == state
    saved = eagle.save_state()
    saved.llama_state = saved.llama_state[: saved.llama_state_size // 2]
    saved.llama_state_size //= 2
    with pytest.raises(EagleError):
        eagle.load_state(saved)
    assert take(eagle, 5) == take(plain, 5)


@pytest.mark.parametrize(
    "broken, said",
    [
        ({"target_hidden_size": 128}, "hidden size"),
        ({"layers": (1, 2, 9)}, "9"),
        ({"d2t": np.full(tiny_models.N_DRAFT, 400, np.int64)}, "d2t"),
        ({"d2t": np.zeros(tiny_models.N_DRAFT - 1, np.int64)}, "[64, 95]"),
    ],
)
def test_head_of_another_target(files, tmp_path, broken, said):
    head = tiny_models.head(tmp_path / "other.gguf", **broken)
    with pytest.raises(EagleError) as e:
        EagleLlama(files[0], eagle_path=str(head), n_ctx=64, verbose=False)
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_max": -1},
        {"n_max": 64},
        {"n_max": 1.5},
        {"n_max": True},
        {"n_min": 2},
        {"p_min": 1.1},
        {"p_min": float("nan")},
        {"p_min": "x"},
    ],
)
def test_bad_parameters(settings):
    with pytest.raises(EagleError) as e:
        EagleParams(**settings)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT and next(iter(settings)) in str(e.value)


def test_misspelt_parameter():
    with pytest.raises(EagleError, match="did you mean n_max"):
        EagleParams(nmax=3)


def test_head_and_draft_model_together(files):
    with pytest.raises(EagleError, match="not both"):
        EagleLlama(files[0], eagle_path=files[1], draft_model=lambda *_: [], verbose=False)
