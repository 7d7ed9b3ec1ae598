"""What fails in the batcher's thread: whoever waits is told, and the capacity comes back."""

import functools
import itertools
import threading

import pytest
from batch_tools import jobs_at_once, shared_rounds_fail
from threads import outcome, wait_for
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings, slot_file
from eagle3_llama.runtime.costs import Costs


@pytest.fixture
def batcher(files):
    with Batcher(BatchSettings(*files, n_parallel=1, n_ctx=256, n_threads=1)) as b:
        yield b


def text(batcher, n=8):
    with batcher.request() as llm:
        said = llm.create_completion(PROMPT, max_tokens=n, temperature=0.0)["choices"][0]["text"]
    batcher.inbox.run(lambda: None)  # before it runs this, the slot of a request that has gone is free
    return said


def failing(batcher, monkeypatch, name, times):
    """The engine's `name` fails so many times; the list of its failures."""
    work, failed = getattr(batcher.engine, name), []

    def call(*args):
        if len(failed) < times:
            failed.append(args)
            raise EagleError(ErrorKind.NATIVE, f"{name} is broken")
        return work(*args)

    monkeypatch.setattr(batcher.engine, name, call)
    return failed


@pytest.mark.parametrize("name, times", [("rewind", 2), ("n_past", 1)])
def test_a_slot_that_cannot_be_cleared(batcher, monkeypatch, name, times):
    """The request that leaves it ends as ever, and the next one gets the slot."""
    expected = text(batcher)
    with batcher.request() as llm:
        stream = llm.generate(PROMPT, temp=0.0)
        next(stream)
        failed = failing(batcher, monkeypatch, name, times)
        stream.close()  # the slot is freed
    assert outcome(text, batcher) == expected
    assert len(failed) == times and batcher.snapshot()["slots_busy"] == 0 and batcher.alive()


def test_a_slot_that_cannot_be_given(batcher, monkeypatch):
    """Who was to get it is told, the next one is served."""
    expected = text(batcher)
    failed = failing(batcher, monkeypatch, "rewind", 2)
    assert "rewind is broken" in str(outcome(text, batcher)) and len(failed) == 2
    assert outcome(text, batcher) == expected and batcher.waiting() == 0


def test_requests_that_are_dropped_while_another_calls(batcher, monkeypatch):
    """What fails between a call from outside and a round ends neither the thread nor the wait of others."""
    expected = text(batcher)
    with batcher.request() as llm:
        stream = llm.generate(PROMPT, temp=0.0)
        next(stream)
        failing(batcher, monkeypatch, "rewind", 2)
        llm.cancel()
        batcher.inbox.run(lambda: None)
        assert isinstance(outcome(list, stream), EagleError)
    assert outcome(text, batcher) == expected


def test_a_batcher_that_has_died(batcher, monkeypatch):
    """Nobody waits for it: neither those who are there nor those who come, nor calls from outside."""
    with batcher.request() as running, batcher.request() as late:
        stream = running.generate(PROMPT, temp=0.0)
        next(stream)
        monkeypatch.setattr(batcher, "_has_work", lambda: 1 / 0)
        with batcher.inbox.wake:
            batcher.inbox.wake.notify()
        assert isinstance(outcome(list, stream), EagleError)
        batcher._thread.join(60)
        assert not batcher.alive()
        for work in (lambda: next(late.generate(PROMPT)), batcher.request, lambda: batcher.save_slot(0)):
            error = outcome(work)
            assert isinstance(error, EagleError) and "division by zero" in str(error), error


def test_slots_are_packed_beside_the_batcher(batcher, monkeypatch):
    """Its thread copies a state; what takes long is done in the caller's."""
    text(batcher)
    hashed, sha256 = [], slot_file.hashlib.sha256
    monkeypatch.setattr(
        slot_file.hashlib,
        "sha256",
        lambda *data: (hashed.append(threading.current_thread()), sha256(*data))[1],
    )
    n = batcher.slots()[0]["n_past"]
    assert batcher.load_slot(0, batcher.save_slot(0)) == n > 0
    assert hashed == [threading.current_thread()] * 2


def test_every_way_of_drafting(batcher, recwarn):
    """Trees of fixed choices and n_min work in a batch too, and the text stays the same."""
    expected = text(batcher, 20)
    for _ in range(2):
        for params in (
            EagleParams(tree=[(0,), (0, 0), (1,)]),
            EagleParams(4, n_min=2),
            EagleParams(tree="8x2x2"),
            EagleParams(3),
        ):
            with batcher.request(params=params) as llm:
                assert (
                    llm.create_completion(PROMPT, max_tokens=20, temperature=0.0)["choices"][0]["text"]
                    == expected
                )
    assert not [w for w in recwarn if w.category is RuntimeWarning]


def test_tokens_are_counted_as_requests_get_them(batcher):
    """The first of each counts, those drafted beyond its end do not."""
    before = batcher.snapshot()
    with batcher.request(params=EagleParams(n_max=4)) as llm:
        n = llm.create_completion(PROMPT, max_tokens=7, temperature=0.0, logit_bias={2: -100})["usage"][
            "completion_tokens"
        ]
    after = batcher.snapshot()
    assert after["tokens"] - before["tokens"] == llm._job.n_tokens >= n == 7
    assert llm._job.n_tokens == llm.stats.tokens and 0 < after["drafts"] <= after["rounds"]


def test_a_call_is_answered_whatever_fails_before_it(batcher, monkeypatch):
    """The batcher frees slots before it runs a call from outside. If that fails, the call is answered."""
    expected = text(batcher)
    drop, failed = batcher._drop, []

    def broken():
        if batcher.inbox.calls and not failed:
            failed.append(1)
            raise RuntimeError("dropping is broken")
        drop()

    monkeypatch.setattr(batcher, "_drop", broken)
    data = outcome(batcher.save_slot, 0)
    assert isinstance(data, bytes) and failed
    assert outcome(batcher.load_slot, 0, data) == batcher.slots()[0]["n_past"] > 0
    assert batcher.alive() and outcome(text, batcher) == expected


def test_a_call_beside_a_close(files, monkeypatch):
    """One that comes after the batcher has looked for calls, and before it is closed, is answered."""
    b = Batcher(BatchSettings(*files, n_parallel=1, n_ctx=256, n_threads=1))
    text(b)
    busy, asked, got = b._busy, threading.Event(), []
    saver = threading.Thread(target=lambda: got.append(outcome(b.inbox.run, lambda: "answered")))
    check = b.inbox.check_open

    def open_until_asked():
        """The call gets in; then the batcher is closed."""
        check()
        if threading.current_thread() is not b._thread and not asked.is_set():
            asked.set()

    monkeypatch.setattr(b.inbox, "check_open", open_until_asked)

    def late():
        if not asked.is_set():
            b.inbox.closing, closing = None, b.inbox.closing  # as if close() came a moment later
            saver.start()
            assert asked.wait(60)
            with b.inbox.wake:  # the call is in the queue before
                b.inbox.closing = closing
        return busy()

    monkeypatch.setattr(b, "_busy", late)
    b.close()
    saver.join(60)
    assert got == ["answered"]


def test_a_sampler_that_cannot_be_freed(batcher, monkeypatch):
    """Those who wait behind its request are told of the end as well."""
    expected = text(batcher)
    with batcher.request() as running, batcher.request() as waiting:
        stream = running.generate(PROMPT, temp=0.0)
        next(stream)
        second = threading.Thread(target=lambda: late.append(outcome(next, waiting.generate(PROMPT))))
        late = []
        second.start()
        wait_for(lambda: batcher.waiting() == 1)
        for job in (running._job, waiting._job):
            monkeypatch.setattr(job.sampler, "close", lambda: 1 / 0)
        batcher.inbox.run(lambda: batcher._fail_all(EagleError(ErrorKind.NATIVE, "all of them")))
        second.join(60)
        assert "all of them" in str(late[0]) and "all of them" in str(outcome(list, stream))
    assert outcome(text, batcher) == expected


@pytest.mark.parametrize("params", [EagleParams(3), EagleParams(tree="8x2x2"), EagleParams(0)], ids=str)
def test_a_shared_round_that_fails(endless, monkeypatch, params):
    """Its slots go on one by one, and nobody's text changes."""
    with Batcher(BatchSettings(*endless, n_parallel=3, n_ctx=256, n_threads=1)) as batcher:
        prompts = [PROMPT, [*PROMPT, 9], [1, 77]]

        def work(prompt):
            with batcher.request(params=params) as llm:
                return list(itertools.islice(llm.generate(prompt, temp=0.0), 20))

        expected = [work(prompt) for prompt in prompts]
        sizes = shared_rounds_fail(batcher, monkeypatch)
        got = jobs_at_once(batcher, [functools.partial(work, prompt) for prompt in prompts])
        first = next(i for i, n in enumerate(sizes) if n > 1)
        assert sizes[first + 1 :][: sizes[first]] == [1] * sizes[first]
        assert got == expected and batcher.snapshot()["failures"] == 0


def test_a_slot_at_its_context_s_end(endless):
    """The last tokens that fit are generated beside another slot, whose drafts go on: no round fails."""
    with Batcher(BatchSettings(*endless, n_parallel=2, n_ctx=256, n_threads=1)) as batcher:
        flat = [1e-3] * 65  # rows and passes cost nothing: the planner drafts all that there is room for
        costs = Costs(flat, [1e-6] * 65, [1e-6] * 65, [0.0] * 65, 0.0, 8)
        batcher.inbox.run(lambda: batcher.engine.planner.set_costs(costs))

        def work(prompt, n, params):
            with batcher.request(params=params) as llm:
                return list(itertools.islice(llm.generate(prompt, temp=0.0), n))

        long = [1, *(3 + i % 250 for i in range(199))]
        for params in (EagleParams(), EagleParams(8), EagleParams(tree="12x3x4")):
            alone = work(long, 99, params), work(PROMPT, 120, params)
            failed, own = [], batcher._scheduler._one_by_one
            batcher._scheduler._one_by_one = lambda busy, e: (failed.append(e), own(busy, e))
            asked = [(long, 99, params), (PROMPT, 120, params)]
            got = jobs_at_once(batcher, [functools.partial(work, *a) for a in asked])
            batcher._scheduler._one_by_one = own
            assert tuple(got) == alone and not failed
            assert len(alone[0]) == 256 - len(long) + 1 and batcher.snapshot()["failures"] == 0
