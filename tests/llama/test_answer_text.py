"""The text of a completion at its end: what a full context cuts, and what a stop string holds back."""

import numpy as np
import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings

from llama_cpp import LlamaGrammar
from llama_cpp.llama_chat_format import ChatFormatterResponse, chat_formatter_to_chat_completion_handler

N_CTX, BYTES = 256, 3  # BYTES: the id of the token of byte 0


@pytest.fixture(scope="module", params=["alone", "alone, with a head", "batcher"])
def llm_of(request, files):
    """A function that gives a model; the context has N_CTX tokens."""
    if request.param == "batcher":
        with Batcher(BatchSettings(*files, n_parallel=2, n_ctx=N_CTX, n_threads=1)) as b:
            yield lambda: b.request(params=EagleParams(n_max=3))
        return
    head = files[1] if "head" in request.param else None
    with EagleLlama(files[0], eagle=head, n_ctx=N_CTX, n_threads=1, verbose=False) as llm:
        yield lambda: llm


def says(text, start):
    """A logits processor: the answer to a prompt of `start` tokens is this text, again and again."""
    tokens = [BYTES + byte for byte in text.encode()]

    def process(ids, scores):
        out = np.full_like(scores, -np.inf)
        out[tokens[(len(ids) - start) % len(tokens)]] = 0.0
        return out

    return [process]


def joined(chunks):
    """(text, finish reason, of any chunk after another) of a stream."""
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
    assert all(c["finish_reason"] is None for c in choices[:-1])
    return "".join(texts), choices[-1]["finish_reason"]


@pytest.mark.parametrize("n_prompt", [240, 241, 242])  # the context ends behind each byte of a character
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_an_answer_that_the_context_cuts(llm_of, n_prompt, max_tokens):
    prompt = [*PROMPT, *[60] * (n_prompt - len(PROMPT))]
    ask = {"max_tokens": max_tokens, "temperature": 0.0, "logits_processor": says("世", n_prompt)}
    # the last token needs no place, and is asked for only within a character
    whole = (N_CTX - n_prompt + 1) // 3
    llm = llm_of()
    got = llm.create_completion(prompt, **ask)
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("世" * whole, "length")
    assert got["usage"]["completion_tokens"] - (N_CTX - n_prompt) in (0, 1)
    assert joined(llm.create_completion(prompt, stream=True, **ask)) == ("世" * whole, "length")


def test_what_the_context_cuts_is_echoed(llm_of):
    llm, prompt = llm_of(), "a" * 240
    n = len(llm.tokenize(prompt.encode()))
    ask = {"max_tokens": None, "temperature": 0.0, "logits_processor": says("ab世", n), "echo": True}
    text = llm.create_completion(prompt, **ask)["choices"][0]["text"]
    assert text == prompt + ("ab世" * 9).encode()[: N_CTX - n + 1].decode("utf-8", "ignore")


def test_a_chat_that_the_context_cuts(llm_of):
    llm, text = llm_of(), "a" * 237
    llm.chat_handler = chat_formatter_to_chat_completion_handler(
        lambda **_: ChatFormatterResponse(prompt=text)
    )
    n_prompt = len(llm.tokenize(text.encode()))
    ask = {"messages": [], "temperature": 0.0, "logits_processor": says("世", n_prompt)}
    expected = "世" * ((N_CTX - n_prompt + 1) // 3)
    try:
        choice = llm.create_chat_completion(**ask)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "length")
        assert joined(llm.create_chat_completion(**ask, stream=True)) == (expected, "length")
    finally:
        llm.chat_handler = None


@pytest.mark.parametrize("text, stop", [("世界", "界x"), ("añb", "ñby"), ("x世", "世"), ("世界", "\u4e17")])
def test_streams_keep_what_a_stop_string_held_back(llm_of, text, stop):
    ask = {"max_tokens": len(text.encode()), "temperature": 0.0, "stop": [stop]}
    ask["logits_processor"] = says(text, len(PROMPT))
    llm = llm_of()
    choice = llm.create_completion(PROMPT, **ask)["choices"][0]
    assert choice["text"] == text.partition(stop)[0]
    assert joined(llm.create_completion(PROMPT, **ask, stream=True)) == (
        choice["text"],
        choice["finish_reason"],
    )


def test_generate_still_says_that_the_context_is_full(files):
    """Llama's generate() raises there."""
    grammar = LlamaGrammar.from_string('root ::= "a"+', verbose=False)
    with EagleLlama(files[0], n_ctx=N_CTX, n_threads=1, verbose=False) as llm:
        tokens = llm.generate([1] * 250, temp=0.0, grammar=grammar)
        got = [next(tokens) for _ in range(N_CTX - 250 + 1)]
        assert len(got) == 7
        with pytest.raises(EagleError, match="full"):
            next(tokens)
