"""Requests that take children of the server long wait for it, where others generate meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from eagle3_llama.server.chat import answer
from eagle3_llama.server.jobs import limits
from eagle3_llama.server.jobs.limits import FREE, MOST_PAUSE, PAUSE, Work
from eagle3_llama.server.sandbox.pool import Sandbox, SandboxError
from eagle3_llama.server.sandbox.spent import Spent, spend

LOOPS = "{% for i in range(n) %}{% for j in range(100) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"


@pytest.fixture
def sandbox():
    s = Sandbox(60.0, templates={"template": LOOPS, "eos": "", "bos": ""})
    yield s
    s.close()


def render(sandbox, n):
    kwargs = {"n": n}
    return sandbox.call(do="apply", messages=[{"role": "user", "content": "a"}], chat_template_kwargs=kwargs)


def test_a_childs_time_is_counted(sandbox):
    """The more it does, the longer; nothing of it where nobody counts."""
    short, long = Spent(), Spent()
    assert short.of(render, sandbox, 1)["prompt"] == "a"
    assert long.of(render, sandbox, 3000)["prompt"] == "a"
    assert 0 < short.seconds < long.seconds
    before = long.seconds
    assert render(sandbox, 1)["prompt"] == "a" and long.seconds == before


def test_a_child_that_was_ended_counts_with_its_start():
    s = Sandbox(0.3, templates={"template": LOOPS, "eos": "", "bos": ""})
    try:
        render(s, 1)
        spent = Spent()
        with pytest.raises(SandboxError, match="longer"):
            spent.of(render, s, 99_999_999)
        assert s._start_seconds > 0 and spent.seconds > 0.3 + 0.5 * s._start_seconds
    finally:
        s.close()


@pytest.fixture
def sleeps(monkeypatch):
    """The seconds of each pause, which takes none."""
    seen = []

    async def sleep(seconds):
        seen.append(seconds)

    monkeypatch.setattr(limits.asyncio, "sleep", sleep)
    return seen


@pytest.mark.parametrize(
    "seconds, others, pause",
    [
        (0.5 * FREE, True, None),
        (FREE + 0.1, False, None),
        (FREE + 0.1, True, PAUSE * 0.1),
        (1000.0, True, MOST_PAUSE),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_pauses(sleeps, seconds, others, pause, fails):
    def work():
        spend(seconds)
        if fails:
            raise KeyError("x")
        return "done"

    async def ask():
        return await Work(1, 0, "try this", lambda: others).run(work)

    if fails:
        with pytest.raises(KeyError):
            asyncio.run(ask())
    else:
        assert asyncio.run(ask()) == "done"
    assert sleeps == ([] if pause is None else [pytest.approx(pause)])


def test_a_pause_holds_nobody_up(monkeypatch):
    """Neither a thread nor a place in the queue is taken by a request that waits."""
    work = Work(1, 0, "try this", lambda: True)

    async def both():
        reached, go, own = asyncio.Event(), asyncio.Event(), asyncio.sleep

        async def sleep(seconds):
            if seconds == MOST_PAUSE:
                reached.set()
                await go.wait()
            else:
                await own(seconds)

        monkeypatch.setattr(limits.asyncio, "sleep", sleep)
        slow = asyncio.create_task(work.run(spend, 1000.0))
        await reached.wait()
        assert await work.run(lambda: "served") == "served" and not slow.done()
        go.set()
        await slow

    asyncio.run(both())


def test_an_answer_that_is_slow_to_read_is_read_less_often(monkeypatch):
    now, readings = [0.0], []
    monkeypatch.setattr(answer.time, "monotonic", lambda: now[0])

    def read(text, partial):
        readings.append(now[0])
        spend(0.105)
        return {"content": text, "reasoning_content": "", "tool_calls": []}

    def chunks():
        for i in range(100):
            now[0] = 0.01 * i
            yield {"choices": [{"text": "x", "finish_reason": None, "logprobs": None}]}
        yield {"choices": [{"text": "", "finish_reason": "stop", "logprobs": None}]}

    made = list(answer.streamed(chunks(), answer.Deltas(read, True, False), 0.05))
    assert readings == pytest.approx([0.0, 0.3, 0.6, 0.9, 0.99])  # 3 x 0.1 s, and the end
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in made) == "x" * 100
