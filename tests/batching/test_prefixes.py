"""Prompts are decoded once: texts that slots gave up come back, and slots are copied, bit by bit."""

import contextlib
import ctypes
import random
import threading

import pytest
from batch_tools import N_CTX, jobs_at_once, take, tiny  # noqa: F401 - fixtures too
from threads import ended, held, started, wait_for

from eagle3_llama import EagleError, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.prefixes import CopyCosts

MINE = "the client"


@pytest.fixture(autouse=True)
def copies_are_free(monkeypatch):
    """So that what is copied does not depend on how fast this machine is."""
    monkeypatch.setattr(CopyCosts, "copy", lambda self, n_bytes: 0.0)


@contextlib.contextmanager
def opened(files, n_parallel, **more):
    settings = {"n_ctx": N_CTX, "n_threads": 1, "flash_attn": True, **more}
    with Batcher(BatchSettings(str(files[0]), str(files[1]), n_parallel=n_parallel, **settings)) as batcher:
        yield batcher


def text(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 120) for _ in range(n)]


def say(batcher, prompt, seed=1, client=MINE, n=6, params=None):
    """A sampled answer of n tokens: what its slot then holds, and the logits of each row, as bytes."""
    rows = []

    def see(ids, scores):
        rows.append((ids.tolist(), scores.tobytes()))
        return scores

    with batcher.request(params=params or EagleParams(3), client=client) as llm:
        llm.set_seed(seed)
        llm.create_completion(
            prompt, max_tokens=n, temperature=0.9, logits_processor=[see], logit_bias={2: -100}
        )
        used = llm.usage()
    cached = used["prompt_tokens_details"]["cached_tokens"]
    wait_for(lambda: not any(s["busy"] for s in batcher.slots()))
    return rows[-1][0], rows, used["prompt_tokens"] - cached


def talk(batcher, n_agents=6, n_turns=4, user=10, system=40):
    """Agents in turn, each turn with the whole text so far. Their logits, and how much was decoded."""
    common, rows, decoded = text(system, 0), [], []
    texts = [[*common, 100 + agent, *text(19, agent)] for agent in range(n_agents)]
    for turn in range(n_turns):
        for agent, so_far in enumerate(texts):
            prompt = [*so_far, *text(user, 100 * turn + agent)] if turn else so_far
            texts[agent], seen, n = say(batcher, prompt, seed=agent + 7 * turn)
            rows.append(seen)
            decoded.append(n)
    return rows, decoded


# -- texts come back --------------------------------------------------------------------------------------


def test_six_agents_on_four_slots(tiny):
    """From the second turn on, only what the user says is decoded. Rows are as with a slot for each agent."""
    with opened(tiny, 6, prompt_cache=0) as batcher:
        expected, alone = talk(batcher)
    with opened(tiny, 4) as batcher:
        got, decoded = talk(batcher)
        seen = batcher.snapshot()
        assert decoded == alone == [60, *[20] * 5, *[10] * 18]
        assert seen["prompt_tokens"] == sum(decoded) and seen["failures"] == 0
        assert seen["saved_texts"] >= 6 * 3 - 4 and seen["restored_tokens"] > 1000
        assert batcher.memory().prompt_cache == seen["prompt_cache_bytes"] > 0
        assert "prompt cache" in str(batcher.memory())
    assert got == expected
    assert batcher.snapshot()["prompt_cache_bytes"] == 0  # closed


def test_without_a_cache_texts_are_decoded_again(tiny):
    """What the test above would see if nothing came back: with no cache, two of six agents have no slot."""
    with opened(tiny, 4, prompt_cache=0) as batcher:
        _, decoded = talk(batcher)
        seen = batcher.snapshot()
        assert sum(decoded[6:]) > 18 * 10 and seen["saved_texts"] == seen["prompt_cache_texts"] == 0


@pytest.mark.parametrize("params", [EagleParams(), EagleParams(tree="12x3x3"), EagleParams(n_max=0)])
def test_drafts_go_on(tiny, params):
    """A text that comes back is drafted for as if it had stayed: head and text have their states again."""
    prompt, more = text(100, 1), text(12, 2)
    answers = []
    for others in (0, 3):
        with opened(tiny, 1) as batcher:
            held, *_ = say(batcher, prompt, params=params, n=30)
            for other in range(others):
                say(batcher, text(90, 50 + other))
            with batcher.request(params=params, client=MINE) as llm:
                llm.set_seed(5)
                got = take(llm, 40, [*held, *more], temp=0.8)
                cached = llm.usage()["prompt_tokens_details"]["cached_tokens"]
                planned = params.planned and params.n_max is None  # by times, which differ
                drafted = 0 if planned else llm.stats.drafted
            assert cached == len(held)
            answers.append((got, drafted))
    assert answers[0] == answers[1]


def test_a_branch_of_a_text(tiny):
    """A prompt that shares a part of a saved text has this part, and the text stays for others."""
    with opened(tiny, 1) as batcher:
        held, *_ = say(batcher, text(120, 1))
        say(batcher, text(100, 2))
        for branch in range(3):
            assert say(batcher, [*held[:80], *text(20, 10 + branch)])[2] == 20
        assert say(batcher, [*held, 5, 6])[2] == 2


def test_answers_that_are_left_out(tiny):
    """A conversation that goes on without its last answers leaves no text behind that nobody needs."""
    with opened(tiny, 1) as batcher:
        prompts = [text(60, agent) for agent in range(2)]
        for turn in range(4):
            for prompt in prompts:
                assert say(batcher, prompt, n=20)[2] == (10 if turn else 60)
                assert say(batcher, prompt, n=20, seed=9)[2] == 1
                prompt += [120 + turn, *text(9, 20 + turn)]
            assert batcher.snapshot()["prompt_cache_texts"] == 1  # of the agent that has no slot


def test_texts_of_other_clients(tiny):
    """Nobody can find out by time or by counts what another client has sent: slot, copy or cache."""
    with opened(tiny, 2) as batcher:
        prompt = text(100, 1)
        assert say(batcher, prompt, client="key 0")[2] == 100
        for _ in range(3):
            assert say(batcher, [*prompt[:-1], 9], client="key 1")[2] in (100, 1)
        assert say(batcher, text(100, 2), client="key 1")[2] == 100
        assert say(batcher, text(100, 3), client="key 1")[2] == 100
        assert batcher.snapshot()["prompt_cache_texts"] >= 2
        assert say(batcher, prompt, client="key 2")[2] == 100
        assert say(batcher, prompt, client="key 0")[2] == 1
        batcher.load_slot(0, batcher.save_slot(0, "key 0"), "key 3")  # a slot's file says whose it is now
        n = batcher.slots()[0]["n_past"]
        assert n and batcher._slots[0].client == "key 3"


# -- requests that come together --------------------------------------------------------------------------


def together(batcher, prompts):
    """All at once, the first one first. What each one's slot held, its rows, and the tokens decoded."""
    got = jobs_at_once(batcher, [lambda p=p, i=i: say(batcher, p, seed=i) for i, p in enumerate(prompts)])
    assert not any(isinstance(g, BaseException) for g in got), got
    return got


@pytest.mark.parametrize("own", [10, 0])
def test_a_new_prompt_is_decoded_once(tiny, own):
    """Four requests with one new system prompt, or four answers to one prompt. Rows are as one by one."""
    prompts = [[*text(200, 1), *([100 + i, *text(own - 1, i)] if own else [])] for i in range(4)]
    with opened(tiny, 4) as batcher:
        got = together(batcher, prompts)
        seen = batcher.snapshot()
        assert sorted(n for *_, n in got) == sorted([200 + own, *[own or 1] * 3])
        assert seen["copied_tokens"] == seen["reused_tokens"] == 3 * (200 if own else 199)
        assert seen["prompt_tokens"] == sum(n for *_, n in got)
    with opened(tiny, 4) as batcher:
        expected = [say(batcher, p, seed=i) for i, p in enumerate(prompts)]
    first = next(i for i, (*_, n) in enumerate(got) if n == 200 + own)
    assert [g[1] for i, g in enumerate(got) if i not in (0, first)] == [
        e[1] for i, e in enumerate(expected) if i not in (0, first)
    ]
    assert [g[0] for g in got] == [e[0] for e in expected]


def test_the_first_one_is_cancelled(tiny, monkeypatch):
    """Those that wait for what it decodes go on without it, and so does one that waits for a slot."""
    prompts = [[*text(200, 1), 100 + i, *text(30, i)] for i in range(4)]
    with opened(tiny, 3) as batcher:
        rounds, chunk = batcher._scheduler, batcher._scheduler._prompt_chunk
        cancelled = []

        def cancels(slot, job, n):
            if not cancelled:
                assert [s.job is None for s in batcher._slots].count(True) == 2 and batcher.waiting() == 3
                cancelled.append(job)
                job.cancelled = "cancelled"
                n = 100
            chunk(slot, job, n)

        monkeypatch.setattr(rounds, "_prompt_chunk", cancels)
        got = jobs_at_once(batcher, [lambda p=p: say(batcher, p) for p in prompts])
        assert sum(isinstance(g, EagleError) for g in got) == 1
        assert sum(n for *_, n in (g for g in got if not isinstance(g, EagleError))) < 3 * 231 - 100
        assert batcher.snapshot()["failures"] == batcher.waiting() == 0


def test_others_are_not_held_back(tiny):
    """A request that waits for a prefix keeps a slot free; one behind it takes another."""
    prompts = [[*text(300, 1), 100], [*text(300, 1), 101], text(200, 2)]
    with opened(tiny, 3) as batcher:
        seen, place = [], batcher._prefixes.place
        batcher._prefixes.place = lambda job, slots: (seen.append(job.prompt), place(job, slots))[1]
        got = together(batcher, prompts)
        assert sum(n for *_, n in got) == 301 + 1 + 200
        assert seen.index(prompts[2]) < 2


# -- what goes wrong --------------------------------------------------------------------------------------


def test_failures_while_saving(tiny, monkeypatch):
    """A text that cannot be saved or copied is decoded again; no request notices."""
    with opened(tiny, 1) as batcher:
        expected = [say(batcher, text(100, i))[0] for i in range(3)]
    for error in (MemoryError(), EagleError(ErrorKind.MEMORY, "not enough memory")):
        with opened(tiny, 1) as batcher:

            def fail(slot, error=error):
                raise error

            monkeypatch.setattr(batcher._prefixes.states, "take", fail)
            assert [say(batcher, text(100, i))[0] for i in range(3)] == expected
            assert say(batcher, text(100, 0))[2] == 100
            seen = batcher.snapshot()
            assert seen["failures"] == seen["saved_texts"] == seen["prompt_cache_bytes"] == 0
        with opened(tiny, 4) as batcher:
            monkeypatch.setattr(batcher._prefixes.states, "take", fail)
            got = together(batcher, [[*text(200, 1), 100 + i] for i in range(4)])
            assert sum(n for *_, n in got) > 2 * 200 and batcher.snapshot()["failures"] == 0


def test_a_saved_text_that_does_not_fit(tiny):
    """It is gone then, and the prompt is decoded again."""
    with opened(tiny, 1) as batcher:
        expected = say(batcher, text(100, 1))[0]
        for part in ("target", "head"):
            say(batcher, text(100, 2))
            (saved,) = [t for t in batcher._prefixes.cache._texts[MINE] if t.state.tokens == expected]
            cut = bytes(getattr(saved.state, part))[:-64]
            setattr(saved.state, part, cut if part == "head" else (ctypes.c_uint8 * len(cut))(*cut))
            assert say(batcher, text(100, 1))[::2] == (expected, 100)
        assert batcher.snapshot()["failures"] == 0


def test_many_requests_and_little_room(tiny):
    """Threads that talk and leave, with room for a few texts: the bound holds, and answers are as alone."""
    bound = 200_000
    rng = random.Random(4)
    jobs = [(text(40 + 20 * (i % 4), i % 5) + text(rng.randrange(1, 40), i), i % 4 == 3) for i in range(40)]
    with opened(tiny, 1, prompt_cache=0) as batcher:
        expected = [say(batcher, prompt, n=8)[0] for prompt, _ in jobs]
    with opened(tiny, 3, prompt_cache=bound) as batcher:
        cache, sizes, failed = batcher._prefixes.cache, [], []

        def work(start):
            for i in range(start, len(jobs), 6):
                prompt, leaves = jobs[i]
                with batcher.request(client=f"key {i % 2}") as llm:
                    llm.set_seed(1)
                    seen = []
                    llm.create_completion(
                        prompt,
                        max_tokens=2 if leaves else 8,
                        temperature=0.9,
                        logit_bias={2: -100},
                        logits_processor=[
                            lambda ids, scores, seen=seen: (seen.append(ids.tolist()), scores)[1]
                        ],
                    )
                    if seen[-1] != expected[i][: len(seen[-1])] or (not leaves and seen[-1] != expected[i]):
                        failed.append(i)
                sizes.append(cache.n_bytes)

        threads = [started(work, start) for start in range(6)]
        ended(*[t for t, _ in threads], seconds=240)
        assert not failed and all(not got or got == [None] for _, got in threads)
        assert 0 < max(sizes) <= bound
        assert cache.n_bytes == sum(t.n_bytes for texts in cache._texts.values() for t in texts)


@pytest.mark.parametrize("clients", [("key 0", "key 1"), ("key 1", "key 0")])
def test_a_failure_between_two_clients(tiny, monkeypatch, clients):
    """Whatever fails while a slot changes its owner, nobody gets the other one's text."""
    first, second = clients
    with opened(tiny, 1) as batcher:
        keep = batcher._prefixes.keep

        def fails(slot, n):
            monkeypatch.setattr(batcher._prefixes, "keep", keep)
            raise RuntimeError("it failed")

        say(batcher, text(90, 1), client=first)
        monkeypatch.setattr(batcher._prefixes, "keep", fails)
        with pytest.raises(RuntimeError, match="it failed"):
            say(batcher, text(90, 1), client=second)
        assert say(batcher, [*text(90, 1), 5], client=second)[2] == 91


def test_closing(tiny):
    """Requests that wait for a prefix are told that the batcher closes."""
    with opened(tiny, 3) as batcher:
        threads = []
        with held(batcher):
            for i in range(3):
                threads.append(started(say, batcher, [*text(300, 1), 100 + i]))
            wait_for(lambda: batcher.waiting() == 3)
            closing = threading.Thread(target=batcher.close)
            closing.start()
            wait_for(lambda: batcher.inbox.closing is not None)
        ended(closing, *[t for t, _ in threads])
        assert all(isinstance(got[0], EagleError) for _, got in threads)
