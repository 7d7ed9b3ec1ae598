"""Drafts from the text itself: same text as plain decoding, with a head and without, in every way to ask."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from text_tools import CHEAP, PROMPT, SAMPLINGS, N, load, tokens_of

from eagle3_llama import EagleError, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime import cost_files
from eagle3_llama.runtime import costs as costs_module
from eagle3_llama.runtime.costs import Costs

pytestmark = pytest.mark.usefixtures("cheap_rows")


@pytest.fixture(scope="module")
def files(foreseen):
    return foreseen


@pytest.fixture(scope="module")
def plain(files):
    with load(files, text=False) as llm:
        texts = {name: tokens_of(llm, **a) for name, a in SAMPLINGS.items()}
        assert llm.stats.drafted == 0
    return texts


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("tree", [None, False])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_text_is_plain_decodings(files, plain, head, tree, sampling):
    with load(files, head, tree=tree) as llm:
        for _ in range(2):  # the second time the planner knows more
            assert tokens_of(llm, **SAMPLINGS[sampling]) == plain[sampling]
        assert llm.stats.accepted_from["text"] + llm.stats.accepted_from["both"] > 0


def test_without_the_text_only_the_head_drafts(files, plain):
    with load(files, head=True, text=False) as llm:
        assert tokens_of(llm, temp=0.0) == plain["greedy"]
        assert llm.stats.drafted_from["text"] == llm.stats.drafted_from["both"] == 0 < llm.stats.drafted


def test_it_can_be_turned_off_and_on_between_calls(files, plain):
    with load(files) as llm:
        drafted = []
        for text in (True, False, True):
            llm.eagle_params = EagleParams(text=text)
            assert tokens_of(llm, temp=0.0) == plain["greedy"]
            drafted.append(llm.stats.drafted)
        assert 0 < drafted[0] == drafted[1] < drafted[2]


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_values_that_are_neither_true_nor_false_are_refused(value):
    with pytest.raises(EagleError, match="text is .*True or False"):
        EagleParams(text=value)


def test_logits_processors_and_stopping_criteria_see_the_same(files, plain):
    def seen_by(llm):
        seen = []

        def processor(ids, scores):
            seen.append(len(ids))
            return scores

        def stop(ids, _):
            return len(ids) >= len(PROMPT) + 60

        out = tokens_of(llm, temp=0.0, logits_processor=[processor], stopping_criteria=stop)
        return out, set(seen)

    with load(files, text=False) as a, load(files) as b:
        (of_a, seen_a), (of_b, seen_b) = seen_by(a), seen_by(b)
        assert of_a == of_b and seen_a <= seen_b  # rows behind the end may have been verified
        assert b.stats.accepted_from["text"] > 0


def rounds_of(engine, monkeypatch):
    """Of every round, the length of the longest path of draft tokens and the tokens that it sampled."""
    rounds = []

    def watched(own):
        def seen(*args):
            out = own(*args)
            rounds.extend((r.levels, len(r.tokens)) for r in out)
            return out

        return seen

    for name in ("round", "run"):
        monkeypatch.setattr(type(engine), name, watched(getattr(type(engine), name)))
    return rounds


@pytest.mark.parametrize("head", [False, True])
def test_no_draft_goes_beyond_max_tokens(files, plain, monkeypatch, head):
    with load(files, head) as llm:
        rounds = rounds_of(llm.engine, monkeypatch)
        for n in (2, 3, 8, 30, 57):
            rounds.clear()
            list(itertools.islice(llm.generate(PROMPT, temp=0.0, max_tokens=n), n))
            assert 1 + sum(brought for _, brought in rounds) == n, "a token was verified that nobody takes"
            left = n - 1
            for levels, brought in rounds:
                assert levels < left
                left -= brought
        rounds.clear()
        answer = llm.create_completion(PROMPT, max_tokens=30, temperature=0.0, top_k=1)
        # it reads on where it would end within a character: nothing is drafted then
        assert 30 <= answer["usage"]["completion_tokens"] == 1 + sum(brought for _, brought in rounds)
        # the caller may take more than it said
        assert list(itertools.islice(llm.generate(PROMPT, temp=0.0, max_tokens=5), N)) == plain["greedy"]
        assert llm.stats.accepted_from["text"] > 0


def test_no_draft_of_a_batcher_goes_beyond_max_tokens(files, monkeypatch):
    settings = BatchSettings(str(files[0]), n_parallel=2, n_ctx=512, n_threads=1, flash_attn=True)
    with Batcher(settings) as batcher:
        rounds = rounds_of(batcher.engine, monkeypatch)
        for n in (2, 7, 41):
            rounds.clear()
            with batcher.request() as llm:
                answer = llm.create_completion(PROMPT, max_tokens=n, temperature=0.0)
            assert n <= answer["usage"]["completion_tokens"] == 1 + sum(brought for _, brought in rounds)


def test_a_saved_state_carries_the_text(files, plain):
    """In the middle of an answer, into another object, and what nothing drafts from is read, too."""
    with load(files) as llm, load(files) as other, load(files, text=False) as without:
        steps = llm.generate(PROMPT, temp=0.0)
        begun = list(itertools.islice(steps, 60))
        state = llm.save_state()
        assert begun + list(itertools.islice(steps, N - 60)) == plain["greedy"]
        steps.close()
        for loaded in (other, without):
            loaded.load_state(state)
            rest = itertools.islice(loaded.generate(PROMPT + begun, reset=True, temp=0.0), N - 60)
            assert begun + list(rest) == plain["greedy"]
        assert other.stats.accepted_from["text"] > 0 == without.stats.drafted


@pytest.mark.parametrize("saved, loaded", [(False, True), (True, False)])
def test_states_of_with_and_without_a_head_are_read(files, plain, saved, loaded):
    with load(files, saved) as a, load(files, loaded) as b:
        begun = tokens_of(a, 40, temp=0.0)
        b.load_state(a.save_state())
        rest = itertools.islice(b.generate(PROMPT + begun, temp=0.0), N - 40)
        assert begun + list(rest) == plain["greedy"]


# -- costs --------------------------------------------------------------------------------------------------


def test_costs_are_measured_when_the_text_repeats_itself(files, monkeypatch, tmp_path):
    """Not at the load, and not for a text without a match; then in the middle of an answer, once."""
    calls = []

    def measured(engine, n_ctx, times, rounds, slot, n_batch, large, memory, on_device):
        calls.append(engine.n_past(slot))
        return CHEAP

    monkeypatch.setattr(costs_module, "measure_in_use", measured)
    with load(files) as llm:
        assert llm.engine.planner.costs is None
        list(itertools.islice(llm.generate([40, 41, 42], temp=0.0), 2))
        assert not calls
        tokens_of(llm, temp=0.0)
        tokens_of(llm, temp=0.0)
        assert len(calls) == 1 and calls[0] >= len(PROMPT) - 1
    with load(files) as llm:  # a later load knows them at once
        assert llm.engine.planner.costs is not None
    (path,) = tmp_path.iterdir()
    assert len(json.loads(path.read_text())) == 1


def test_costs_that_are_known_are_not_measured_again(files):
    with load(files) as llm:
        llm._measure()
        assert llm.engine.planner.costs is not None and llm.engine.planner.on_match is None


def test_measuring_in_an_answer_leaves_no_trace(files, plain, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cost_files, "known", lambda *_: None)
    monkeypatch.setattr(cost_files, "remember", lambda key, n_ctx, costs: costs)
    for sampling in SAMPLINGS:
        with load(files) as llm:
            assert tokens_of(llm, **SAMPLINGS[sampling]) == plain[sampling]
            assert isinstance(llm.engine.planner.costs, Costs)


def test_no_room_to_measure_in(files, plain, monkeypatch):
    """The KV cache ends behind the text: nothing is drafted, and nothing fails."""
    monkeypatch.undo()
    monkeypatch.setattr(cost_files, "known", lambda *_: None)
    with load(files, text=False, n_ctx=256) as a, load(files, n_ctx=256) as b:
        prompt = (PROMPT * 20)[:250]
        texts = [list(itertools.islice(m.generate(prompt, temp=0.0), 5)) for m in (a, b)]
        assert texts[0] == texts[1] and b.engine.planner.costs is None


# -- many slots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [False, True])
def test_slots_beside_each_other(files, plain, head):
    settings = BatchSettings(
        str(files[0]), str(files[1]) if head else None, n_parallel=4, n_ctx=512, n_threads=1, flash_attn=True
    )
    texts = {}
    with Batcher(settings) as batcher:

        def run(i, name):
            with batcher.request(params=EagleParams(text=i % 4 != 3) if i % 2 else None) as llm:
                texts[i, name] = tokens_of(llm, **SAMPLINGS[name])

        jobs = [(i, name) for i in range(4) for name in SAMPLINGS]
        threads = [threading.Thread(target=run, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        seen = batcher.snapshot()
        saved = batcher.save_slot(0)
        assert batcher.load_slot(1, saved) > 0
    assert set(texts) == set(jobs)
    assert all(texts[i, name] == plain[name] for i, name in jobs)
    assert seen["accepted_from"]["text"] + seen["accepted_from"]["both"] > 0


def test_a_batcher_without_the_text(files, plain):
    settings = BatchSettings(str(files[0]), n_parallel=2, n_ctx=512, n_threads=1, flash_attn=True, text=False)
    with Batcher(settings) as batcher, batcher.request() as llm:
        assert tokens_of(llm, temp=0.0) == plain["greedy"]
        assert batcher.snapshot()["drafted"] == 0
