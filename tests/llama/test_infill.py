"""Fill in the middle: the tokens of a prompt with a suffix are the vocabulary's."""

import pytest
import tiny_models
from tiny_models import BOS

from eagle3_llama import EagleError, EagleLlama  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings

PRE, SUF, MID, BYTES = 300, 301, 302, 3
SETTINGS = {"n_ctx": 256, "n_threads": 1}
ASK = {"max_tokens": 5, "temperature": 0.0}


@pytest.fixture(scope="module")
def able(tmp_path_factory):
    return str(tiny_models.target(tmp_path_factory.mktemp("able") / "able.gguf", infills=(PRE, SUF, MID)))


@pytest.fixture(params=["alone", "batcher"])
def open_llm(request):
    opened = []

    def open_(path, **more):
        if request.param == "alone":
            opened.append(EagleLlama(path, verbose=False, **SETTINGS, **more))
            return opened[-1]
        opened.append(Batcher(BatchSettings(path, n_parallel=1, **SETTINGS)))
        opened[-1].base.spm_infill = more.get("spm_infill", False)
        return opened[-1].request()

    yield open_
    for one in opened:
        one.close()


def ids(text):
    """What the tiny model makes of a text in its own letters: a blank, which no token has, and bytes."""
    return [BYTES + byte for byte in text.encode()]


def prompt_of(llm, n):
    return llm.input_ids[:n].tolist()


@pytest.mark.parametrize("spm", [False, True])
@pytest.mark.parametrize("prompt", ["def", ids("\u2581def")])
def test_the_tokens_are_the_vocabularys(able, open_llm, spm, prompt):
    llm = open_llm(able, spm_infill=spm)
    got = llm.create_completion(prompt, suffix="end", **ASK)
    before, after = [PRE, *ids("\u2581def")], [SUF, *ids("end")]
    expected = [BOS, *(after + before if spm else before + after), MID]
    assert got["usage"]["prompt_tokens"] == len(expected) and prompt_of(llm, len(expected)) == expected
    plain = llm.create_completion(expected, **ASK)["choices"][0]["text"]
    assert got["choices"][0]["text"] == plain
    chunks = list(llm.create_completion(prompt, suffix="end", stream=True, **ASK))
    assert "".join(c["choices"][0]["text"] for c in chunks) == plain


def test_echo_and_logprobs(able, open_llm):
    llm = open_llm(able)
    plain = llm.create_completion("def", suffix="end", **ASK)["choices"][0]["text"]
    echoed = llm.create_completion("def", suffix="end", echo=True, **ASK)["choices"][0]["text"]
    assert echoed == "def" + plain
    if isinstance(llm, EagleLlama):  # elsewhere logprobs need no setting
        llm.close()
        llm = open_llm(able, logits_all=True)
    logprobs = llm.create_completion("def", suffix="end", logprobs=1, **ASK)["choices"][0]["logprobs"]
    assert logprobs["text_offset"][0] == len("def") and len(logprobs["tokens"]) == 5
    with pytest.raises(EagleError, match="echo"):
        llm.create_completion("def", suffix="end", echo=True, logprobs=1, **ASK)


def test_a_model_without_these_tokens(files, able, open_llm):
    llm = open_llm(files[0])
    with pytest.raises(EagleError, match="fill in the middle"):
        llm.create_completion("def", suffix="end", **ASK)
    plain = llm.create_completion("def", **ASK)
    assert llm.create_completion("def", suffix="", **ASK)["choices"] == plain["choices"]
    llm = open_llm(able)
    llm.create_completion("def", suffix="", **ASK)
    assert prompt_of(llm, 10) == [BOS, PRE, *ids("\u2581def"), SUF, MID]
