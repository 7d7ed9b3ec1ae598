"""Rounds that run before the caller has read the tokens of those before them: when they do, and that text,
context and errors are as if they had waited for it."""

import contextlib
import itertools

import pytest
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.runtime.round_tokens import RoundTokens

from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

SETTINGS = {"n_ctx": 128, "n_batch": 32, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
SAMPLED = {"temperature": 0.9, "top_k": 0, "seed": 7}
N = 60


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """However slow this machine is."""
    monkeypatch.setattr("eagle3_llama.runtime.engine.MOST_SECONDS", 1e6)


@pytest.fixture
def llm(files):
    with EagleLlama(files[0], text=False, **SETTINGS) as llm:
        watch(llm)
        yield llm


def watch(llm):
    """llm.runs: of each run, the numbers of tokens that its rounds brought."""
    own, llm.runs = llm.engine.run, []

    def run(*args):
        rounds = own(*args)
        llm.runs.append([len(r.tokens) for r in rounds if isinstance(r, RoundTokens)])
        return rounds

    llm.engine.run = run


def test_a_completion(files, llm):
    """Its text is Llama's; its rounds ran several at a time, and each is counted."""
    with contextlib.closing(Llama(files[0], **SETTINGS)) as plain:
        whole = plain(PROMPT, max_tokens=N, **SAMPLED)["choices"][0]["text"]
    assert llm(PROMPT, max_tokens=N, **SAMPLED)["choices"][0]["text"] == whole
    chunks = llm(PROMPT, max_tokens=N, stream=True, **SAMPLED)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert max(n for (n,) in llm.runs) == 16 and sum(n for (n,) in llm.runs) == 2 * (N - 1)
    assert llm.stats.rounds == 2 * (N - 1) and llm.stats.tokens == 2 * N
    assert all(getattr(llm.stats, part) > 0 for part in ("target", "verify", "draft", "other"))
    assert llm.stats.seconds > 0


def test_a_run_and_its_draft(files):
    """Where a round is drafted, its tokens follow those of the run, each with its position and source."""
    with EagleLlama(files[0], eagle=files[1], n_max=3, **SETTINGS) as drafts:
        watch(drafts)
        wanted = list(itertools.islice(drafts.generate(PROMPT, temp=0.0), N))
        assert not drafts.runs
        drafts.stats.reset()
        places = []
        for token in drafts.generate(PROMPT, temp=0.0, max_tokens=N):
            places.append((token, drafts.draft_position, drafts.draft_source))
            if len(places) == N:
                break
    assert [token for token, _, _ in places] == wanted
    assert drafts.runs and drafts.stats.drafted > 0
    assert sum(position > 0 for _, position, _ in places) == drafts.stats.accepted
    assert {source for _, position, source in places if position} <= {"head", "text", "both"}


@pytest.mark.parametrize("read", [1, 2, 7, 16, 17, 20])
def test_what_was_not_read(llm, read):
    """It leaves no trace: the text ends with the last token that was read, and goes on from there."""
    whole = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 40))
    for more in ([], [9, 10]):
        tokens = llm.generate(PROMPT, temp=0.0, max_tokens=N)
        begun = list(itertools.islice(tokens, read))
        if more:
            went_on = [tokens.send(more), *itertools.islice(tokens, 5)]
        tokens.close()
        if not more:
            assert begun == whole[:read] and llm._input_ids.tolist() == [*PROMPT, *whole[: read - 1]]
            assert llm.engine.n_past() == llm.n_tokens
            went_on = list(itertools.islice(llm.generate([*PROMPT, *begun], temp=0.0), 6))
            assert went_on == whole[read : read + 6]
        else:
            text = [*PROMPT, *begun, *more]
            assert went_on == list(itertools.islice(llm.generate(text, temp=0.0), 6))


@pytest.mark.parametrize("read", [2, 5, 17, 18])
def test_what_follows_the_text_that_was_read(llm, read):
    """Sampled from its last row, whatever the context has behind it."""
    whole = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 40))
    for use in (llm.sample, lambda: next(llm.generate([], temp=0.0, reset=False))):
        tokens = llm.generate(PROMPT, temp=0.0, max_tokens=N)
        assert list(itertools.islice(tokens, read)) == whole[:read]
        assert use() == whole[read - 1] and llm.engine.n_past() == llm.n_tokens
        tokens.close()
        llm.eval([whole[read - 1]])
        assert llm.sample() == whole[read]


def test_what_is_remembered(files):
    """The text that was read, and the token behind it only if that one follows it."""
    with EagleLlama(files[0], text_memory=100_000, **SETTINGS) as llm:
        llm._measure()
        watch(llm)
        kept = []
        llm._context.memory.add = kept.append
        whole = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 20))
        for read in (3, 9):
            tokens = llm.generate(PROMPT, temp=0.0, max_tokens=10)
            list(itertools.islice(tokens, read))
            tokens.close()
        list(itertools.islice(llm.generate(PROMPT, temp=0.0, max_tokens=10), 10))
        llm.reset()
        assert all(text == whole[: len(text)] for text in kept) and max(map(max, llm.runs)) > 1
        assert all(n - 1 <= len(text) <= n for text, n in zip(kept, (20, 3, 9, 10), strict=True))


def test_a_state_in_the_middle(llm):
    """It has the text that was read, and the generation goes on."""
    whole = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 40))
    tokens = llm.generate(PROMPT, temp=0.0, max_tokens=N)
    begun = list(itertools.islice(tokens, 5))
    state = llm.save_state()
    assert list(itertools.islice(tokens, 20)) == whole[5:25]
    tokens.close()
    llm.load_state(state)
    assert llm._input_ids.tolist() == [*PROMPT, *begun[:-1]]
    assert list(itertools.islice(llm.generate([*PROMPT, *begun], temp=0.0), 10)) == whole[5:15]


def test_a_full_context(llm):
    """All tokens come before the error, as from rounds that wait."""
    texts = []
    for settings in ({}, {"max_tokens": 1000}):
        texts.append([])
        with pytest.raises(EagleError, match="full"):
            texts[-1].extend(llm.generate(PROMPT, temp=0.0, **settings))
    assert texts[0] == texts[1] and llm.runs
    waiting, ahead = (
        llm(PROMPT, max_tokens=None, temperature=0.0, logits_processor=p)["choices"][0]
        for p in (processors(), None)
    )
    assert waiting == ahead and len(llm._input_ids) == llm.n_ctx()


def test_a_failure_behind_good_rounds(llm):
    """What was sampled before it is read before it."""
    whole = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 12))
    own, error = llm.engine.run, EagleError("native", "the test's")

    def fails_later(ask, sampler, most, left):
        return [*own(ask, sampler, 4, left), error]

    llm.engine.run = fails_later
    read = []
    with pytest.raises(EagleError, match="the test's"):
        for token in llm.generate(PROMPT, temp=0.0, max_tokens=N):
            read.append(token)
    assert read == whole[:5]
    llm.engine.run = own
    assert list(itertools.islice(llm.generate(PROMPT, temp=0.0, max_tokens=N), 12)) == whole


def processors():
    return LogitsProcessorList([lambda ids, scores: scores])


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 2},
        {"stop": ["zz"]},
        {"stop": ["</s>", "zz"]},
        {"logits_processor": processors()},
        {"logit_bias": {"100": -5.0}},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, logits: logits is None])},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_whoever_reads_along(llm, settings):
    """A stop string may end the text anywhere, and callbacks read each row: no round runs ahead."""
    llm(PROMPT, max_tokens=20, temperature=0.0, **settings)
    assert not llm.runs


def test_logprobs(files):
    with EagleLlama(files[0], text=False, logits_all=True, **SETTINGS) as llm:
        watch(llm)
        llm(PROMPT, max_tokens=20, temperature=0.0, logprobs=2)
        llm(PROMPT, max_tokens=20, temperature=0.0)
        assert not llm.runs


def test_a_bare_generator(llm):
    """Its reader may do anything between two tokens, unless it has said how many it takes."""
    list(itertools.islice(llm.generate(PROMPT, temp=0.0), 20))
    assert not llm.runs


def test_the_end_of_a_chat_template(llm):
    """Its stop string is a token's text, and llama-cpp-python's criterion reads tokens alone."""
    formatter = Jinja2ChatFormatter("{{ messages[0].content }}", "</s>", "<s>", stop_token_ids=[2])
    criteria = formatter(messages=[{"role": "user", "content": "x"}]).stopping_criteria
    assert len(criteria) == 1
    llm(PROMPT, max_tokens=20, temperature=0.0, stop=["</s>"], stopping_criteria=criteria)
    assert max(n for (n,) in llm.runs) > 1


def test_a_grammar(llm):
    """It is part of the sampler, which runs ahead as well."""
    grammar = LlamaGrammar.from_string('root ::= "a"+ "b"', verbose=False)
    told = {"max_tokens": 12, "temperature": 0.0, "grammar": grammar}
    waiting = llm(PROMPT, logits_processor=processors(), **told)["choices"][0]
    assert not llm.runs
    ahead = llm(PROMPT, **told)["choices"][0]
    assert ahead == waiting and llm.runs


def test_changes_between_two_tokens(files):
    """Whatever is set meanwhile, the text stays."""
    with EagleLlama(files[0], eagle=files[1], **SETTINGS) as llm:
        llm.eagle_params = EagleParams(n_max=0)
        whole = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 40))
        watch(llm)
        tokens = llm.generate(PROMPT, temp=0.0, max_tokens=40)
        begun = list(itertools.islice(tokens, 4))
        assert sum(llm.runs[-1]) > 4
        llm.eagle_params = EagleParams(n_max=3)
        assert begun + list(itertools.islice(tokens, 36)) == whole
        tokens.close()
