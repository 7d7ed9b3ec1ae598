"""How a request ends: at a limit, cancelled, failed, with its batcher. Others go on, and nothing stays."""

import os
import sys
import threading
import time

import numpy as np
import pytest
from batch_tools import EOS, N_CTX, alone, batcher, plain, take, tiny  # noqa: F401 - fixtures too
from threads import ended, in_threads, outcome, started, wait_for
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings, RequestCancelled
from eagle3_llama.errors import ErrorKind

from llama_cpp import LlamaGrammar
from llama_cpp._internals import LlamaSampler


@pytest.mark.skipif(
    sys.platform != "linux", reason="GNU's OpenMP counts every thread that ever computed, idle or not"
)
def test_an_idle_batcher_leaves_no_threads_behind(tiny):
    threads = lambda: set(os.listdir("/proc/self/task"))
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=2, n_ctx=N_CTX, n_threads=4))
    before = threads()
    with b.request() as llm:
        take(llm, 20, PROMPT, temp=0.0)
    wait_for(lambda: threads() <= before)  # none is new; an earlier test's may still have been ending
    b.close()


def test_ends_at_the_limit_and_the_context(batcher):
    with batcher.request(params=EagleParams(n_max=5)) as llm:
        assert llm.create_completion(PROMPT, max_tokens=7, temperature=0.0)["usage"]["completion_tokens"] <= 7
    with batcher.request(params=EagleParams(n_max=5)) as llm:
        out = list(llm.generate([1] * (N_CTX - 20), temp=0.0))
        assert 1 <= len(out) <= 21  # the last one needs no place
    with batcher.request() as llm, pytest.raises(EagleError, match="prompt has"):
        next(llm.generate([1] * N_CTX))
    assert batcher.snapshot()["slots_busy"] == 0


def without_end(scores):
    """With these scores no text ends before a processor may fail."""
    return np.where(np.arange(len(scores)) == EOS, -np.inf, scores).astype(scores.dtype)


def test_a_failure_is_one_request_s(batcher, plain):
    def breaks(ids, scores):
        if len(ids) > len(PROMPT) + 5:
            raise RuntimeError("broken processor")
        return without_end(scores)

    def work(kind):
        with batcher.request(params=EagleParams(n_max=3)) as llm:
            return take(
                llm, 50, PROMPT, temp=0.0, **({"logits_processor": [breaks]} if kind == "bad" else {})
            )

    got = in_threads(3, work, ["good", "bad", "good"])
    assert isinstance(got[1], RuntimeError)
    assert got[0] == got[2] == alone(plain, 50, PROMPT, temp=0.0)
    assert batcher.snapshot()["failures"] == 1


def test_a_processor_may_raise_anything(batcher, plain):
    """What is no Exception would end a thread: here it ends its request, and no text goes on without it."""

    class Stop(BaseException):
        pass

    def stops(ids, scores):
        if len(ids) > len(PROMPT) + 5:
            raise Stop("enough")
        return without_end(scores)

    for more in ({"n_max": 0}, {"n_max": 3}):
        with batcher.request(params=EagleParams(**more)) as llm:
            got = outcome(take, llm, 50, PROMPT)
            assert isinstance(got, list)
            assert isinstance(outcome(lambda: take(llm, 50, PROMPT, logits_processor=[stops])), Stop)
            at_once = lambda ids, scores: stops([0] * 99, scores)
            assert isinstance(outcome(lambda: take(llm, 50, PROMPT, logits_processor=[at_once])), Stop)
    with batcher.request() as llm:
        assert take(llm, 50, PROMPT, temp=0.0) == alone(plain, 50, PROMPT, temp=0.0)


def test_a_processor_cannot_wait_for_its_batcher(batcher, plain):
    """It runs in the batcher's thread, which would wait for itself, and everybody for it."""
    earlier = batcher.request()
    uses = [batcher.request, lambda: next(earlier.generate(PROMPT)), lambda: batcher.save_slot(2)]
    for use in uses:
        with batcher.request() as llm, pytest.raises(EagleError) as e:
            take(llm, 5, PROMPT, logits_processor=[lambda ids, scores: use()])
        assert e.value.kind is ErrorKind.BUSY and "logits processor" in str(e.value)
    with batcher.request() as llm:  # what needs no other request is possible
        ask = {"temp": 0.0, "logits_processor": [lambda ids, scores: batcher.base.tokenize(b"a") and scores]}
        assert take(llm, 9, PROMPT, **ask) == alone(plain, 9, PROMPT, temp=0.0)


def test_an_ambiguous_grammar_is_one_request_s(batcher, plain):
    """Twice as many readings with each x: an error of that request, before it takes the machine's memory."""
    grammar = 'root ::= s\ns ::= "x" s "b" | "x" s "c" | "d"'
    x = next(t for t in range(batcher.base.n_vocab()) if batcher.base.detokenize([t]).startswith(b"x"))

    def work(kind):
        with batcher.request(params=EagleParams(n_max=3)) as llm:
            if kind == "good":
                return take(llm, 50, PROMPT, temp=0.0)
            favour = lambda ids, scores: np.where(np.arange(len(scores)) == x, 100.0, scores)
            return take(
                llm,
                50,
                PROMPT,
                temp=0.0,
                logits_processor=[favour],
                grammar=LlamaGrammar.from_string(grammar, verbose=False),
            )

    got = in_threads(3, work, ["good", "bad", "good"])
    assert got[0] == got[2] == alone(plain, 50, PROMPT, temp=0.0)
    assert isinstance(got[1], EagleError), got[1]


def test_cancel_and_deadline_free_the_slot(batcher, plain):
    llms = [batcher.request() for _ in range(3)]
    endless = lambda ids, scores: np.where(np.arange(len(scores)) == EOS, -np.inf, scores)
    streams = [
        llm.generate(PROMPT, temp=0.0, logits_processor=[endless]) for llm in llms
    ]  # nobody reads on: they wait, slots held
    for s in streams:
        next(s)
    late = batcher.request(deadline=time.monotonic() + 0.2)
    with pytest.raises(RequestCancelled) as e:
        next(late.generate(PROMPT))
    assert e.value.reason == "deadline" and all(s["busy"] for s in batcher.slots())
    llms[0].cancel()
    with pytest.raises(RequestCancelled):
        list(streams[0])
    streams[1].close()
    llms[2].close()
    wait_for(lambda: not any(s["busy"] for s in batcher.slots()))
    with batcher.request() as llm:
        assert take(llm, 30, PROMPT, temp=0.0) == alone(plain, 30, PROMPT, temp=0.0)


def test_close_lets_requests_finish(tiny, plain):
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=2, n_ctx=N_CTX, n_threads=1))
    llm = b.request()
    stream = llm.generate(PROMPT, temp=0.0)
    got = [next(stream)]
    closing = threading.Thread(target=b.close, args=(30.0,))
    llm2 = b.request()
    closing.start()
    wait_for(lambda: b.inbox.closing is not None)
    with pytest.raises(RequestCancelled):
        b.request()
    with pytest.raises(RequestCancelled):
        next(llm2.generate(PROMPT))
    got += [next(stream) for _ in range(30)]
    stream.close()
    ended(closing, seconds=240)
    assert got == alone(plain, 31, PROMPT, temp=0.0)


def test_a_request_after_close(tiny):
    """It was made before, and held pointers into the model that is gone."""
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=2, n_ctx=N_CTX, n_threads=1))
    fresh, used = b.request(), b.request()
    take(used, 3, PROMPT)
    left = b.request().generate(PROMPT)
    next(left)
    b.close()
    for llm in (fresh, used):
        uses = (
            lambda llm=llm: llm.create_completion(PROMPT),
            lambda llm=llm: llm.create_completion("x5", stream=True, max_tokens=4).__next__(),
            lambda llm=llm: llm.create_chat_completion([{"role": "user", "content": "x5"}]),
            lambda llm=llm: next(llm.generate(PROMPT)),
            lambda llm=llm: llm.tokenize(b"x5"),
            lambda llm=llm: llm.detokenize(PROMPT),
            lambda llm=llm: llm.token_bos(),
            lambda llm=llm: llm.n_vocab(),
        )
        assert all(isinstance(outcome(use), EagleError) for use in uses)
    assert isinstance(outcome(next, left), RequestCancelled)
    assert isinstance(outcome(b.base.tokenize, b"x5"), RequestCancelled)


@pytest.mark.parametrize("alone_", [False, True])
def test_close_waits_for_calls_under_way(tiny, monkeypatch, alone_):
    """Tokenizing takes a while, and the interpreter's lock is not held meanwhile."""
    settings = BatchSettings(tiny[0], n_parallel=1, n_ctx=N_CTX, n_threads=1)
    llm = EagleLlama(tiny[0], verbose=False) if alone_ else Batcher(settings)
    base = llm if alone_ else llm.base
    inside, go_on, model = threading.Event(), threading.Event(), base._model.model
    slow = base.tokenizer_.tokenize

    def tokenize(*given):
        inside.set()
        assert go_on.wait(60)
        return slow(*given)

    monkeypatch.setattr(base.tokenizer_, "tokenize", tokenize)
    tokenizing, got = started(base.tokenize, b"x5")
    assert inside.wait(60)
    closing, _ = started(llm.close)
    closing.join(0.3)
    assert closing.is_alive() and base._model.model is model
    go_on.set()
    ended(tokenizing, closing)
    assert len(got[0]) > 1 and isinstance(outcome(base.tokenize, b"x5"), EagleError)


def test_close_in_a_callback(batcher):
    """It would wait for the generation that waits for the callback."""
    with batcher.request() as llm, pytest.raises(EagleError, match="callback"):
        take(llm, 5, PROMPT, stopping_criteria=lambda ids, row: batcher.close())
    assert batcher.alive()


def test_samplers_are_freed_with_their_requests(batcher, monkeypatch):
    """Each has an array of the vocabulary's size; the collector of cycles may not come for long."""
    import gc

    freed = []
    close = LlamaSampler.close
    monkeypatch.setattr(
        LlamaSampler, "close", lambda self: (freed.append(self.sampler is not None), close(self))
    )
    gc.disable()
    try:
        with batcher.request() as llm:
            take(llm, 20, PROMPT, temp=0.0)
        with batcher.request() as llm:
            for _ in llm.generate(PROMPT, temp=0.0):
                break
            llm.cancel()
            with pytest.raises(RequestCancelled):
                take(llm, 20, PROMPT, temp=0.0)
        wait_for(lambda: freed.count(True) == 2)
    finally:
        gc.enable()
