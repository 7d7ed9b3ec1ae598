"""Trees of drafts on tiny random models: what the target checks, what stays, and the text."""

import itertools
import random

import numpy as np
import pytest
import tiny_models
from tiers import crossed, each
from tiny_models import PROMPT, scripted, take, wanted

from eagle3_llama import (  # before llama_cpp: it brings the library
    EagleError,
    EagleLlama,
    EagleParams,
    ErrorKind,
)
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.engine import Draft
from eagle3_llama.runtime.params import StaticTree, Tree

from llama_cpp import Llama

N_CTX, N_VOCAB = 512, tiny_models.N_VOCAB
COMMON = {"n_ctx": N_CTX, "n_batch": 64, "flash_attn": True, "verbose": False}


@pytest.fixture
def eagle(files):
    llm = EagleLlama(files[0], eagle_path=files[1], n_max=0, **COMMON)
    yield llm
    llm.close()


@pytest.fixture
def plain(files):
    llm = Llama(files[0], **COMMON)
    yield llm
    llm.close()


def random_tree(rng, right, n, n_vocab=N_VOCAB):
    """tokens and parents of at most n nodes, level by level, and how many of `right` are in the tree.

    right: the target's next tokens.
    """
    tokens, parents, on_path = [], [], 0
    if tiny_models.EOS in right:
        right = right[: right.index(tiny_models.EOS)]  # nothing is followed beyond the end of generation
    level, n = [-1], rng.randint(0, n)
    way = -1  # the last node of the way that is right
    while level and len(tokens) < n:
        children = sorted(rng.choices(level, k=min(rng.randint(1, 6), n - len(tokens))))
        followed = way in children and on_path < len(right) and rng.random() < 0.8
        chosen = children.index(way) if followed else None
        wrong = [t for t in range(n_vocab) if on_path >= len(right) or t != right[on_path]]
        first = len(tokens)
        tokens += [
            right[on_path] if k == chosen else t for k, t in enumerate(rng.sample(wrong, len(children)))
        ]
        parents += children
        if followed:
            way, on_path = first + chosen, on_path + 1
        else:
            way = None
        level = list(range(first, len(tokens)))
    return tokens, parents, on_path


def drafts(llm, propose):
    """propose(tokens so far, n) says which tree is drafted."""
    expected = []

    def given(ask):
        tokens, parents, right = propose([*llm._input_ids.tolist(), ask.token], wanted(ask.params))
        expected.append(right)
        return Draft(tokens, parents)

    scripted(llm, given)
    return expected


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temp": 1.0, "top_k": 0, "top_p": 1.0},
        {"temp": 0.8, "repeat_penalty": 1.2},
        {"temp": 0.9, "mirostat_mode": 2},
    ],
)
def test_text_of_random_trees(plain, eagle, sampling):
    """Every way that is right is found and followed as far as it goes, and the text is plain decoding's."""
    rng = random.Random(1)
    answer = take(plain, 400, **sampling)
    eagle.eagle_params = EagleParams(tree=Tree(24, 4, 6))
    expected = drafts(eagle, lambda seq, n: random_tree(rng, [*PROMPT, *answer][len(seq) :], n))
    assert take(eagle, 400, **sampling) == answer
    assert eagle.stats.accepted == pytest.approx(sum(expected), abs=24)  # the last round is cut off
    assert eagle.stats.accepted > 100


@pytest.mark.parametrize("most", each([100, 1000], quick=[100]))
def test_logits_after_random_trees(files, plain, eagle, most):
    """Whatever was accepted, what follows has the bits of a text read in one go."""
    rng, engine = random.Random(2), eagle.engine
    sampler = eagle._init_sampler(temp=0.0)
    n_rounds = 0
    for start in itertools.count():
        answer = take(plain, 300, [1, 50 + start, 70])
        text = [1, 50 + start, 70]
        eagle.reset()
        engine.rewind(0)
        engine.prefill(text)
        while len(text) < 300 and n_rounds < most:
            token, right = answer[len(text) - 3], answer[len(text) - 2 :]
            tokens, parents, on_path = random_tree(rng, right[:8], rng.choice([3, 12, 60]))
            engine.steps.decode(token, tokens, parents)
            sampled = engine.steps.verify(address(sampler.sampler))
            assert len(sampled) == on_path + 1
            engine.steps.commit(len(sampled))
            text += [token, *sampled[:-1]]
            engine.steps.decode(sampled[-1], [])
            ours = eagle._text.logits(0).copy()
            engine.steps.commit(0)
            plain.reset()
            plain.eval([*text, sampled[-1]])
            assert ours.tobytes() == _last(plain).tobytes()
            n_rounds += 1
        if n_rounds == most:
            break


def _last(llm):
    import llama_cpp

    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1), shape=(N_VOCAB,))


TREES = {
    "a small one": Tree(8, 3, 3),
    "a large one": Tree(60, 6, 10),
    "a deep one": Tree(63, 16, 2),
    "choices": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
}


@pytest.mark.parametrize("kind, tree", crossed(["F32", "BF16", "Q8_0"], TREES))
def test_text_of_drafted_trees(tmp_path, files, kind, tree):
    """Trees of the random head itself, over formats."""
    target = str(tiny_models.target(tmp_path / "t.gguf", kind=kind))
    plain, eagle = Llama(target, **COMMON), EagleLlama(target, eagle=files[1], tree=TREES[tree], **COMMON)
    assert take(eagle, 200) == take(plain, 200)
    assert eagle.stats.drafted > 199
    plain.close(), eagle.close()


def test_width_one_is_a_chain(eagle):
    """A tree of one child a level proposes what a chain does."""
    text = take(eagle, 40)
    of = []
    for params in (
        EagleParams(6),
        EagleParams(tree=Tree(6, 6, 1)),
        EagleParams(tree=StaticTree(tuple((0,) * k for k in range(1, 7)))),
    ):
        eagle.reset()
        eagle.engine.rewind(0)
        eagle.eagle_params = EagleParams(1)
        eagle.eval([*PROMPT, *text[:-1]])
        drafted, _ = eagle.engine.steps.draft(text[-1], params)
        assert len(drafted) == 6
        of.append(drafted)
    assert of[0] == of[1] == of[2]


def test_measured_output_rows_are_those_of_the_decode(eagle):
    """Measuring computes rows of the last decode alone, and leaves none that could be read."""
    engine = eagle.engine
    engine.rewind(0)
    engine.prefill(PROMPT)
    engine.measure_target(8)
    assert all(engine.measure_output(n) > 0.0 for n in (1, 3, 8))
    with pytest.raises(EagleError, match="no 9 rows"):
        engine.measure_output(9)
    with pytest.raises(ValueError):
        eagle._text.logits(0)


def test_trees_need_flash_attention(files):
    with pytest.raises(EagleError, match="flash_attn") as e:
        EagleLlama(files[0], eagle_path=files[1], tree=Tree(), n_ctx=N_CTX, verbose=False)
    assert e.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    "bad",
    [
        {"tree": "60x"},
        {"tree": Tree, "n_max": 3},
        {"tree": [(1, 0)]},
        {"tree": [()]},
        {"tree": "70"},
        {"tree": 5},
    ],
)
def test_bad_trees_are_refused(bad):
    with pytest.raises(EagleError, match="tree|choice|n_max"):
        EagleParams(**{k: v() if isinstance(v, type) else v for k, v in bad.items()})
