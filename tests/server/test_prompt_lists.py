"""Lists of prompts in one request of /v1/completions, as evaluation harnesses send them."""

import threading

import pytest
from server_tools import Blocked, events, idle, running, tiny, until

PATH = "/v1/completions"
MANY = [f"x{i} g{i % 7}" for i in range(40)]


@pytest.fixture(scope="module")
def server(files):
    """Two slots, and one request may wait."""
    with running(tiny(files, max_queue=1)) as s:
        yield s


def ask(server, prompt, **more):
    return server.client.post(PATH, json={"prompt": prompt, "max_tokens": 5, "temperature": 0, **more})


def test_each_prompt_has_its_answer(server):
    """40 prompts with 2 slots: they take two places of three, and the answers are those of each alone."""
    places, done = set(), threading.Event()

    def look():
        while not done.is_set():
            places.add(server.gate.inside)

    thread = threading.Thread(target=look)
    thread.start()
    r = ask(server, MANY)
    done.set()
    thread.join()
    assert r.status_code == 200, r.text
    choices = sorted(r.json()["choices"], key=lambda c: c["index"])
    assert [c["index"] for c in choices] == list(range(40)) and max(places) == 2
    for i in (0, 7, 39):
        assert ask(server, MANY[i]).json()["choices"][0]["text"] == choices[i]["text"]
    tokens = [ask(server, p, max_tokens=1).json()["usage"]["prompt_tokens"] for p in MANY]
    assert r.json()["usage"]["prompt_tokens"] == sum(tokens)


def test_two_choices_of_each(server):
    """Choice i of a prompt is the one that it has alone, with the same seed."""
    given = {"n": 2, "temperature": 1.0, "seed": 5}
    choices = ask(server, MANY[:12], **given).json()["choices"]
    texts = {c["index"]: c["text"] for c in choices}
    assert sorted(texts) == list(range(24))
    for p in (0, 11):
        alone = {c["index"]: c["text"] for c in ask(server, MANY[p], **given).json()["choices"]}
        assert [texts[2 * p], texts[2 * p + 1]] == [alone[0], alone[1]]


def test_other_requests_come_between(server):
    """A client that comes after a list waits for the answers that have begun, not for all of them."""
    answers = {}
    body = {"prompt": MANY, "max_tokens": 12, "temperature": 0, "stream": True, "ignore_eos": True}
    ask_list = threading.Thread(target=lambda: answers.update(many=server.client.post(PATH, json=body)))
    ask_one = threading.Thread(target=lambda: answers.update(one=ask(server, "y1")))
    with Blocked(server):  # so the list cannot end before the other client has come
        ask_list.start()
        until(lambda: server.batcher.waiting() == 2)
        ask_one.start()
        until(lambda: server.batcher.waiting() == 3)
    ask_list.join()
    ask_one.join()
    assert answers["one"].status_code == 200
    ended = [c["finish_reason"] for e in events(answers["many"]) if e for c in e["choices"]]
    assert sum(reason is not None for reason in ended) == 40


def test_a_list_that_is_given_up(server):
    """Its places are free again, and what had not begun never begins."""
    body = {"prompt": MANY, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", PATH, json=body) as r:
        next(r.iter_lines())
    until(lambda: idle(server))
    assert server.gate.inside == 0 and not server.gate.jobs
    assert ask(server, "y2").status_code == 200


def test_what_is_refused(server):
    for prompts, n, words in ((65, 1, "at most 64"), (33, 2, "66 answers"), (64, 2, "128")):
        r = ask(server, ["x"] * prompts, n=n)
        error = r.json()["error"]
        assert r.status_code == 400 and error["param"] == "prompt", r.text
        assert "64" in error["message"], (words, error)
    r = ask(server, ["x", "y" * 9000])
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt"
    assert ask(server, ["x"] * 64, max_tokens=1).status_code == 200
    assert len(events(ask(server, ["x"] * 3, stream=True))) > 3


def test_logprobs_that_never_fit(server, monkeypatch):
    """They are refused for good, and not told to come again; fewer of the same prompts are answered."""
    monkeypatch.setattr("eagle3_llama.server.prompt.choices.MAX_LOGPROBS", 100_000)
    scored = {"echo": True, "max_tokens": 1, "logprobs": 1}
    prompts = [[5 + i % 100 for i in range(40)]] * 4
    error = ask(server, prompts, **scored).json()["error"]
    assert error["param"] == "prompt" and "fewer prompts" in error["message"]
    assert len(ask(server, prompts[:2], **scored).json()["choices"]) == 2
