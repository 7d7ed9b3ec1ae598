"""Several generations on one EagleLlama: the last one started says what it says alone, an older one that or a
clear error.

Tiny random models. What is drafted comes partly from the text that is to follow, so that drafts are accepted
and rejected.
"""

import dataclasses
import gc
import itertools
import random
import sys
import threading

import pytest
import tiny_models
from tiers import each
from tiny_models import PROMPT, draft_from

from eagle3_llama import (  # before llama_cpp: it brings the library
    EagleError,
    EagleLlama,
    EagleParams,
    ErrorKind,
)
from eagle3_llama.batching import Batcher, BatchSettings

from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList

N, SCHEDULES = 14, 200  # tokens of a generation
PROMPTS = [PROMPT, PROMPT + [110, 120, 130], PROMPT[:3] + [200, 201], [1, *range(60, 100)]]
SAMPLING = [
    {"temp": 0.0},
    {"temp": 0.9, "top_k": 0, "seed": 4},
    {"temp": 0.7, "repeat_penalty": 1.3, "seed": 9},
]
PARAMS = [EagleParams(), EagleParams(n_max=4), EagleParams(tree="12x3x4"), EagleParams(n_max=0)]
SETTINGS = {
    "n_ctx": 128,
    "n_batch": 32,
    "n_threads": 1,
    "n_threads_batch": 1,
    "flash_attn": True,
    "verbose": False,
}


class Near(list):
    """Numbers that equal those next to them."""

    def __eq__(self, other):
        return list(self) == pytest.approx(list(other), abs=1e-3)


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a generation is asked for: generate()'s tokens, or a stream's chunks with their logprobs."""

    prompt: int
    sampling: int
    stream: bool

    def start(self, llm, **callbacks):
        sampling = dict(SAMPLING[self.sampling])
        seed = sampling.pop("seed", 0)
        if self.stream:
            sampling["temperature"] = sampling.pop("temp")
            return llm.create_completion(
                PROMPTS[self.prompt],
                max_tokens=N,
                logprobs=2,
                stream=True,
                seed=seed,
                **sampling,
                **callbacks,
            )
        return itertools.islice(_generate(llm, PROMPTS[self.prompt], seed, {**sampling, **callbacks}), N)

    def said(self, item):
        """An item as it can be compared."""
        if not self.stream:
            return item
        choice = item["choices"][0]
        rows, said = choice["logprobs"], (choice["text"], choice["finish_reason"])
        return (*said, Near(rows["token_logprobs"]), sorted(rows["top_logprobs"][0])) if rows else said


def _generate(llm, prompt, seed, arguments):
    llm.set_seed(seed)
    yield from llm.generate(prompt, **arguments)


ASKS = [Ask(*a) for a in itertools.product(range(len(PROMPTS)), range(len(SAMPLING)), (False, True))]


@pytest.fixture(scope="module")
def alone(files):
    """What each ask says to a Llama that does nothing else; and, for the drafter, the texts."""
    plain = Llama(files[0], logits_all=True, **SETTINGS)
    said, texts = {}, []
    for ask in ASKS:
        plain.reset()
        said[ask] = [ask.said(x) for x in ask.start(plain)]
        if not ask.stream:
            texts.append(PROMPTS[ask.prompt] + said[ask])
    plain.close()
    return said, texts


@pytest.fixture
def eagle(files):
    llm = EagleLlama(files[0], eagle_path=files[1], **SETTINGS)
    yield llm
    llm.close()


class Boom(Exception):
    """What a callback raises."""


class Schedule:
    """Up to four generations, started and left in any order.

    Each is [ask, iterator, what it said, when it took the context].
    """

    def __init__(self, llm, alone, rng):
        self.llm, self.alone, self.rng = llm, alone, rng
        self.live, self.n_started, self.ended = [], 0, {"own": 0, "taken": 0}

    def start(self):
        ask = self.rng.choice(ASKS)
        self.llm.eagle_params = self.rng.choice(PARAMS)
        self.n_started += 1
        entry = [ask, ask.start(self.llm, **self._callbacks()), [], self.n_started]
        self.live.append(entry)
        self.advance(entry, 1)

    def _callbacks(self):
        name = self.rng.choice([None, "stopping_criteria", "logits_processor"])
        fails_at = self.rng.choice([0, 0, 0, 1, 5, 9])
        calls = itertools.count(1)

        def stop(ids, scores):
            return self._in_callback(next(calls) == fails_at) and False

        def process(ids, scores):
            self._in_callback(next(calls) == fails_at)
            return scores

        return (
            {}
            if name is None
            else {name: stop if name == "stopping_criteria" else LogitsProcessorList([process])}
        )

    def _in_callback(self, fails):
        if fails:
            raise Boom
        if self.rng.random() < 0.01:
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join()
        elif self.rng.random() < 0.01:
            gc.collect()

    def advance(self, entry, n):
        ask, iterator, said, when = entry
        try:
            for item in itertools.islice(iterator, n):
                said.append(ask.said(item))
                assert said == self.alone[ask][: len(said)], "another text"
                assert when == self.n_started, "one went on after another had started"
            if len(said) < n and said != self.alone[ask][: len(said)]:
                raise AssertionError("another text")
        except Boom:
            self.live.remove(entry)
        except EagleError as e:
            assert e.kind is ErrorKind.CONTEXT_TAKEN and "has taken the context" in str(e)
            assert when < self.n_started, "the last one started has to finish"
            self.live.remove(entry)
            self.ended["taken"] += 1

    def leave(self):
        """Drops one: at once, closed, or in a cycle that waits for the collector."""
        entry = self.rng.choice(self.live)
        self.live.remove(entry)
        how = self.rng.randrange(3)
        if how == 0 and not isinstance(entry[1], itertools.islice):
            entry[1].close()
        elif how == 1:
            entry.append(entry)

    def interfere(self):
        """A call that uses the context is a later user too."""
        how = self.rng.randrange(3)
        if how == 0:
            self.llm.reset()
        elif how == 1:
            self.llm.reset()
            self.llm.eval([1, 5, 6])
            self.llm.sample(temp=0.0)
        else:
            self.llm.load_state(self.llm.save_state())
        self.n_started += 1

    def run(self):
        for _ in range(self.rng.randint(4, 14)):
            what = self.rng.random()
            if not self.live or (what < 0.3 and len(self.live) < 4):
                self.start()
            elif what < 0.8:
                self.advance(self.rng.choice(self.live), self.rng.randint(1, 6))
            elif what < 0.95:
                self.leave()
            else:
                self.interfere()
        for entry in sorted(self.live, key=lambda e: -e[3]):  # the last one first, or it would be none
            self.advance(entry, 10 * N)
            if entry in self.live:
                assert entry[2] == self.alone[entry[0]], "cut short"
                self.ended["own"] += 1
        self.live.clear()


@pytest.mark.parametrize("seeds", each([range(30), range(30, SCHEDULES)], quick=[range(30)]), ids=len)
def test_random_schedules(eagle, alone, monkeypatch, seeds):
    """Generations start, advance, end, fail and are collected: greedy and sampled; planner, chain, tree."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    said, texts = alone
    draft_from(eagle, texts, random.Random(1))
    ended = {"own": 0, "taken": 0}
    for seed in seeds:
        schedule = Schedule(eagle, said, random.Random(seed))
        try:
            schedule.run()
        except Exception as e:
            raise AssertionError(f"schedule {seed}: {e!r}") from e
        ended = {k: n + schedule.ended[k] for k, n in ended.items()}
    gc.collect()
    assert not unraisable
    assert min(ended.values()) > len(seeds) // 3
    assert eagle.stats.drafted > eagle.stats.accepted > 100


def texts_of(alone):
    return alone[1]


GREEDY, STREAM = Ask(0, 0, False), Ask(0, 0, True)


@pytest.mark.parametrize("params", PARAMS, ids=["planner", "chain", "tree", "plain"])
def test_saving_between_two_tokens(eagle, files, alone, params):
    """The generation and the copy continue as without the copy, at any token of a round."""
    draft_from(eagle, texts_of(alone), random.Random(2))
    copy = EagleLlama(files[0], eagle_path=files[1], **SETTINGS)
    eagle.eagle_params = params
    generator, expected = GREEDY.start(eagle), alone[0][GREEDY]
    got = []
    for token in generator:
        got.append(token)
        assert eagle._input_ids.tolist() == PROMPT + got[:-1]
        copy.load_state(eagle.save_state())
        assert copy._input_ids.tolist() == PROMPT + got[:-1]
        assert tiny_models.take(copy, N - len(got), PROMPT + got) == expected[len(got) :]
    assert got == expected
    copy.close()


def test_saving_in_a_callback(eagle, alone):
    """A stopping criterion may save: its state continues the text. Other threads may not during a step."""
    draft_from(eagle, texts_of(alone), random.Random(7))
    eagle.eagle_params = EagleParams(n_max=4)
    states, errors = [], []

    def elsewhere():
        with pytest.raises(EagleError) as e:
            eagle.save_state()
        errors.append(e.value.kind)

    def stop(ids, scores):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        states.append(eagle.save_state())
        return False

    expected = alone[0][GREEDY]
    assert list(GREEDY.start(eagle, stopping_criteria=stop)) == expected and set(errors) == {ErrorKind.BUSY}
    for i, state in enumerate(states[:-1]):
        eagle.load_state(state)
        assert tiny_models.take(eagle, N - i, PROMPT + expected[:i]) == expected[i:]


@pytest.mark.parametrize("callback", ["stopping_criteria", "logits_processor"])
@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.eval([5]),
        lambda llm: llm.reset(),
        lambda llm: next(llm.generate([1, 7])),
        lambda llm: llm.close(),
        lambda llm: llm("a5", max_tokens=1),
    ],
    ids=["eval", "reset", "generate", "close", "completion"],
)
def test_callbacks_that_use_the_model(eagle, alone, callback, use):
    """They are refused with a clear error, on another thread too, and the next text is whole."""
    errors = []

    def elsewhere():
        with pytest.raises(EagleError) as e:
            use(eagle)
        errors.append(e.value.kind)

    def call(ids, scores):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        use(eagle)

    with pytest.raises(EagleError, match="in the middle of a step") as e:
        given = LogitsProcessorList([call]) if callback == "logits_processor" else call
        list(GREEDY.start(eagle, **{callback: given}))
    assert e.value.kind is ErrorKind.BUSY and errors == [ErrorKind.BUSY]
    assert list(GREEDY.start(eagle)) == alone[0][GREEDY]


@pytest.mark.parametrize("params", PARAMS, ids=["planner", "chain", "tree", "plain"])
def test_what_logits_processors_are_shown(eagle, alone, params):
    """The text before each row, drafts included, of which input_ids only gets what was accepted."""
    draft_from(eagle, texts_of(alone), random.Random(8))
    eagle.eagle_params = params
    shown = []

    def processor(ids, scores):
        shown.append(ids.tolist())
        assert eagle.n_tokens <= len(ids) and eagle._input_ids.tolist() == ids[: eagle.n_tokens].tolist()
        return scores

    said = list(GREEDY.start(eagle, logits_processor=LogitsProcessorList([processor])))
    assert said == alone[0][GREEDY]
    assert shown[: len(said)] == [[*PROMPT, *said[:i]] for i in range(len(said))]
    assert params.n_max == 0 or eagle.stats.accepted > 0
    eagle.sample()  # with the generation's sampler, between two rounds
    assert shown[-1] == eagle._input_ids.tolist()


@pytest.mark.parametrize("params", PARAMS, ids=["planner", "chain", "tree", "plain"])
@pytest.mark.parametrize("stuck", ["grammar", "processor"])
def test_a_round_that_fails_beside_a_processor(eagle, files, params, stuck):
    """A grammar that becomes too ambiguous, or a processor that raises: the text is what was said before."""
    plain = Llama(files[0], **SETTINGS)
    x = next(t for t in range(plain.n_vocab()) if plain.detokenize([t]).startswith(b"x"))
    eagle.eagle_params = params

    def sampling():
        def processor(ids, scores):
            if stuck == "processor" and len(ids) > len(PROMPT) + 4:
                raise Boom
            if stuck == "grammar":
                scores[x] = 100.0
            return scores

        twice_as_many_readings = 'root ::= s\ns ::= "x" s "b" | "x" s "c" | "d"'
        grammar = LlamaGrammar.from_string(twice_as_many_readings, verbose=False)
        return {
            "temp": 0.0,
            "logits_processor": LogitsProcessorList([processor]),
            "grammar": grammar if stuck == "grammar" else None,
        }

    for after in (
        lambda llm: (llm.eval([9, 10]), llm.sample(temp=0.0))[1],
        lambda llm: next(llm.generate([], reset=False, temp=0.0)),
        lambda llm: next(llm.generate([*PROMPT, 9], temp=0.0)),
    ):
        said = []
        with pytest.raises((EagleError, Boom)):
            for token in eagle.generate(PROMPT, **sampling()):
                said.append(token)
        text = [*PROMPT, *said[:-1]]  # the last one was not decoded for good
        assert said and eagle._input_ids.tolist() == text
        assert eagle.engine.n_past() == eagle.n_tokens == len(text)
        eagle._sampler = plain._sampler = None  # sample() would take the failed generation's
        plain.reset()
        plain.eval(text)
        assert after(eagle) == after(plain)
    assert list(GREEDY.start(eagle)) == list(GREEDY.start(plain))
    plain.close()


def test_a_request_that_is_refused_disturbs_nobody(eagle, alone):
    stream = STREAM.start(eagle)
    said = [STREAM.said(next(stream))]
    with pytest.raises(ValueError, match="exceed context window"):
        eagle([1, *[5] * 300], max_tokens=4)
    assert said + [STREAM.said(x) for x in stream] == alone[0][STREAM]


def test_closed_under_way(files):
    for drop in (False, True):
        llm = EagleLlama(files[0], eagle_path=files[1], **SETTINGS)
        generator = llm.generate(PROMPT)
        next(generator)
        llm.close()
        llm.close()
        if not drop:
            with pytest.raises(EagleError, match=r"close\(\) has taken the context"):
                next(generator)


def test_collected_with_its_model(files, monkeypatch):
    """In whatever order the collector finalises them."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for order in (0, 1):
        llm = EagleLlama(files[0], eagle_path=files[1], **SETTINGS)
        generators = [llm.generate(PROMPT), llm.create_completion(PROMPT, stream=True)]
        for g in generators:
            next(g)
        llm.cycle = [*generators, llm] if order else [llm, *generators]
        del llm, generators, g
        gc.collect()
    assert not unraisable


def test_position_set_under_way(eagle, alone):
    """Llama would go on from there, with text of both."""
    generator = eagle.generate(PROMPT, temp=0.0)
    next(generator)
    eagle.n_tokens = 2
    with pytest.raises(EagleError, match="n_tokens was 6 at its last token and is 2 now"):
        next(generator)
    assert list(GREEDY.start(eagle)) == alone[0][GREEDY]


def test_costs_measured_after_a_text(files, alone, monkeypatch):
    """Measuring fills the context with rows of its own; the text before is not taken for what is there."""
    from eagle3_llama.runtime import cost_files, costs

    monkeypatch.setattr(
        cost_files,
        "cached",
        lambda engine, key, *sizes: costs.measure(engine, *sizes[:2], budget=0.1, memory=sizes[2]()),
    )
    llm = EagleLlama(files[0], eagle_path=files[1], n_max=0, **SETTINGS)
    older = GREEDY.start(llm)
    next(older)
    llm.eagle_params = EagleParams()
    with pytest.raises(EagleError, match="has taken the context"):
        next(older)
    assert list(GREEDY.start(llm)) == alone[0][GREEDY]
    llm.close()


def test_another_draft_model(files):
    """Llama's own drafting, through the same class."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafter = LlamaPromptLookupDecoding(num_pred_tokens=2)
    llm = EagleLlama(files[0], draft_model=drafter, **{**SETTINGS, "flash_attn": False})
    expected = [list(itertools.islice(llm.generate(p, temp=0.0), 8)) for p in PROMPTS[:2]]
    older, newer = (llm.generate(p, temp=0.0) for p in PROMPTS[:2])
    begun = list(itertools.islice(older, 3))
    assert list(itertools.islice(newer, 8)) == expected[1] and begun == expected[0][:3]
    with pytest.raises(EagleError, match="another generation has taken the context"):
        next(older)
    llm.eval([5])
    with pytest.raises(EagleError, match=r"eval\(\) has taken the context"):
        next(newer)
    llm.close()


def test_one_request_of_a_batcher(files, alone):
    """The same rule; a generation left half way does not keep the only slot."""
    batcher = Batcher(BatchSettings(*files, n_parallel=1, n_ctx=128, n_threads=1))
    ask = dict(max_tokens=N, temperature=0.0, logprobs=2, stream=True, seed=0)
    with batcher.request() as request:
        older, newer = (request.create_completion(PROMPTS[i], **ask) for i in (1, 0))
        next(older)
        said = [STREAM.said(next(newer))]
        with pytest.raises(EagleError, match="another generation has taken the context"):
            next(older)
        del older
        assert said + [STREAM.said(x) for x in newer] == alone[0][STREAM]
    batcher.close()


def test_what_usage_counts_is_its_own(eagle, alone):
    """Not what the counters were set to meanwhile."""
    draft_from(eagle, texts_of(alone), random.Random(3))
    eagle.eagle_params = EagleParams(n_max=4)

    def reset(ids, scores):
        eagle.stats.reset()
        return False

    for callbacks in ({}, {"stopping_criteria": reset}):
        details = eagle(PROMPT, max_tokens=N, temperature=0.0, **callbacks)["usage"][
            "completion_tokens_details"
        ]
        assert details["accepted_prediction_tokens"] > 0 and details["rejected_prediction_tokens"] >= 0


def test_embedding_under_way(files):
    """embed() uses the context too."""
    llm = EagleLlama(files[0], embedding=True, **{**SETTINGS, "flash_attn": False})
    generator = llm.generate(PROMPT, temp=0.0)
    next(generator)
    assert len(llm.embed("a5 b7")) > 0
    with pytest.raises(EagleError, match=r"embed\(\) has taken the context"):
        next(generator)
    llm.close()
