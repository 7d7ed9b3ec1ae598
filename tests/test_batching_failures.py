"""What fails in the batcher's thread: whoever waits is told, and the capacity comes back."""

import threading

import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings, slot_file


@pytest.fixture
def batcher(files):
    with Batcher(BatchSettings(*files, n_parallel=1, n_ctx=256, n_threads=1)) as b:
        yield b


def text(batcher, n=8):
    with batcher.request() as llm:
        said = llm.create_completion(PROMPT, max_tokens=n, temperature=0.0)["choices"][0]["text"]
    batcher._on_thread(lambda: None)  # before it runs this, the slot of a request that has gone is free
    return said


def outcome(work, *args):
    """What work(*args) returns or raises, in a thread of its own: one that waits for ever fails the test."""
    got = []

    def run():
        try:
            got.append(work(*args))
        except Exception as e:
            got.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert got, "it waits for ever"
    return got[0]


def failing(batcher, monkeypatch, name, times):
    """The engine's `name` fails so many times; the list of its failures."""
    work, failed = getattr(batcher._engine, name), []

    def call(*args):
        if len(failed) < times:
            failed.append(args)
            raise EagleError(ErrorKind.NATIVE, f"{name} is broken")
        return work(*args)

    monkeypatch.setattr(batcher._engine, name, call)
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
        batcher._on_thread(lambda: None)
        assert isinstance(outcome(list, stream), EagleError)
    assert outcome(text, batcher) == expected


def test_a_batcher_that_has_died(batcher, monkeypatch):
    """Nobody waits for it: neither those who are there nor those who come, nor calls from outside."""
    with batcher.request() as running, batcher.request() as late:
        stream = running.generate(PROMPT, temp=0.0)
        next(stream)
        monkeypatch.setattr(batcher, "_has_work", lambda: 1 / 0)
        with batcher._wake:
            batcher._wake.notify()
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
