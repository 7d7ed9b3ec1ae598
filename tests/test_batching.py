"""Many requests at once: each one's text is what it would be alone, whatever the others do."""

import os
import random
import sys
import threading
import time

import numpy as np
import pytest
import tiny_models
from threads import held
from tiny_models import PROMPT

from eagle3_llama import (  # before llama_cpp: it brings the library
    EagleError,
    EagleLlama,
    EagleParams,
    ErrorKind,
)
from eagle3_llama.batching import Batcher, BatchSettings, RequestCancelled
from eagle3_llama.batching.job import Job
from eagle3_llama.batching.scheduler import BatchSlot
from eagle3_llama.llama.usage import TokenUsage
from eagle3_llama.models import shipped_head, smollm2

from llama_cpp import Llama, LlamaGrammar
from llama_cpp._internals import LlamaSampler

N_CTX, EOS = 512, 2
DEAD_END = r"root ::= [a-z]{5} [^\x00-\U0010FFFF]"


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def tiny(request, tmp_path_factory):
    at = tmp_path_factory.mktemp("tiny")
    return str(tiny_models.target(at / "target.gguf", kind=request.param)), str(
        tiny_models.head(at / "head.gguf")
    )


@pytest.fixture
def batcher(tiny):
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=3, n_ctx=N_CTX, n_threads=1))
    yield b
    b.close()


@pytest.fixture
def plain(tiny):
    llm = Llama(tiny[0], n_ctx=N_CTX, n_threads=1, flash_attn=True, verbose=False)
    yield llm
    llm.close()


def take(llm, n, prompt, **sampling):
    """At most n tokens, up to the end of generation; Llama's generate goes on beyond it."""
    out = []
    for token in llm.generate(prompt, **sampling):
        out.append(token)
        if len(out) == n or token == EOS:
            break
    return out


def alone(plain, n, prompt, seed=None, **sampling):
    plain.reset()
    if seed is not None:
        plain.set_seed(seed)
    return take(plain, n, prompt, **sampling)


def prompts(n, seed=0):
    rng = random.Random(seed)
    return [[1, *(rng.randrange(3, 250) for _ in range(rng.choice([3, 20, 70, 130, 300])))] for _ in range(n)]


def in_threads(n_threads, work, jobs):
    """work(job) for each job, on so many threads; results in order."""
    results, todo, lock = [None] * len(jobs), list(range(len(jobs))), threading.Lock()

    def run():
        while True:
            with lock:
                if not todo:
                    return
                i = todo.pop(0)
            try:
                results[i] = work(jobs[i])
            except Exception as e:
                results[i] = e

    threads = [threading.Thread(target=run) for _ in range(n_threads)]
    for t in threads:
        t.start()
    ended(threads)
    return results


def ended(threads, seconds=240):
    """Waits for threads; one that waits for ever fails the test."""
    for t in threads:
        t.join(seconds)
        assert not t.is_alive()


@pytest.mark.parametrize("n_ctx", [64, 256])
def test_costs_are_measured_in_the_room_of_a_slot(tiny, tmp_path, monkeypatch, n_ctx):
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=2, n_ctx=n_ctx, n_threads=1))
    with b.request() as llm:
        assert len(take(llm, 9, PROMPT, temp=0.0)) > 0
    b.close()
    assert len(list(tmp_path.iterdir())) == 1


SETTINGS = [
    EagleParams(),
    EagleParams(n_max=4),
    EagleParams(tree="12x3x3"),
    EagleParams(n_max=0),
    EagleParams(tree=False),
    EagleParams(n_max=6, p_min=0.01),
]


def test_texts_are_as_alone(batcher, plain):
    """Three slots, eight threads: greedy and seeded, every kind of draft. A quarter of them end early."""
    jobs = [
        (p, SETTINGS[i % len(SETTINGS)], {} if i % 3 else {"temp": 0.9, "top_k": 50}, i % 4 == 3)
        for i, p in enumerate(prompts(24))
    ]

    def work(job):
        prompt, params, sampling, leaves = job
        with batcher.request(params=params) as llm:
            llm.set_seed(7)
            return take(llm, 5 if leaves else 60, prompt, **(sampling or {"temp": 0.0}))

    got = in_threads(8, work, jobs)
    for (prompt, _, sampling, leaves), text in zip(jobs, got):
        assert text == alone(plain, 5 if leaves else 60, prompt, seed=7, **(sampling or {"temp": 0.0}))
    seen = batcher.snapshot()
    assert seen["drafted"] > 0 and seen["failures"] == 0 and seen["slots_busy"] == 0 and seen["rows"] >= 1


def test_prefix_is_taken_up(batcher, plain):
    """The slot that shares most is chosen, and what it holds is not decoded again."""
    a, b = prompts(2, seed=3)
    a, b = [*a, *range(10, 90)], [*b, *range(90, 10, -1)]
    for prompt in (a, b):
        with batcher.request() as llm:
            take(llm, 10, prompt, temp=0.0)
    with batcher.request() as llm:
        longer = [*b, 5, 6, 7]
        assert take(llm, 40, longer, temp=0.0) == alone(plain, 40, longer, temp=0.0)
        assert llm.usage()["prompt_tokens_details"]["cached_tokens"] == len(b)
    assert batcher.snapshot()["reused_tokens"] >= len(b)


def test_short_prompts_start_together(batcher, monkeypatch):
    monkeypatch.setattr("eagle3_llama.batching.scheduler.STALL", 1e3)  # seconds: this machine may be slow
    rounds, work = [], batcher._scheduler._round
    monkeypatch.setattr(batcher._scheduler, "_round", lambda busy: (rounds.append(len(busy)), work(busy)))
    asked = [
        threading.Thread(target=take, args=(batcher.request(), 9, prompt), kwargs={"temp": 0.0})
        for prompt in ([1, 5], [1, 6, 7], [1, 8, 9])
    ]
    with held(batcher):  # nothing is decoded before all have come
        for t in asked:
            t.start()
        wait_for(lambda: batcher.waiting() == 3)
    ended(asked)
    assert rounds[0] == 3


def test_grammar_penalties_processors(batcher, plain):
    """What samples row by row sees the right rows while others draft beside it."""
    grammar = "root ::= [a-z ]+"
    seen = []

    def favour(ids, scores):
        seen.append(ids.tolist())
        scores[ids[-1] % 200 + 3] += 4.0
        return scores

    def work(kind):
        with batcher.request(params=EagleParams(n_max=3) if kind != "processor" else EagleParams()) as llm:
            llm.set_seed(3)
            return take(llm, 40, PROMPT, **sampling(kind))

    def sampling(kind):
        return {
            "grammar": dict(grammar=LlamaGrammar.from_string(grammar, verbose=False), temp=0.0),
            "penalties": dict(repeat_penalty=1.3, frequency_penalty=0.4, temp=0.7),
            "mirostat": dict(mirostat_mode=2, temp=0.8),
            "processor": dict(logits_processor=[favour], temp=0.0),
        }[kind]

    kinds = ["grammar", "penalties", "mirostat", "processor"]
    got = in_threads(4, work, kinds)
    text = got[kinds.index("processor")]
    for k in range(len(text)):  # shown to the processor at every row, in order
        assert seen[k] == [*PROMPT, *text[:k]]
    for kind, text in zip(kinds, got):
        assert text == alone(plain, 40, PROMPT, seed=3, **sampling(kind)), kind


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
        assert 1 <= len(out) <= 20
    with batcher.request() as llm, pytest.raises(EagleError, match="prompt has"):
        next(llm.generate([1] * N_CTX))
    assert batcher.snapshot()["slots_busy"] == 0


def test_a_failure_is_one_request_s(batcher, plain):
    def breaks(ids, scores):
        if len(ids) > len(PROMPT) + 5:
            raise RuntimeError("broken processor")
        return scores

    def work(kind):
        with batcher.request(params=EagleParams(n_max=3)) as llm:
            return take(
                llm, 50, PROMPT, temp=0.0, **({"logits_processor": [breaks]} if kind == "bad" else {})
            )

    got = in_threads(3, work, ["good", "bad", "good"])
    assert isinstance(got[1], RuntimeError)
    assert got[0] == got[2] == alone(plain, 50, PROMPT, temp=0.0)
    assert batcher.snapshot()["failures"] == 1


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


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_close_lets_requests_finish(tiny, plain):
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=2, n_ctx=N_CTX, n_threads=1))
    llm = b.request()
    stream = llm.generate(PROMPT, temp=0.0)
    got = [next(stream)]
    closing = threading.Thread(target=b.close, args=(30.0,))
    llm2 = b.request()
    closing.start()
    wait_for(lambda: b._closing is not None)
    with pytest.raises(RequestCancelled):
        b.request()
    with pytest.raises(RequestCancelled):
        next(llm2.generate(PROMPT))
    got += [next(stream) for _ in range(30)]
    stream.close()
    ended([closing])
    assert got == alone(plain, 31, PROMPT, temp=0.0)


def test_slots_are_saved_and_restored(tiny, plain, batcher):
    prompt = [*PROMPT, *range(20, 70)]  # of so few tokens, each has the same bits however it was decoded
    with batcher.request() as llm:
        take(llm, 20, prompt, temp=0.0)
    slot = max(batcher.slots(), key=lambda s: s["n_past"])["id"]
    data = batcher.save_slot(slot)
    other = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=3, n_ctx=N_CTX, n_threads=1))
    n = other.load_slot(1, data)
    assert n == other.slots()[1]["n_past"] >= len(prompt)
    with other.request(params=EagleParams(n_max=3)) as llm:
        assert take(llm, 40, prompt, temp=0.0) == alone(plain, 40, prompt, temp=0.0)
        assert llm.usage()["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert llm.stats.drafted > 0
    rng = random.Random(1)
    for _ in range(60):
        bad = bytearray(data)
        at = rng.randrange(len(bad))
        bad = (
            bytes(bad[:at])
            if rng.random() < 0.4
            else bytes([*bad[:at], bad[at] ^ (1 << rng.randrange(8)), *bad[at + 1 :]])
        )
        with pytest.raises(EagleError) as e:
            other.load_slot(0, bad)
        assert e.value.kind is ErrorKind.BAD_VALUE
    for slot in (-1, 3, True, "0"):
        with pytest.raises(EagleError, match="no slot"):
            other.save_slot(slot)
    with other.request() as llm:
        assert take(llm, 10, prompt, temp=0.0) == alone(plain, 10, prompt, temp=0.0)
    other.close()


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
    """Not the pieces of its prompt, which an echo with logprobs brings."""
    text = " ".join(chr(97 + i % 26) for i in range(100))  # more than one piece
    with batcher.request(params=EagleParams(4)) as llm:
        batcher._scheduler._prompt_rate = 1.0
        llm.create_completion(text, max_tokens=12, temperature=0.0, logprobs=2, echo=True)
        s = llm.stats
        assert 0 <= s.accepted == sum(s.accepted_at) <= s.drafted and 0 < s.rounds <= 12
        assert s.tokens <= 1 + s.rounds + s.accepted


def test_a_job_may_end_while_slots_are_read(batcher, monkeypatch):
    class Leaving(BatchSlot):
        reads = [Job([1], None, EagleParams(), 1, 1, None, request_id="the one")] * 2

        @property
        def job(self):
            return self.reads.pop() if self.reads else None

        @job.setter
        def job(self, _):
            pass

    monkeypatch.setattr(batcher, "_slots", [Leaving(0)])
    assert batcher.slots() == [{"id": 0, "busy": True, "n_past": 0, "request_id": "the one"}]
    monkeypatch.undo()


def test_a_state_that_lies_is_refused(batcher, tmp_path):
    """A file whose checksum is right and whose contents are not: sizes, tokens, another model's identity."""
    import hashlib
    import json
    import struct

    from eagle3_llama.batching import slot_file

    with batcher.request() as llm:
        take(llm, 5, PROMPT, temp=0.0)
    slot = max(batcher.slots(), key=lambda s: s["n_past"])["id"]
    data = batcher.save_slot(slot)
    at = len(slot_file.MAGIC)
    n = struct.unpack("<I", data[at : at + 4])[0]
    header, body = json.loads(data[at + 4 : at + 4 + n]), data[at + 4 + n : -32]
    for change in (
        {"tokens": header["tokens"][:-1]},
        {"tokens": [10**9]},
        {"tokens": "abc"},
        {"of": {}},
        {"target": 10**12},
        {"head": -1},
        {"target": header["target"] - 8, "head": header["head"] + 8},
    ):
        changed = json.dumps({**header, **change}).encode()
        lie = slot_file.MAGIC + struct.pack("<I", len(changed)) + changed + body
        with pytest.raises(EagleError):
            batcher.load_slot(slot, lie + hashlib.sha256(lie).digest())
        assert batcher.slots()[slot]["n_past"] in (0, len(header["tokens"]))
    assert batcher.load_slot(slot, data) == len(header["tokens"])


def test_settings_are_checked(tiny):
    for wrong in ({"n_parallel": 0}, {"n_parallel": 33}, {"n_ctx": 5}, {"n_batch": 1}):
        with pytest.raises(EagleError, match=next(iter(wrong))):
            BatchSettings(tiny[0], **wrong)
    with Batcher(BatchSettings(tiny[0], n_parallel=2, n_ctx=128, n_threads=1, flash_attn=False)) as b:
        with pytest.raises(EagleError, match="no head"):
            b.request(params=EagleParams(tree="8x2x2"))
        with b.request() as llm:
            assert len(take(llm, 5, PROMPT, temp=0.0)) == 5


def test_real_model():
    """SmolLM2 and its head: eight chat answers at once on four slots."""
    target, head = str(smollm2("Q8_0")), str(shipped_head())
    b = Batcher(BatchSettings(target, head, n_parallel=4, n_ctx=512))
    ask = lambda i: dict(
        messages=[{"role": "user", "content": f"Write {i + 2} words about the sea."}],
        max_tokens=32,
        temperature=0.0,
    )

    def work(i):
        with b.request() as llm:
            return llm.create_chat_completion(**ask(i))["choices"][0]["message"]["content"]

    got = in_threads(8, work, list(range(8)))
    assert b.snapshot()["reused_tokens"] > 0
    with b.request() as llm, pytest.raises(EagleError):  # a grammar that leads nowhere
        llm.create_completion(
            "hello", max_tokens=40, temperature=0.0, grammar=LlamaGrammar.from_string(DEAD_END, verbose=False)
        )
    b.close()
    llm = EagleLlama(target, n_ctx=512, flash_attn=True, verbose=False)
    assert got == [llm.create_chat_completion(**ask(i))["choices"][0]["message"]["content"] for i in range(8)]
    llm.close()


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
