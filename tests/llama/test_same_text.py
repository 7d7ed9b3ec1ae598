"""EagleLlama against llama_cpp.Llama on the real model: whatever is asked, the same answer."""

import contextlib
import itertools
import re

import numpy as np
import pytest
from tiers import crossed, each
from tiny_models import scripted

from eagle3_llama import EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.engine import Draft

from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

TEXT = "Once upon a time there was a"
COMMON = {"n_ctx": 1024, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
FLOATS = ["BF16", "F32"]
FORMATS = ["Q4_0", "Q4_1", "Q4_K_M", "Q8_0", "F16", "BF16", "F32"]


@pytest.fixture(scope="module")
def pair():
    """(plain, eagle) of one target."""
    yield from make_pair("Q4_0")


@pytest.fixture(scope="module")
def float_pair(request):
    yield from make_pair(request.param)


@pytest.fixture(scope="module")
def flash_pair(request):
    """With flash attention: trees need it."""
    yield from make_pair(request.param, flash_attn=True)


def make_pair(fmt, **settings):
    path = str(smollm2(fmt))
    plain = Llama(path, logits_all=True, **COMMON, **settings)
    eagle = EagleLlama(path, eagle_path=str(shipped_head()), n_max=4, **COMMON, **settings)
    yield plain, eagle
    plain.close()
    eagle.close()


def same(pair, ask, drafts=True):
    """Compares ask(llm) of both. Meanwhile, draft tokens are accepted and rejected; drafts=False: none."""
    plain, eagle = pair
    with recorded(plain) as texts:
        expected = ask(plain)
    eagle.stats.reset()
    with drafting(eagle, texts):
        got = ask(eagle)
    assert got == expected
    assert eagle.stats.drafted > eagle.stats.accepted > 0 if drafts else eagle.stats.drafted == 0
    return got


@contextlib.contextmanager
def recorded(llm):
    """The texts of the generations inside: prompt and answer."""
    texts, own = [], llm.generate

    def generate(tokens, *args, **kwargs):
        texts.append(list(tokens))
        for token in own(tokens, *args, **kwargs):
            texts[-1].append(token)
            yield token

    llm.generate = generate
    try:
        yield texts
    finally:
        del llm.generate


@contextlib.contextmanager
def drafting(llm, texts):
    """By turns, the head drafts and somebody who knows the texts: two right tokens, then a wrong one.

    Whoever asks for no draft gets none.
    """
    turns, known = itertools.count(), sorted(texts, key=len, reverse=True)

    def propose(ask):
        if ask.params.n_max == 0 or next(turns) % 2:
            return None
        seq = [*llm._input_ids.tolist(), ask.token]
        right = next((t[len(seq) :] for t in known if t[: len(seq)] == seq), [])
        return Draft([*right[:2], (right[2] + 1) % llm.n_vocab() if len(right) > 2 else 7])

    undo = scripted(llm, propose)
    try:
        yield
    finally:
        undo()


def answer(llm, text=TEXT, **settings):
    choice = llm(text, **settings)["choices"][0]
    return choice["text"], choice["finish_reason"]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "seed": 2},
        {"temperature": 0.9, "min_p": 0.2, "seed": 3},
        {"temperature": 0.9, "typical_p": 0.7, "seed": 4},
        {
            "temperature": 0.7,
            "repeat_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "seed": 5,
        },
        {"temperature": 0.7, "mirostat_mode": 1, "seed": 6},
        {"temperature": 0.7, "mirostat_mode": 2, "mirostat_tau": 3.0, "seed": 7},
        {"temperature": 0, "logit_bias": {260: -100, 28: 5.0}},
    ],
    ids=lambda s: ",".join(k for k in s if k != "seed"),
)
def test_samplers(pair, settings):
    text, _ = same(pair, lambda llm: answer(llm, max_tokens=40, **settings))
    assert text


@pytest.mark.thorough  # test_trees has these formats too
@pytest.mark.parametrize(
    "float_pair, settings",
    crossed(FLOATS, [{"temperature": 0}, {"temperature": 0.8, "seed": 1, "repeat_penalty": 1.1}]),
    indirect=["float_pair"],
    scope="module",
)
def test_float_targets(float_pair, settings):
    same(float_pair, lambda llm: answer(llm, max_tokens=48, **settings))


DRAFTS = {
    "planner": (EagleParams(), {"temperature": 0}),
    "tree": (EagleParams(tree="60x6x10"), {"temperature": 0}),
    "sampled tree": (
        EagleParams(tree="12x3x4"),
        {"temperature": 0.8, "seed": 1, "repeat_penalty": 1.1, "logprobs": 2},
    ),
    "choices": (
        EagleParams(tree=[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
        {"temperature": 0.9, "seed": 2},
    ),
}


@pytest.mark.parametrize(
    "flash_pair, drafts", crossed(FORMATS, DRAFTS), indirect=["flash_pair"], scope="module"
)
def test_trees(flash_pair, drafts):
    """Drafts that the planner chooses, and trees, with logprobs from the accepted rows."""
    (plain, eagle), (params, settings) = flash_pair, DRAFTS[drafts]
    eagle.eagle_params = params
    eagle.stats.reset()
    n = 24 if params.planned else 12
    expected, got = (llm(TEXT, max_tokens=n, **settings)["choices"][0] for llm in (plain, eagle))
    assert got == expected
    assert params.planned or eagle.stats.drafted > eagle.stats.accepted
    assert (
        params.planned or eagle.stats.accepted or settings["temperature"]
    )  # a sampled text of this length may follow no draft


def test_every_length(pair):
    """max_tokens falls on every place in a block of accepted tokens."""

    def ask(llm):
        got = llm(TEXT, max_tokens=n, temperature=0)
        assert got["usage"]["completion_tokens"] == n
        return got["choices"][0]["text"]

    for n in range(1, 12):
        same(pair, ask, drafts=n > 1)


def test_stop_strings(pair):
    """One that is several tokens long, one inside a token, one of two, one that never comes."""
    whole, _ = answer(pair[0], max_tokens=60, temperature=0)
    words = whole.split()
    inside = max(words[5:], key=len)[1:-1]
    for stop in ([" ".join(words[9:12])], [inside], [words[20], words[15]]):
        text, why = same(pair, lambda llm: answer(llm, max_tokens=60, temperature=0, stop=stop))
        assert why == "stop" and text == whole[: min(whole.find(s) for s in stop)]
    same(pair, lambda llm: answer(llm, max_tokens=60, temperature=0, stop=["\x00never"]))


def test_grammar_and_json(pair):
    grammar = LlamaGrammar.from_string('root ::= ("yes" | "no" | "maybe" | " ")+', verbose=False)
    text, _ = same(pair, lambda llm: answer(llm, max_tokens=30, temperature=0.9, seed=4, grammar=grammar))
    assert re.fullmatch("(yes|no|maybe| )+(y|ye|n|m|ma|may|mayb)?", text)
    ask = {
        "messages": [{"role": "user", "content": "Describe a person as JSON."}],
        "response_format": {"type": "json_object"},
    }
    text = same(
        pair,
        lambda llm: llm.create_chat_completion(**ask, max_tokens=50, temperature=0.5, seed=3)["choices"][0][
            "message"
        ]["content"],
    )
    assert text.lstrip().startswith("{")


SCHEMA = """{"type": "object", "required": ["name", "age", "likes", "home"], "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"},
    "likes": {"type": "array", "items": {"enum": ["rain", "tea", "raisins"]}, "minItems": 2, "maxItems": 5},
    "home": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}}}"""


SAMPLED = [
    {"temperature": 0},
    {"temperature": 0, "repeat_penalty": 1.2},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.5, "top_k": 7, "min_p": 0.0, "seed": 2},
    {"temperature": 1.5, "top_p": 1.0, "min_p": 0.0, "seed": 3},
    {"temperature": 0.9, "typical_p": 0.6, "seed": 4},
    {"temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": -0.4, "seed": 5},
    {"temperature": 0.9, "logit_bias": {"28": -50.0, "17": 5.0}, "seed": 6},
    {"temperature": 0.8, "top_k": 0, "seed": 7},
    {"temperature": 0.8, "mirostat_mode": 2, "seed": 8},
]


@pytest.mark.parametrize("settings", each(SAMPLED, quick=[SAMPLED[i] for i in (0, 2, 8, 9)]), ids=str)
def test_schemas(pair, settings):
    """llama.cpp's own sampling masks the whole vocabulary; here the grammar tests the likeliest tokens."""
    grammar = LlamaGrammar.from_json_schema(SCHEMA, verbose=False)
    ask = {"max_tokens": 50, "grammar": grammar, **settings}
    text, _ = same(pair, lambda llm: answer(llm, "A person, described as JSON:", **ask))
    assert re.match(r'\{\s*"name"\s*:\s*"', text)


@pytest.mark.parametrize(
    "echo, stream", each([(False, False), (True, False), (False, True)], quick=[(True, False), (False, True)])
)
def test_logprobs(pair, echo, stream):
    """The true ones, at every position; their float sums differ in the last digits."""
    values = []

    def ask(llm):
        parts = llm(TEXT, max_tokens=12, temperature=0, logprobs=3, echo=echo, stream=stream)
        parts = [p["choices"][0] for p in parts] if stream else [parts["choices"][0]]
        rows = [p["logprobs"] for p in parts if p["logprobs"]]
        values.append([float(x or 0) for r in rows for x in r["token_logprobs"]])
        return (
            [t for r in rows for t in r["tokens"]],
            [o for r in rows for o in r["text_offset"]],
            [sorted(d or {}) for r in rows for d in r["top_logprobs"]],
        )

    same(pair, ask)
    assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_chat_stream_and_logprobs(pair):
    ask = {
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    same(
        pair,
        lambda llm: [
            c["choices"][0]["delta"].get("content") for c in llm.create_chat_completion(**ask, stream=True)
        ],
    )
    values = []

    def tokens(llm):
        content = llm.create_chat_completion(**ask, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"][
            "content"
        ]
        values.append([x["logprob"] for x in content])
        return [x["token"] for x in content]

    same(pair, tokens)
    assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_callbacks_see_what_plain_ones_see(pair):
    """Logits processors and stopping criteria: the same calls with the same sequences."""

    def processed(llm):
        seen = []

        def processor(ids, scores):
            seen.append(tuple(ids[-3:]))
            scores = scores.copy()
            scores[260] -= 2
            return scores

        return answer(
            llm, max_tokens=20, temperature=0.8, seed=2, logits_processor=LogitsProcessorList([processor])
        ), seen[:20]  # the last round may go beyond what is asked for

    same(pair, processed)

    def stopped(llm):
        seen, best = [], []
        criteria = StoppingCriteriaList(
            [
                lambda ids, scores: (
                    seen.append(len(ids)) or best.append(int(np.argmax(scores))) or len(ids) >= 20
                )
            ]
        )
        result = answer(llm, max_tokens=30, temperature=0, stopping_criteria=criteria), seen
        if llm is pair[1]:  # with logits_all the plain one shows its first row
            assert best[: len(seen) - 1] == list(
                itertools.islice(llm.generate(llm.tokenize(TEXT.encode()), temp=0.0), len(seen) - 1)
            )
        return result

    same(pair, stopped)


def test_exception_in_a_callback(pair):
    """It reaches the caller, and the next answer is whole."""
    eagle = pair[1]

    def boom(ids, scores):
        if len(ids) > 15:
            raise ValueError("boom")
        return scores

    with pytest.raises(ValueError, match="boom"):
        eagle(TEXT, max_tokens=20, logits_processor=LogitsProcessorList([boom]))
    same(pair, lambda llm: answer(llm, max_tokens=40, temperature=0))


def test_prefixes_are_reused(pair, monkeypatch):
    """The same texts, and only tokens that the cache does not hold are evaluated."""

    def ask(llm):
        return [
            answer(llm, TEXT + more, max_tokens=20, temperature=0)
            for more in ("", " little", " little girl", "", " king")
        ]

    same(pair, ask)
    eagle, evaluated = pair[1], []
    prefill = eagle.engine.prefill
    monkeypatch.setattr(
        eagle.engine,
        "prefill",
        lambda tokens, *args, **kwargs: evaluated.append(len(tokens)) or prefill(tokens, *args, **kwargs),
    )
    eagle.reset()
    shared = eagle.tokenize(TEXT.encode())
    list(itertools.islice(eagle.generate(shared, temp=0.0), 4))
    assert sum(evaluated) == len(shared)
    for more in (" king", " king and a queen", ""):
        evaluated.clear()
        ids = eagle.tokenize((TEXT + more).encode())
        held = Llama.longest_token_prefix(eagle._input_ids.tolist(), ids)
        assert held >= len(shared)
        list(itertools.islice(eagle.generate(ids, temp=0.0), 1))
        assert sum(evaluated) == max(len(ids) - held, 1)


def test_abandoned_generators(pair):
    def abandoned(llm):
        out = []
        for n in range(1, 9):
            generator = llm.generate(llm.tokenize(TEXT.encode()), temp=0.0)
            out.append(list(itertools.islice(generator, n)))
            generator.close()
            out.append(llm.n_tokens)
        return out

    same(pair, abandoned)


def test_words_put_in(pair):
    """generator.send() continues as after a prompt that ends so. Plain decoding samples rows in between."""
    eagle = pair[1]
    ids, words = eagle.tokenize(TEXT.encode()), eagle.tokenize(b" The end. And then", add_bos=False)
    for n in (1, 2, 3, 5):
        generator = eagle.generate(ids, temp=0.0)
        begun = list(itertools.islice(generator, n))
        gone_on = [generator.send(words), *itertools.islice(generator, 8)]
        generator.close()
        assert gone_on == list(itertools.islice(pair[0].generate(ids + begun + words, temp=0.0), 9))


def test_saved_state_goes_on(pair):
    """In another object, with the head's state, and from a state that has none."""
    plain, eagle = pair
    ids = eagle.tokenize(TEXT.encode())
    generator = eagle.generate(ids, temp=0.0)
    begun = list(itertools.islice(generator, 7))
    state = eagle.save_state()
    rest = list(itertools.islice(generator, 20))
    generator.close()
    other = EagleLlama(eagle.model_path, eagle_path=str(shipped_head()), n_max=4, **COMMON)
    other.load_state(state)
    assert other.n_tokens == state.n_tokens
    assert list(itertools.islice(other.generate(ids + begun, temp=0.0), 20)) == rest
    drafted = other.stats.drafted
    plain.reset()
    list(itertools.islice(plain.generate(ids, temp=0.0), 7))
    other.load_state(plain.save_state())
    assert list(itertools.islice(other.generate(ids + begun, temp=0.0), 20)) == rest
    assert other.stats.drafted > drafted > 0
    other.close()


def test_usage_and_stats_count_the_same(pair):
    eagle = pair[1]
    eagle.stats.reset()
    usage = eagle(TEXT, max_tokens=40, temperature=0)["usage"]
    details, stats = usage["completion_tokens_details"], eagle.stats
    assert stats.drafted == details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert (
        0 <= stats.accepted - details["accepted_prediction_tokens"] <= 4
    )  # accepted in the last round, past the limit
    assert abs(sum(stats.time_share.values()) - 1) < 1e-9 and stats.tokens >= usage["completion_tokens"] > 0
    assert stats.accept_per_position == sorted(stats.accept_per_position, reverse=True)
    assert abs(stats.mean_accepted_length - 1 - sum(stats.accept_per_position)) < 1e-9


@pytest.mark.parametrize(
    "params",
    [EagleParams(0), EagleParams(1), EagleParams(16), EagleParams(8, 4, 0.2), EagleParams(8, 0, 0.9)],
)
def test_any_setting(pair, params):
    before, pair[1].eagle_params = pair[1].eagle_params, params
    try:
        ask = lambda llm: answer(llm, max_tokens=48, temperature=0.7, seed=11)
        same(pair, ask, drafts=params.n_max != 0)
    finally:
        pair[1].eagle_params = before


def test_without_a_head(pair):
    plain = EagleLlama(pair[0].model_path, **COMMON)
    assert answer(plain, max_tokens=30, temperature=0.8, seed=3) == answer(
        pair[0], max_tokens=30, temperature=0.8, seed=3
    )
    assert plain.stats.drafted_from["head"] == 0
    plain.eagle_params = EagleParams(text=False)
    plain.stats.reset()
    answer(plain, max_tokens=30, temperature=0.8, seed=3)
    assert plain.stats.rounds > 0 and plain.stats.drafted == 0
    plain.close()
