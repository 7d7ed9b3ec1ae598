"""A client that takes more than its share beside the rounds waits while others generate."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from server_tools import CHAT, ENDLESS, running, settings, until

from eagle3_llama.batching import RequestLlama
from eagle3_llama.server.errors import ApiError
from eagle3_llama.server.jobs import client_quota
from eagle3_llama.server.jobs.client_quota import BURST, MOST_PAUSE, REQUEST, SHARE, ClientQuota
from eagle3_llama.server.jobs.work_queue import Places, ThreadTurns, WorkQueue
from eagle3_llama.server.prompt import message
from eagle3_llama.server.sandbox.cpu_time import NOBODY, Asker, CpuTime, spend, working_for
from eagle3_llama.server.sandbox.pool import Sandbox, SandboxError
from eagle3_llama.server.sandbox.turns import ABOUT, Turns

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
    short, long = CpuTime(), CpuTime()
    assert short.of(render, sandbox, 1)["prompt"] == "a"
    assert long.of(render, sandbox, 300)["prompt"] == "a"
    assert 0 < short.seconds < long.seconds
    before = long.seconds
    assert render(sandbox, 1)["prompt"] == "a" and long.seconds == before


def test_a_child_that_was_ended_counts_with_its_start():
    s = Sandbox(0.3, templates={"template": LOOPS, "eos": "", "bos": ""})
    try:
        render(s, 1)
        spent = CpuTime()
        with pytest.raises(SandboxError, match="longer"):
            spent.of(render, s, 99_999_999)
        assert s._start_seconds > 0 and spent.seconds > 0.3 + 0.5 * s._start_seconds
    finally:
        s.close()


@pytest.fixture
def clock(monkeypatch):
    """clock.now is the time. clock.slept has the seconds of each pause, which takes none."""

    async def sleep(seconds):
        clock.slept.append(seconds)

    clock = SimpleNamespace(now=1000.0, slept=[])
    monkeypatch.setattr(client_quota, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(client_quota, "asyncio", SimpleNamespace(sleep=sleep))
    return clock


def test_who_has_taken_much_waits(clock):
    s = ClientQuota(lambda client: True)
    s.charge("a", BURST)
    assert s.pause("a") == s.pause("b") == 0
    s.charge("a", 0.15)
    assert s.pause("a") == pytest.approx(0.15 / SHARE) and s.pause("b") == 0
    clock.now += 0.1 / SHARE
    assert s.pause("a") == pytest.approx(0.05 / SHARE)
    clock.now += 1e3
    assert s.pause("a") == 0
    s.charge("a", 1e6)
    assert s.pause("a") == pytest.approx(MOST_PAUSE)


def test_alone_nobody_waits(clock):
    busy = set()
    s = ClientQuota(lambda client: client in busy)
    s.charge("a", 10.0)
    asyncio.run(s.turn("a"))
    assert clock.slept == []
    busy.add("a")
    asyncio.run(s.turn("a"))
    assert clock.slept == [pytest.approx(MOST_PAUSE)]


def test_each_request_counts(clock):
    """So many that the burst is used up, at once."""
    s = ClientQuota(lambda client: True)
    for _ in range(int(BURST / REQUEST) - 1):
        asyncio.run(s.turn("a"))
    assert clock.slept == []
    for _ in range(3):
        asyncio.run(s.turn("a"))
    assert clock.slept[-1] == pytest.approx(REQUEST / SHARE, rel=2)


@pytest.mark.parametrize("fails", [False, True])
def test_children_are_charged_to_the_asker(clock, fails):
    s = ClientQuota(lambda client: True)

    def work():
        spend(BURST + 0.1)
        if fails:
            raise KeyError("x")
        return "done"

    async def ask(client):
        await s.turn(client)
        return await WorkQueue(1, 0, "try this").run(work)

    if fails:
        with pytest.raises(KeyError):
            asyncio.run(ask("a"))
    else:
        assert asyncio.run(ask("a")) == "done"
    # and the thread's own time, which is next to nothing
    assert s.pause("a") == pytest.approx((REQUEST + 0.1) / SHARE, abs=0.2) and s.pause("b") == 0


# -- queues: the clients take turns -----------------------------------------------------------------------


def test_turns():
    """The next place is another client's, and the last free one is not for who has one already."""
    turns = Turns()
    many = [turns.wait(Asker("a")) for _ in range(5)]
    assert turns.next(0) is None and turns.next(2) is many[0]
    turns.begin(many[0])
    assert turns.next(1) is many[1]  # nobody else is about
    late = turns.wait(Asker("b"))
    assert turns.next(1) is late
    turns.begin(late)
    assert turns.running == 2 and turns.next(0) is None
    turns.end(late)
    assert turns.next(1) is None and turns.next(2) is many[1]  # b is about
    turns.end(many[0])
    turns.end(many[1])  # it has given up
    assert turns.next(1) is many[2]


def test_who_was_about_long_ago_keeps_no_place(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("eagle3_llama.server.sandbox.turns.time.monotonic", lambda: now[0])
    turns = Turns()
    turns.begin(other := turns.wait(Asker("b")))
    turns.end(other)
    turns.begin(turns.wait(Asker("a")))
    again = turns.wait(Asker("a"))
    assert turns.next(1) is None
    now[0] = ABOUT + 1
    assert turns.next(1) is again


def test_who_pauses_is_passed_over():
    pause = [3.0]
    turns = Turns()
    turns.wait(Asker("a", pause=lambda: pause[0]))
    assert turns.next(2) is None and turns.pause() == 3.0
    other = turns.wait(NOBODY)
    assert turns.next(2) is other
    turns.begin(other)
    pause[0] = 0.0
    assert turns.next(1) is not None and turns.pause() is None


def test_a_full_queue_has_room_for_another_client():
    places = Places(6)
    for _ in range(6):
        assert places.has_room("a")
        places.enter("a")
    assert not places.has_room("a") and places.has_room("b", 3) and not places.has_room("b", 4)
    places.enter("b", 3)
    assert not places.has_room("b") and places.has_room("c", 2) and places.inside == 9
    places.leave("a", 6)
    assert places.has_room("b", 3) and places.inside == 3


def test_work_in_turn(clock):
    """Of one client there is as much as it sends; another one's comes next, and its time is charged."""
    s, order = ClientQuota(lambda client: False), []

    async def ask(work, client):
        await s.turn(client)
        await work.run(order.append, client)

    async def main():
        work = WorkQueue(1, 20, "try this")
        held = asyncio.ensure_future(work.run(threading.Event().wait, 0.05))
        await asyncio.sleep(0)
        jobs = [asyncio.ensure_future(ask(work, client)) for client in "aaaaaab"]
        given_up = asyncio.ensure_future(ask(work, "c"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(held, *jobs)
        assert work.inside == 0
        with pytest.raises(ApiError, match="too many requests try this"):
            await WorkQueue(1, -1, "try this").run(order.append, "d")

    asyncio.run(main())
    assert order[:2] in (["a", "b"], ["b", "a"]) and order.count("a") == 6 and "c" not in order


def test_work_waits_until_its_client_has_paid():
    """Also what was sent at once, when nothing was owed yet."""
    owed, done = [0.0], []

    async def main():
        work = WorkQueue(1, 9, "try this")
        mine = Asker("a", pause=lambda: owed[0])
        token = client_quota._asker.set(mine)
        first = asyncio.ensure_future(work.run(lambda: owed.__setitem__(0, 0.05)))
        second = asyncio.ensure_future(work.run(done.append, "a"))
        client_quota._asker.reset(token)
        await first
        await work.run(done.append, "other")
        assert done == ["other"]
        owed[0] = 0.0
        await second

    asyncio.run(main())
    assert done == ["other", "a"]


def test_threads_in_turn():
    """Those that prepare a request by themselves: one of a client with many, while another one is about."""
    turns, order, inside, go = ThreadTurns(2, "try this"), [], threading.Semaphore(0), threading.Event()

    def work(client):
        with working_for(Asker(client)), turns.place(60.0):
            inside.release()
            go.wait(60)
            order.append(client)

    threads = [threading.Thread(target=work, args=(client,)) for client in "aaaaaa"]
    for t in threads:
        t.start()
    for _ in range(2):
        assert inside.acquire(timeout=60)
    late = threading.Thread(target=work, args=("b",))
    late.start()
    until(lambda: "b" in turns._turns._waiting)
    with pytest.raises(ApiError, match="too many requests try this"), turns.place(0.01):
        pass
    go.set()
    for t in (*threads, late):
        t.join(60)
    assert order.index("b") <= 3 and len(order) == 7 and turns._turns.running == 0


def test_a_thread_is_charged_before_it_has_ended():
    charged = []
    with working_for(Asker("a", charge=charged.append)):
        with ThreadTurns(1, "try this").place(1.0):
            while time.thread_time() < 0.005:
                pass
        assert len(charged) == 1 and charged[0] >= 0
    assert len(charged) == 2 and sum(charged) <= time.thread_time()


def test_children_in_turn(sandbox):
    """A client with many requests for them keeps nobody waiting for all of these."""
    with working_for(Asker("a")):
        render(sandbox, 1)
    until(lambda: len(sandbox._free) == sandbox.CHILDREN)
    order, held = [], sandbox._exchange
    inside, go = threading.Semaphore(0), threading.Event()

    def exchange(child, request, seconds):
        inside.release()
        go.wait(60)
        return held(child, request, seconds)

    def ask(client):
        with working_for(Asker(client)):
            render(sandbox, 1)
        order.append(client)

    sandbox._exchange = exchange
    threads = [threading.Thread(target=ask, args=(client,)) for client in "aaaaaa"]
    for t in threads:
        t.start()
    for _ in range(2):
        assert inside.acquire(timeout=60)
    late = threading.Thread(target=ask, args=("b",))
    late.start()
    until(lambda: "b" in sandbox._turns._waiting)
    go.set()
    for t in (*threads, late):
        t.join(60)
    assert order.index("b") <= 3 and len(order) == 7


@pytest.fixture(scope="module")
def server():
    with running(settings(n_parallel=2, api_key=("a: key-a", "b: key-b"))) as s:
        yield s


def post(server, key, **body):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **body}
    return server.client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})


def test_a_client_waits_while_another_generates(server, monkeypatch):
    """It is answered all the same. The other one, and a lone one, wait for nothing."""
    own, slept = server.app.state.server.quota, []
    told = lambda client, pause=own.pause: slept.append((client, pause(client))) or 0.0
    monkeypatch.setattr(own, "pause", told)
    assert post(server, "key-b").status_code == 200
    own.charge("b", 1e3)
    assert post(server, "key-b").status_code == 200
    assert set(slept) == {("b", 0.0)}
    slept.clear()
    head = {"Authorization": "Bearer key-a"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **ENDLESS}
    with server.client.stream("POST", CHAT, json=body, headers=head) as answer:
        next(answer.iter_lines())
        until(lambda: server.batcher.serves_others("b"))
        assert post(server, "key-b").status_code == 200
    assert {seconds for client, seconds in slept if client == "a"} == {0}
    assert all(0 < seconds <= MOST_PAUSE for client, seconds in slept if client == "b")
    assert {client for client, _ in slept} == {"a", "b"}


def test_what_a_request_takes_is_charged(server, monkeypatch):
    """The thread of its answer, the batcher's time for it alone, and nothing of another client."""
    own, charged = server.app.state.server.quota, []
    monkeypatch.setattr(own, "charge", lambda client, seconds: charged.append((client, seconds)))
    assert post(server, "key-a", messages=[{"role": "user", "content": "word " * 300}]).status_code == 200
    assert {client for client, _ in charged} == {"a"} and min(s for _, s in charged) >= 0
    with server.batcher.request() as llm:
        llm.create_completion([1, *range(20, 320)], max_tokens=1)
        assert 0 < llm.waits()["alone"] <= llm.waits()["first"] + 1.0
    charged.clear()
    monkeypatch.setattr(RequestLlama, "waits", lambda self: {"queued": 0.0, "first": 0.0, "alone": 123.0})
    assert post(server, "key-a").status_code == 200
    until(lambda: ("a", 123.0) in charged)  # when the answer has been sent
    assert charged.count(("a", 123.0)) == 1


def test_status_routes_wait_for_nothing(server):
    server.app.state.server.quota.charge("a", 1e3)
    for path in ("/health", "/v1/models", "/metrics"):
        assert server.client.get(path).status_code == 200


def test_an_answer_that_is_slow_to_read_is_read_less_often(monkeypatch):
    now, readings = [0.0], []
    monkeypatch.setattr(message.time, "monotonic", lambda: now[0])

    def read(text, partial):
        readings.append(now[0])
        spend(0.105)
        return {"content": text, "reasoning_content": "", "tool_calls": []}

    def chunks():
        for i in range(100):
            now[0] = 0.01 * i
            yield {"choices": [{"text": "x", "finish_reason": None, "logprobs": None}]}
        yield {"choices": [{"text": "", "finish_reason": "stop", "logprobs": None}]}

    made = list(message.streamed(chunks(), message.Deltas(read, True), 0.05))
    assert readings == pytest.approx([0.0, 0.3, 0.6, 0.9, 0.99])  # 3 x 0.1 s, and the end
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in made) == "x" * 100
