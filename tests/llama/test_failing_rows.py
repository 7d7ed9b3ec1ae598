"""What fails in a later row of a drafted round. Plain decoding has the tokens before it by then, so a reader
gets them, and the error with the next step."""

import itertools

import pytest
from tiny_models import PROMPT, scripted

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.runtime.engine import Draft

from llama_cpp import LlamaGrammar

SETTINGS = {"n_ctx": 256, "n_threads": 1, "flash_attn": True}
N, DRAFTED = 30, 12  # tokens of a text, and of a draft
DECODE_FAILED = -6  # EAGLE3_E_DECODE
STUCK = 'root ::= "abcdefgh" <[1000000]>'  # behind eight letters, a token that there is not


class Boom(Exception):
    pass


def raises_at(n, error=Boom):
    """Logits processors that raise where the text has n tokens behind the prompt."""

    def process(ids, scores):
        if len(ids) == len(PROMPT) + n:
            raise error(f"after {n}")
        return scores

    return {"logits_processor": [process]}


def stuck():
    return {"grammar": LlamaGrammar.from_string(STUCK, verbose=False)}


FAILURES = {
    "the first row": lambda: raises_at(1),
    "a row": lambda: raises_at(5),
    "the last row of a draft": lambda: raises_at(DRAFTED + 1),
    "the row behind it": lambda: raises_at(DRAFTED + 2),
    "a grammar": stuck,
}


def said(llm, n=N, **arguments):
    """The tokens that a reader gets, and what it is told at the end."""
    tokens = []
    try:
        for token in itertools.islice(llm.generate(PROMPT, temp=0.0, **arguments), n):
            tokens.append(token)
    except Exception as e:
        return tokens, f"{type(e).__name__}: {e}"
    return tokens, ""


def drafts_of(llm, text, held=lambda slot: []):
    """Each draft has the next tokens of a text. held(slot): the tokens before the ask's."""

    def propose(ask):
        if ask.params.n_max == 0 or ask.ends_prompt:
            return None
        at = len(held(ask.slot)) - len(PROMPT) + 1
        return Draft(text[at : at + DRAFTED])

    return scripted(llm, propose)


@pytest.fixture(scope="module")
def llm(endless):
    with EagleLlama(endless[0], verbose=False, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def batcher(endless):
    with Batcher(BatchSettings(endless[0], n_parallel=2, **SETTINGS)) as batcher:
        yield batcher


def plain_and_drafted(llm, failure, **more):
    """What both say, and how many tokens a reader would lose if the round's were dropped."""
    llm.eagle_params = EagleParams(n_max=0)
    expected = said(llm, **failure(), **more)
    llm.eagle_params = EagleParams()
    undo = drafts_of(llm, expected[0], lambda _: llm._input_ids)
    before = llm.stats.accepted
    try:
        return expected, said(llm, **failure(), **more), llm.stats.accepted - before
    finally:
        undo()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_the_tokens_before_it(llm, failure, ahead):
    expected, got, accepted = plain_and_drafted(llm, failure, **({"max_tokens": N} if ahead else {}))
    assert expected[1] and got == expected
    assert len(expected[0]) == 1 or accepted > 0
    assert said(llm, 9) == (said(llm, 9)[0], "")  # nothing of it is left


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_the_tokens_before_it_in_a_batch(batcher, failure):
    """Beside another request, whose text does not change."""
    with batcher.request(params=EagleParams(n_max=0)) as llm:
        expected = said(llm, **failure())
    with batcher.request(params=EagleParams(n_max=0)) as llm:
        other = said(llm)
    undo = drafts_of(batcher, expected[0], lambda slot: batcher._slots[slot].tokens)
    try:
        with batcher.request() as llm, batcher.request(params=EagleParams(n_max=0)) as beside:
            tokens = beside.generate(PROMPT, temp=0.0)
            begun = list(itertools.islice(tokens, 3))
            assert said(llm, **failure()) == expected and expected[1]
            assert [*begun, *itertools.islice(tokens, N - 3)] == other[0]
            tokens.close()
    finally:
        undo()


@pytest.mark.parametrize("failure", [stuck, lambda: {**stuck(), **raises_at(7)}], ids=["grammar", "callback"])
def test_a_text_that_ends_before_it(llm, batcher, failure):
    """A stop string, a limit: plain decoding never reaches the row, and nobody is told of it."""
    llm.eagle_params = EagleParams(n_max=0)
    letters = said(llm, **stuck())[0]
    llm.eagle_params = EagleParams()
    for end, why in (({"stop": ["f"]}, "stop"), ({"max_tokens": 5}, "length")):
        asked = {"temperature": 0.0, **end}
        undo = drafts_of(llm, letters, lambda _: llm._input_ids)
        choice = llm(PROMPT, **asked, **failure())["choices"][0]
        undo()
        assert (choice["text"], choice["finish_reason"]) == ("abcde", why)
        undo = drafts_of(batcher, letters, lambda slot: batcher._slots[slot].tokens)
        with batcher.request() as request:
            choice = request(PROMPT, **asked, **failure())["choices"][0]
        undo()
        assert (choice["text"], choice["finish_reason"]) == ("abcde", why)


def test_a_reader_that_goes_elsewhere(llm):
    """It sends tokens before the row: there the text goes on, and the row is forgotten."""
    whole = said(llm)[0]
    undo = drafts_of(llm, whole, lambda _: llm._input_ids)
    tokens = llm.generate(PROMPT, temp=0.0, **raises_at(9))
    begun = list(itertools.islice(tokens, 4))
    undo()
    went_on = [tokens.send([9, 10]), *itertools.islice(tokens, 2)]
    tokens.close()
    text = [*PROMPT, *begun, 9, 10]
    assert went_on == list(itertools.islice(llm.generate(text, temp=0.0), 3))


def test_an_interrupt_is_not_kept(llm):
    """Whoever stops reading before its row would never be interrupted."""
    undo = drafts_of(llm, said(llm)[0], lambda _: llm._input_ids)
    tokens = llm.generate(PROMPT, temp=0.0, **raises_at(9, KeyboardInterrupt))
    next(tokens)
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    undo()
    assert not said(llm, 9)[1]


def test_logits_that_cannot_be_computed(llm, monkeypatch):
    """A failure of all slots together, behind rows whose tokens the samplers have taken: these stay."""
    whole = said(llm)[0]
    own = llm.engine.lib

    class Fails:
        failed = 0

        def __getattr__(self, name):
            return getattr(own, name)

        def eagle3_round_verify(self, *arguments):
            code = own.eagle3_round_verify(*arguments)
            Fails.failed += 1
            return code if Fails.failed % 2 else DECODE_FAILED

    monkeypatch.setattr(llm.engine, "lib", Fails())
    undo = drafts_of(llm, whole, lambda _: llm._input_ids)
    assert said(llm) == (whole, "")
    undo()
    assert Fails.failed > 2
