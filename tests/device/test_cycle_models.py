"""tests/kit/cycle_models.py: in every format and mode the text is the cycle; the head is right as asked."""

import itertools

import cycle_models
import numpy as np
import pytest

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.params import EagleParams

SHAPE = cycle_models.SHAPES["tiny"]
TEXT = cycle_models.cycle(SHAPE).text(16 + 200)
MODES = {
    "plain": EagleParams(n_max=0),
    "chain": EagleParams(n_max=3),
    "tree": EagleParams(tree="12x4x4"),
    "planner": EagleParams(text=False),
}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return {p: cycle_models.head(tmp_path_factory.mktemp("heads") / "h.gguf", SHAPE, p) for p in (0.6, 0.8)}


def answer(llm, params, n):
    llm.reset()
    llm.stats.reset()
    llm.eagle_params = params
    generator = llm.generate(TEXT[:16], temp=0.0)
    found = list(itertools.islice(generator, n))
    generator.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q4_K_M"])
def test_the_text_is_the_cycle(device, head, tmp_path, kind):
    """On a device with all layers, whatever is drafted."""
    path = cycle_models.target(tmp_path / "t.gguf", SHAPE, kind)
    given = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 99, "flash_attn": True, "verbose": False}
    with EagleLlama(path, eagle=head[0.8], **given) as llm:
        for name, params in MODES.items():
            assert answer(llm, params, 60) == TEXT[16:76], name
            assert name != "chain" or llm.stats.accepted > 30


@pytest.mark.parametrize("p", [0.6, 0.8])
def test_the_head_is_right_with_probability_p(head, tmp_path, p):
    """Of chains of one draft token; its longer chains go on from its own guesses."""
    path = cycle_models.target(tmp_path / "t.gguf", SHAPE, "Q8_0")
    with EagleLlama(path, eagle=head[p], n_ctx=512, n_threads=1, verbose=False) as llm:
        assert answer(llm, EagleParams(n_max=1), 200) == TEXT[16:216]
        assert abs(llm.stats.accepted / llm.stats.drafted - p) < 0.06
        answer(llm, EagleParams(n_max=3), 200)
        assert abs(llm.stats.mean_accepted_length - (1 + p + p**2 + p**3)) < 0.3


def test_the_cycle_has_every_token_of_the_draft_vocabulary_once():
    cycle = cycle_models.cycle(SHAPE)
    text = cycle.text(SHAPE.n_draft + 3, start=5)
    assert sorted(text[: SHAPE.n_draft]) == list(cycle.ids) and text[-3:] == text[:3]
    assert min(cycle.ids) >= 300 and max(cycle.ids) < SHAPE.n_vocab


def test_a_file_is_the_same_each_time(tmp_path):
    """Threads compute its parts in any order."""
    a, b = (cycle_models.target(tmp_path / name, SHAPE, "Q4_0").read_bytes() for name in "ab")
    assert a == b != cycle_models.target(tmp_path / "c", SHAPE, "Q4_0", seed=1).read_bytes()


def test_a_random_model_reads_its_whole_text(tmp_path):
    """Its last logits change with the first token: so a wrong mask or position would be seen."""
    path = cycle_models.random_target(tmp_path / "r.gguf", SHAPE)
    with EagleLlama(path, n_ctx=128, n_threads=1, verbose=False, logits_all=True, text=False) as llm:
        rows = []
        for first in (300, 301):
            llm.reset()
            llm.eval([first, *range(400, 430)])
            rows.append(np.array(llm.scores[30]))
        assert np.abs(rows[0] - rows[1]).max() > 0.05 * rows[0].std()
