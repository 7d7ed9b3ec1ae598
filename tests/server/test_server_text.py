"""The server's text of tokens, beside llama-cpp-python's create_completion: texts, ends and logprobs."""

import contextlib
import itertools
import json
import random
import sys

import numpy as np
import pytest
import tiny_models
from server_tools import batcher_of, settings
from tiers import each
from tiny_models import PROMPT

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.server.prompt.completion import TextOfTokens, complete

from llama_cpp import LlamaGrammar

N_CTX = 256
TOLD = "a world, 世界 and 🌍🌎. Then STOP here, or STOP! there"


def told(text=TOLD):
    """A grammar of one text; tokens are single bytes, or a blank with a letter."""
    return LlamaGrammar.from_string(f"root ::= {json.dumps(text, ensure_ascii=False)}", verbose=False)


CASES = [
    {},
    {"stop": ["STOP!"]},
    {"stop": ["STOP?"]},
    {"stop": ["STOP", "Then"]},
    {"stop": ["界 and"]},
    {"stop": ["界", "世"]},
    {"stop": ["🌎"]},
    {"stop": ["a world"]},
    {"stop": ["there", "there "]},
    {"stop": [" there.", "!!", "a wor", "a worms"]},
    {"echo": True},
    {"echo": True, "stop": ["or "]},
    {"logprobs": 3},
    {"logprobs": 0, "stop": ["🌍"]},
    {"logprobs": 2, "echo": True},
    {"logprobs": 2, "max_tokens": 30},
    {"prompt": [*PROMPT], "logprobs": 2, "max_tokens": 12},
    {"prompt": [60] * (N_CTX - 20), "max_tokens": 300},
    {"logit_bias": {"266": -100.0}},
]
LENGTHS = [{"max_tokens": n} for n in (1, 2, 3, 9, *range(14, 34))]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    at = tmp_path_factory.mktemp("tiny")
    target = tiny_models.target(at / "target.gguf", infills=(300, 301, 302))
    return str(target), str(tiny_models.head(at / "head.gguf"))


@pytest.fixture(scope="module")
def batcher(made):
    with Batcher(BatchSettings(*made, n_parallel=2, n_ctx=N_CTX, n_threads=1)) as b:
        yield b


@pytest.fixture(scope="module")
def alone(made):
    """EagleLlama by itself, decoding plainly."""
    with EagleLlama(made[0], text=False, n_ctx=N_CTX, n_threads=1, flash_attn=True, verbose=False) as llm:
        yield llm


def near(ours, theirs):
    """The same logprobs, up to rounding."""
    assert ours["tokens"] == theirs["tokens"] and ours["text_offset"] == theirs["text_offset"]
    for a, b in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
        assert (a is None) == (b is None) and (a is None or a.keys() == b.keys())
    numbers = [[np.nan if x is None else x for x in side["token_logprobs"]] for side in (ours, theirs)]
    np.testing.assert_allclose(*numbers, atol=1e-4)


def at_most(theirs, got, used, most):
    """EagleLlama's answer as far as ours goes, which ends behind the same token as its limit or stop string.

    EagleLlama reads on until a character is whole, as llama-cpp-python does.
    """
    choice, more = theirs["choices"][0], theirs["usage"]["completion_tokens"] - used
    assert used <= most
    if more > 0:
        assert used == most or got["finish_reason"] == "stop"
        assert choice["text"].startswith(got["text"])
        choice = {**choice, "text": got["text"], "finish_reason": got["finish_reason"]}
        if choice["logprobs"] is not None:
            n = len(got["logprobs"]["tokens"])
            choice["logprobs"] = {name: values[:n] for name, values in choice["logprobs"].items()}
    return choice


def check(batcher, alone, asked):
    """Whole and streamed, with drafts and without, the answer is the one that EagleLlama gives."""
    given = {"prompt": "x5 g8 b3", "max_tokens": 100, "seed": 1, "temperature": 0.0, **asked}
    theirs = alone.create_completion(**given)
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    for params in (None, EagleParams(0), EagleParams(n_max=4)):
        with batcher.request(params=params) as llm:
            got = complete(llm, stream=False, **given)["choices"][0]
            used = llm.used().completion
            expected = at_most(theirs, got, used, given["max_tokens"])
            chunks = [c["choices"][0] for c in complete(llm, stream=True, **given)]
            assert llm.used().completion == 2 * used
        assert (got["text"], got["finish_reason"]) == (expected["text"], expected["finish_reason"])
        assert "".join(c["text"] for c in chunks) == expected["text"]
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [expected["finish_reason"]]
        if given.get("logprobs") is None:
            assert got["logprobs"] is None and all(c["logprobs"] is None for c in chunks)
            continue
        near(got["logprobs"], expected["logprobs"])
        parts = [c["logprobs"] for c in chunks if c["logprobs"] is not None]
        streamed = {name: [x for part in parts for x in part[name]] for name in got["logprobs"]}
        n = len(streamed["tokens"])
        assert streamed == {name: values[:n] for name, values in got["logprobs"].items()}
        assert n == len(got["logprobs"]["tokens"]) or got["finish_reason"] == "stop" and given["stop"]


# between characters and within them
@pytest.mark.parametrize("asked", each([*CASES, *LENGTHS], [*CASES, *LENGTHS[:8]]), ids=str)
def test_a_told_text(batcher, alone, asked):
    check(batcher, alone, {"grammar": told(), **asked})


RANDOM = [(stop, seed) for stop in ([], ["a", "q"], ["é", "b2", "\x10"]) for seed in range(6)]


@pytest.mark.parametrize("stop, seed", each(RANDOM, RANDOM[::7]), ids=str)
def test_random_bytes(batcher, alone, seed, stop):
    """Most are no text, and some characters are cut by others."""
    check(batcher, alone, {"seed": seed, "temperature": 2.0, "top_k": 0, "stop": stop})
    check(batcher, alone, {"seed": seed, "temperature": 2.0, "logprobs": 1, "stop": stop, "max_tokens": 40})


def says(pieces):
    """A logits processor: the answer is these bytes, again and again."""
    tokens = itertools.cycle([3 + byte for byte in pieces])

    def process(ids, scores):
        out = np.full_like(scores, -np.inf)
        out[next(tokens)] = 0.0
        return out

    return [process]


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_that_never_end_a_character(batcher, stream):
    """Limits and stop strings count nevertheless."""
    for pieces, stop, n, finish in (
        (b"\xe4", [], 7, "length"),
        (b"\xf0", ["q"], 7, "length"),
        (b"\xe4\xf0q", ["q"], 3, "stop"),
        (b"\xe4q\xe4q\xe4qs", ["qs"], 7, "stop"),
    ):
        with batcher.request(params=EagleParams(0)) as llm:
            given = {"max_tokens": 7, "seed": 1, "stop": stop, "logprobs": 1}
            out = complete(llm, PROMPT, stream, **given, logits_processor=says(pieces))
            choices = [c["choices"][0] for c in (out if stream else [out])]
            assert "".join(c["text"] for c in choices).strip("q") == ""
            assert choices[-1]["finish_reason"] == finish and llm.used().completion == n


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 2}, {"suffix": ""}], ids=str)
def test_a_suffix(batcher, alone, more):
    check(batcher, alone, {"suffix": "end", "max_tokens": 12, **more})


def test_a_prompt_that_is_too_long(batcher):
    with (
        batcher.request() as llm,
        pytest.raises(ValueError, match=rf"\({N_CTX}\) exceed context window of {N_CTX}"),
    ):
        complete(llm, [60] * N_CTX, stream=False, max_tokens=1, seed=0)


def test_each_token_is_looked_up_once(batcher, monkeypatch):
    """However long the text is: none of it is made again."""
    with batcher.request() as llm:
        looked_up, detokenize = [], llm.detokenize

        def counted(tokens, *args, **kwargs):
            looked_up.extend(tokens)
            return detokenize(tokens, *args, **kwargs)

        llm.__dict__["detokenize"] = counted
        for stream in (False, True):
            looked_up.clear()
            before = llm.used().completion
            out = complete(llm, PROMPT, stream=stream, max_tokens=200, seed=0, stop=["never"])
            assert stream is (not isinstance(out, dict)) and list(out)
            assert len(looked_up) == llm.used().completion - before > 100


def test_what_waits():
    """Halves of characters and of stop strings are given out when it is clear that they are none."""
    text = TextOfTokens(["</end>", "<b>"])
    given = []
    for piece in ("a", "b<", "/e", "d ", "\u4e16"[:0], "x<b", "r> <"):
        assert text.add(piece.encode()) and not text.stopped()
        given.append([t for t, _ in text.take()])
    assert given == [["a"], [], [], ["b<", "/e", "d "], [""], [], ["x<b"]]
    assert text.add(b"/end") and not text.stopped() and not list(text.take())
    assert text.add(b"> more") and text.stopped() and text.rest() == ("r> ", 1)
    assert text.whole() == "ab</ed x<br> "


def lines_run(words, text):
    """Lines of Python that are run until a text has been read, byte by byte, with these stop strings."""
    made, count = TextOfTokens(words), 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for byte in text.encode():
            made.add(bytes([byte]))
            made.stopped()
            list(made.take())
    finally:
        sys.settrace(before)
    return count


def test_what_stop_strings_cost():
    """One holds back a text that looks like the beginning of another, everywhere: twice the work for twice
    the length."""
    cost = lambda n: lines_run(["a" * n + "b", "ab" * (n // 2)], "a" * n)
    assert cost(200) < 2.5 * cost(100)


@pytest.mark.parametrize("seed", range(20))
def test_what_may_become_a_stop_string(seed):
    """Of all texts of two letters: what waits is the longest end that is a beginning of one of them."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("ab", k=rng.randint(1, 6))) + rng.choice(["", "c"]) for _ in range(3)]
    made, whole, given = TextOfTokens(words), "", ""
    for piece in ("".join(rng.choices("ab", k=rng.randint(1, 3))) for _ in range(40)):
        made.add(piece.encode())
        whole += piece
        if made.stopped():
            assert made.end == whole.find(made.word) and made.word in words
            return
        given += "".join(text for text, _ in made.take())
        waits = max(n for w in words for n in range(len(w)) if whole.endswith(w[:n]))
        assert whole.startswith(given) and len(whole) - waits - 3 < len(given) <= len(whole) - waits


@pytest.fixture(scope="module")
def demo_models():
    """A batcher of the demo's pair, and the target alone."""
    common = {"n_ctx": 512, "n_threads": 2, "flash_attn": True}
    with (
        contextlib.closing(batcher_of(settings(n_ctx=512))) as batcher,
        EagleLlama(settings().model, text=False, verbose=False, **common) as plain,
    ):
        yield batcher, plain


STOPS = [{"stop": ["x", " six, s"], "logprobs": 2}, {}, {"stop": [", seven"]}, {"echo": True}]


@pytest.mark.parametrize("more", each(STOPS, STOPS[:1]), ids=str)
def test_the_demo_models_text(demo_models, more):
    """A stop string over several words, with the vocabulary of a real model."""
    given = {"prompt": "One, two, three, four,", "max_tokens": 30, "temperature": 0.0, "seed": 0}
    check(*demo_models, {**given, **more})
