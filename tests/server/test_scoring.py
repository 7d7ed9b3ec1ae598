"""POST /v1/completions to score texts: the logprobs of a prompt's own tokens, with answers and without."""

import json

import numpy as np
import pytest
from client_tools import openai_client
from server_tools import events, idle, running, settings, until
from tiny_models import BOS, PROMPT

from eagle3_llama.runtime.binding import Llama

PATH = "/v1/completions"
TOLERANCE = 5e-3  # the server has flash attention
TEXT = "x5 g8 u22 k10"
LONG = [BOS, *(60 + 7 * i % 250 for i in range(199))]  # of several chunks


@pytest.fixture(scope="module")
def server(files):
    with running(settings(model=files[0], eagle=files[1], n_ctx=256, n_parallel=2, threads=1)) as s:
        yield s


@pytest.fixture(scope="module")
def alone(files):
    llm = Llama(files[0], n_ctx=256, logits_all=True, verbose=False)
    yield llm
    llm.close()


def expected(llm, ids):
    """The log-softmax of the logits before each token but the first, float64 [n - 1, n_vocab]."""
    llm.reset()
    llm.eval(ids)
    rows = llm.scores[: len(ids) - 1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def ask(server, **more):
    r = server.client.post(PATH, json={"echo": True, "max_tokens": 0, "temperature": 0, **more})
    assert r.status_code == 200, r.text
    return r.json()


def check(choice, llm, ids, n_top):
    """Each token of the prompt has its logprob, also among the likeliest."""
    got, rows = choice["logprobs"], expected(llm, ids)
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    values = [rows[i, token] for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(got["token_logprobs"][1 : len(ids)], values, atol=TOLERANCE)
    for text, value, top in zip(got["tokens"][1:], got["token_logprobs"][1:], got["top_logprobs"][1:]):
        assert top[text] == value and len(top) <= n_top + 1 and max(top.values()) < 0


@pytest.mark.parametrize(
    "ids", [PROMPT, PROMPT[1:], LONG, [BOS], [70]], ids=["bos", "plain", "long", "b", "one"]
)
def test_token_ids(server, alone, ids):
    """Also a token that begins a text counts. Nothing is generated."""
    out = ask(server, prompt=ids, logprobs=3)
    [choice] = out["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(ids) and choice["finish_reason"] == "length"
    assert choice["text"] == alone.detokenize(ids).decode("utf-8", "ignore")
    check(choice, alone, ids, 3)
    assert out["usage"]["prompt_tokens"] == out["usage"]["total_tokens"] == len(ids)
    assert out["usage"]["completion_tokens"] == 0


def test_a_text(server, alone):
    """The token that the server puts before it is not shown; that of the text's first token is null."""
    ids = alone.tokenize(TEXT.encode(), add_bos=True, special=True)
    [choice] = ask(server, prompt=TEXT, logprobs=0)["choices"]
    got, rows = choice["logprobs"]["token_logprobs"], expected(alone, ids)
    assert choice["text"] == TEXT and got[0] is None and len(got) == len(ids) - 1
    values = [rows[i, token] for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(got[1:], values[1:], atol=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_batches(server, alone, max_tokens):
    """As lm-evaluation-harness asks: several prompts, of tokens or texts, in the order of the prompts."""
    for prompts in ([PROMPT, LONG, PROMPT[:2], PROMPT], [TEXT, "x5 g8", "u22"]):
        out = ask(server, prompt=prompts, logprobs=1, max_tokens=max_tokens, seed=1234)
        singles = [ask(server, prompt=p, logprobs=1, max_tokens=max_tokens) for p in prompts]
        shown = lambda choice: {k: v for k, v in choice.items() if k != "index"}
        assert [shown(c) for c in out["choices"]] == [shown(s["choices"][0]) for s in singles]
        assert [c["index"] for c in out["choices"]] == list(range(len(prompts)))
    until(lambda: idle(server))


def test_an_answer_behind_it(server, alone):
    """The echoed tokens come before those of the answer, which is what it is without echo."""
    more = {"prompt": PROMPT, "logprobs": 2, "max_tokens": 5}
    [whole], [plain] = ask(server, **more)["choices"], ask(server, **more, echo=False)["choices"]
    check(whole, alone, PROMPT, 2)
    n = len(PROMPT)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert whole["logprobs"][name][n:] == plain["logprobs"][name]
    assert whole["text"] == alone.detokenize(PROMPT).decode() + plain["text"]
    assert ask(server, **{**more, "logprobs": None})["choices"][0]["text"] == whole["text"]


@pytest.mark.parametrize("prompt", [PROMPT, TEXT], ids=["tokens", "text"])
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_streams_say_what_answers_say(server, prompt, max_tokens, logprobs):
    more = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": logprobs, "temperature": 0, "echo": True}
    [whole] = ask(server, **more)["choices"]
    with server.client.stream("POST", PATH, json={**more, "stream": True}) as r:
        chunks = [e["choices"][0] for e in events(r) if e is not None]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    if logprobs is not None:
        found = [v for c in chunks if c["logprobs"] for v in c["logprobs"]["token_logprobs"]]
        assert found == whole["logprobs"]["token_logprobs"]


def test_the_official_client(server):
    completions = openai_client(server).completions
    out = completions.create(model="any", prompt=[PROMPT], echo=True, logprobs=1, max_tokens=0)
    assert len(out.choices[0].logprobs.token_logprobs) == len(PROMPT) and out.usage.completion_tokens == 0


def test_what_is_refused(server):
    r = server.client.post(PATH, json={"prompt": PROMPT, "max_tokens": 0})
    assert r.status_code == 400 and r.json()["error"]["param"] == "max_tokens" and "echo" in r.text
    r = server.client.post(PATH, json={"prompt": [60] * 300, "max_tokens": 0, "echo": True})
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    assert server.client.post("/v1/chat/completions", content=json.dumps(chat)).status_code in (400, 415)
    bodies = server.client.get("/openapi.json").json()["components"]["schemas"]
    least = {
        name: bodies[name]["properties"]["max_tokens"]["anyOf"][0]["minimum"]
        for name in ("ChatBody", "CompletionBody")
    }
    assert least == {"ChatBody": 1, "CompletionBody": 0}


def test_a_slot_that_was_read(server):
    """What follows a scored prompt finds it, and has the text that it would have."""
    fresh = [BOS, *range(100, 140)]
    ask(server, prompt=fresh, logprobs=1)
    out = ask(server, prompt=fresh, echo=False, max_tokens=6)
    assert out["usage"]["prompt_tokens_details"]["cached_tokens"] == len(fresh) - 1
    r = server.client.post("/slots/0", params={"action": "no"})
    assert r.status_code == 400
    other = [BOS, *range(140, 100, -1)]
    ask(server, prompt=other, max_tokens=1, echo=False)
    assert ask(server, prompt=fresh, echo=False, max_tokens=6)["choices"] == out["choices"]
