"""tests/kit/hybrid_models.py: a hybrid and experts with a chosen chance, and heads that know it."""

import itertools

import hybrid_models
import numpy as np
import pytest
from hybrid_models import MODELS, NEVER
from tiers import crossed

from eagle3_llama import EagleLlama
from eagle3_llama.runtime.params import EagleParams

NAMES = ["tiny-hybrid", "tiny-experts"]
ALONE = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


def answer(llm, params, prompt, n, **sampling):
    llm.reset()
    llm.stats.reset()
    llm.eagle_params = params
    generator = llm.generate(prompt, **{"temp": 0.0, **sampling})
    found = list(itertools.islice(generator, n))
    generator.close()
    return found


@pytest.mark.parametrize("name, topic", crossed(NAMES, [0.0, 0.6]))
def test_without_noise_the_text_is_the_cycles(tmp_path, name, topic):
    """And the head foresees all of it."""
    model = MODELS[name]
    of = hybrid_models.cycles(model.shape)
    target = hybrid_models.target(tmp_path / "t.gguf", model, 0.1, topic=topic)
    head = hybrid_models.head(tmp_path / "h.gguf", model, topic=topic)
    prompt = of.prompt(model.n_live)
    with EagleLlama(target, eagle=head, n_ctx=512, **ALONE) as llm:
        text = answer(llm, EagleParams(n_max=3, text=False), prompt, 100)
        assert of.foreseen([prompt[-1], *text]) == 1.0
        assert llm.stats.drafted > 50 and llm.stats.accepted >= llm.stats.drafted - 3
    with EagleLlama(target, n_ctx=512, **ALONE) as llm:
        assert answer(llm, EagleParams(), prompt, 100) == text


@pytest.mark.thorough
def test_with_noise_a_chosen_share_is_foreseen(tmp_path):
    model, path = MODELS["tiny-hybrid"], tmp_path / "t.gguf"
    adds, found = hybrid_models.find(path, model, 0.7, within=0.05, n=300)
    assert abs(found - 0.7) < 0.1 and hybrid_models.chance(path, model, 300) == found
    hybrid_models.target(path, model, NEVER)
    assert hybrid_models.chance(path, model, 200) < 0.1


@pytest.mark.parametrize("wanted, topic", crossed([0.7, 0.0], [0.7, 0.0]))
def test_a_sampled_text_is_foreseen_as_often_as_chosen(tmp_path, topic, wanted):
    """And drafts leave it alone, with the same seed."""
    model = MODELS["tiny-experts"]
    of, sampling = hybrid_models.cycles(model.shape), hybrid_models.sampling(model, wanted, topic)
    target = hybrid_models.target(tmp_path / "t.gguf", model, hybrid_models.ALWAYS, topic=topic)
    head = hybrid_models.head(tmp_path / "h.gguf", model, topic=topic)
    prompt = of.prompt(model.n_live)
    with EagleLlama(target, eagle=head, n_ctx=1024, **ALONE) as llm:
        texts = []
        for params in (EagleParams(n_max=0), EagleParams(n_max=3), EagleParams()):
            llm.set_seed(7)
            texts.append(answer(llm, params, prompt, 400, **sampling))
        assert texts[1:] == texts[:1] * 2 and abs(of.foreseen([prompt[-1], *texts[0]]) - wanted) < 0.1


@pytest.mark.parametrize("name, kind", crossed(NAMES, ["Q8_0", "Q4_0"]))
def test_drafts_with_noise_leave_the_text_alone(tmp_path, name, kind):
    model = MODELS[name]
    target = hybrid_models.target(tmp_path / "t.gguf", model, 3.5, kind)
    head = hybrid_models.head(tmp_path / "h.gguf", model)
    prompt = hybrid_models.cycles(model.shape).prompt(model.n_live)
    for n_rs_seq in (0, 4):
        with EagleLlama(target, eagle=head, n_rs_seq=n_rs_seq, n_ctx=512, **ALONE) as llm:
            plain = answer(llm, EagleParams(n_max=0), prompt, 150)
            for n_max in (1, 3, 8):
                assert answer(llm, EagleParams(n_max=n_max), prompt, 150) == plain
                assert 0 < llm.stats.accepted < llm.stats.drafted


def test_a_topic_makes_neighbours_choose_the_same_experts():
    """Counted in the router of the first layer, which reads little more than the embeddings."""
    model = MODELS["experts"]
    of, router = hybrid_models.cycles(model.shape), hybrid_models.router(model, 0)
    chosen = []
    for topic in (0.0, 0.7):
        scores = hybrid_models.codes(model.shape, topic) @ router.T
        top = np.argsort(-scores, axis=1)[:, : model.used]
        some = [set(top[cycle[i : i + 4]].ravel()) for cycle in of.live(model.n_live) for i in range(20)]
        chosen.append(np.mean([len(experts) for experts in some]))
    independent = model.experts * (1 - (1 - model.used / model.experts) ** 4)
    assert abs(chosen[0] - independent) < 1.5 and chosen[1] < 0.75 * independent


def test_cycles_are_short_and_have_every_token_once():
    shape = MODELS["tiny-hybrid"].shape
    of = hybrid_models.cycles(shape)
    assert sorted(i for cycle in of.cycles for i in cycle) == list(range(shape.n_draft))
    for cycle in of.cycles:
        assert hybrid_models.SHORTEST <= len(cycle) <= 2 * hybrid_models.LONGEST
        assert [of.following[i] for i in cycle] == [*cycle[1:], cycle[0]]
