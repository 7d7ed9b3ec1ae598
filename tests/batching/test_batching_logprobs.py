"""Logprobs and biases of a batcher's requests: a few numbers a row, and llama-cpp-python's values."""

import contextlib

import numpy as np
import pytest
import tiny_models
from tiny_models import PROMPT

from eagle3_llama import EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings, tokens
from eagle3_llama.batching.candidates import Candidates
from eagle3_llama.batching.logprobs import Logprobs, TopRow, top_row

from llama_cpp import Llama

N_CTX = 512


@pytest.fixture(scope="module")
def batcher(files):
    with Batcher(BatchSettings(*files, n_parallel=2, n_ctx=N_CTX, n_threads=1)) as b:
        yield b


@pytest.fixture(scope="module")
def full(files):
    """llama-cpp-python's own, which keeps every row."""
    llm = Llama(files[0], n_ctx=N_CTX, n_threads=1, flash_attn=True, logits_all=True, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("n", [0, 1, 20, 319, 320, 400])
def test_a_row_is_what_sorting_finds(n):
    rng = np.random.default_rng(n)
    for row in (rng.standard_normal(320), rng.integers(0, 3, 320), np.full(320, 2.0)):
        row = row.astype(np.float32)
        values = Llama.logits_to_logprobs(row)
        expected = sorted(zip(values.tolist(), range(320)), reverse=True)[:n]
        got = top_row(row, 7, n)
        assert list(zip(got.values.tolist(), got.ids.tolist())) == expected and (got.token, got.value) == (
            7,
            float(values[7]),
        )


@pytest.mark.parametrize("n", [0, 1, 20, 320, 400])
def test_a_row_behind_the_samplers_is_what_sorting_finds(n, monkeypatch):
    """Of the few likeliest alone: a vocabulary has 150,000 tokens, and others' requests wait meanwhile."""
    sorted_sizes, lexsort = [], np.lexsort
    monkeypatch.setattr(np, "lexsort", lambda keys: sorted_sizes.append(len(keys[0])) or lexsort(keys))
    off = {"top_k": 0, "typical_p": 1.0, "top_p": 1.0, "min_p": 0.0, "temp": 0.5}
    rng = np.random.default_rng(n)
    for given in (off, {**off, "top_k": 7}, {**off, "min_p": 0.2}):
        with contextlib.closing(Candidates(given, {3: 1.003, 9: -1e9})) as left:
            for row in (rng.standard_normal(320), rng.permutation(320) / 99, rng.standard_normal(320)):
                logits = row.astype(np.float32)
                row = logits.astype(np.float64) + np.where(np.arange(320) == 3, 1.003, 0.0)
                row[9] = -np.inf
                least = np.sort(row)[-7] if given["top_k"] else -np.inf
                least = max(least, row.max() + np.log(0.2)) if given["min_p"] else least
                weights = np.where(row >= least, np.exp(row / 0.5), 0)
                probs, order = weights / weights.sum(), np.argsort(-weights)[: min(n, np.sum(weights > 0))]
                got = left.row(logits, 3, n)
                assert got.ids.tolist() == order.tolist() and got.ids.dtype == np.int32
                np.testing.assert_allclose(np.exp(got.values), probs[order], rtol=1e-4)
                assert got.token == 3 and np.exp(got.value) == pytest.approx(probs[3], rel=1e-4)
    assert max(sorted_sizes, default=0) <= n


def close(ours, theirs):
    """The same object, its numbers up to rounding."""
    assert (
        ours.keys() == theirs.keys()
        and ours["tokens"] == theirs["tokens"]
        and ours["text_offset"] == theirs["text_offset"]
    )
    for a, b in zip(
        [{"": x} for x in ours["token_logprobs"]] + ours["top_logprobs"],
        [{"": x} for x in theirs["token_logprobs"]] + theirs["top_logprobs"],
    ):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.keys() == b.keys()
            np.testing.assert_allclose(
                [np.nan if x is None else x for x in a.values()],
                [np.nan if x is None else x for x in b.values()],
                atol=1e-4,
            )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": True},
        {"logprobs": 0},
        {"stop": ["g8"]},
        {"max_tokens": 1},
        {"echo": True, "max_tokens": 1},
    ],
    ids=str,
)
def test_whole_answers_are_llamas(batcher, full, more):
    ask = {"prompt": "x5 g8 b3", "max_tokens": 16, "temperature": 0.0, "logprobs": 4, **more}
    expected = full.create_completion(**ask)["choices"][0]
    with batcher.request(params=EagleParams(n_max=3)) as llm:
        got = llm.create_completion(**ask)["choices"][0]
    assert got["text"] == expected["text"] and got["finish_reason"] == expected["finish_reason"]
    close(got["logprobs"], expected["logprobs"])


def test_streams_have_each_tokens_once(batcher):
    """In order, each with the chunk that has its text."""
    ask = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "logprobs": 3}
    with batcher.request() as llm:
        whole = llm.create_completion(**ask)["choices"][0]["logprobs"]
    for params in (EagleParams(0), EagleParams(n_max=4)):
        with batcher.request(params=params) as llm:
            chunks = [c["choices"][0] for c in llm.create_completion(**ask, stream=True)]
        said = [c["logprobs"] for c in chunks if c["logprobs"] is not None]
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            assert [x for s in said for x in s[key]] == whole[key]
        assert chunks[-1]["finish_reason"] == "length" and chunks[-1]["logprobs"] is None


def test_characters_of_several_tokens():
    """Their tokens come with the chunk that has the character, and offsets count characters."""
    pieces = {1: b"a", 2: b"\xe2\x82", 3: b"\xac", 4: b"", 5: b"bc", 9: b"<s>"}
    out = Logprobs(lambda ids: b"".join(pieces[i] for i in ids), 9, 10)
    out.rows = [
        TopRow(t, -1.0, np.array([1], np.int32), np.array([-0.5], np.float32)) for t in (1, 2, 3, 4, 5, 9)
    ]
    said = [out.chunk(text) for text in ("a", "€", "", "bc", "")]
    assert [s["tokens"] for s in said] == [["a"], ["", ""], [""], ["bc"], []] and out.chunk("") is None
    assert [s["text_offset"] for s in said] == [[10], [11, 11], [12], [12], []]


def test_the_first_token_of_a_prompt_without_a_beginning(files, batcher, full):
    """The row of each token is that of the token before it, with a beginning-of-text or without."""
    with batcher.request() as llm:
        llm.__dict__["token_bos"] = lambda: -1  # as of a model that has none
        llm._model = NoBeginning(llm._model)
        got = llm.create_completion("x5 g8", max_tokens=4, temperature=0.0, logprobs=2, echo=True)["choices"][
            0
        ]["logprobs"]
        ids = llm.tokenize(b"x5 g8", add_bos=False)
    full.reset()
    full.eval(ids)
    rows = Llama.logits_to_logprobs(full._scores[: len(ids)])
    assert got["token_logprobs"][0] is None
    np.testing.assert_allclose(
        got["token_logprobs"][1 : len(ids)], [rows[i, t] for i, t in enumerate(ids[1:])], atol=1e-4
    )


class NoBeginning:
    def __init__(self, model):
        self._model = model

    def add_bos_token(self):
        return False

    def __getattr__(self, name):
        return getattr(self._model, name)


def test_rows_in_flight_are_few(batcher, monkeypatch):
    """No row of logits is kept. Reduced rows are kept only for the rounds by which a slow reader lags."""
    most, pieces = [], []
    deliver = batcher._scheduler._deliver

    def watched(slot, job, piece):
        pieces.append(piece)
        deliver(slot, job, piece)
        most.append(slot.job.outputs.qsize() if slot.job is not None else 0)

    monkeypatch.setattr(batcher._scheduler, "_deliver", watched)
    with batcher.request(params=EagleParams(0)) as llm:
        stream = llm.create_completion(
            PROMPT,
            max_tokens=300,
            temperature=0.0,
            logprobs=20,
            stream=True,
            logit_bias={tiny_models.EOS: -100},
        )
        job = None
        while (
            job is None or not job.ready.is_set()
        ):  # it runs as far ahead as it may, then waits for the reader
            next(stream)
            job = llm._job
        batcher.inbox.run(lambda: None)
        assert job.n_tokens <= job.read_ahead_to <= len(pieces) + tokens.AHEAD
        n = 1 + sum(1 for _ in stream)
    assert n > 100 and max(most) <= tokens.AHEAD and all(p.logits is None for p in pieces)
    assert all(len(t.ids) == 20 and t.ids.nbytes + t.values.nbytes == 160 for p in pieces for t in p.tops)


def test_a_criterion_and_its_rows(batcher, monkeypatch):
    """A row comes with each token, so the batcher does not run far ahead."""
    wanted = []
    want = batcher.inbox.want
    monkeypatch.setattr(batcher.inbox, "want", lambda job, n: (wanted.append(n), want(job, n)))
    with batcher.request() as llm:
        out = []
        for token in llm.generate(PROMPT, temp=0.0, stopping_criteria=lambda ids, row: False):
            out.append(token)
            assert max(wanted, default=0) <= len(out) + tokens.ROWS_AHEAD
            if len(out) == 30:
                break


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 30}, {"temperature": 0.8, "repeat_penalty": 1.3}],
    ids=str,
)
@pytest.mark.parametrize("processors", [False, True])
def test_a_bias_is_native_and_the_same(batcher, full, monkeypatch, sampling, processors):
    """No logits processor of Python's runs for it, and beside one it is not lost."""
    bias, seen = {60: -100.0, 2: -100.0, 70: 2.5, 110: 3.0}, []

    def plus(ids, scores):
        seen.append(1)
        scores = scores.copy()
        scores[65] += 2
        return scores

    def both(ids, scores):
        scores = plus(ids, scores)
        for token, value in bias.items():
            scores[token] += np.float32(value)
        return scores

    ask = {"prompt": PROMPT, "max_tokens": 30, "seed": 3, **sampling}
    given = {"logits_processor": [both]} if processors else {"logit_bias": bias}
    expected = full.create_completion(**ask, **given)["choices"][0]["text"]
    seen.clear()
    jobs, submit = [], batcher.inbox.submit
    monkeypatch.setattr(batcher.inbox, "submit", lambda job: (jobs.append(job.processors), submit(job)))
    for params in (EagleParams(0), EagleParams(n_max=3), EagleParams(tree="8x2x3")):
        with batcher.request(params=params) as llm:
            got = llm.create_completion(
                **ask, logit_bias=bias, **({"logits_processor": [plus]} if processors else {})
            )
            assert (
                got["choices"][0]["text"] == expected and (jobs[-1] is not None) == bool(seen) == processors
            )
