"""llama.cpp's own drafters (native/bench/upstream.cpp) on memories that cannot take back a part of a text."""

import dataclasses
import random

import hybrid_models
import pytest
from commands import run
from native_programs import program

from eagle3_llama.bench.child import of_checkout
from eagle3_llama.bench.modes import parse_modes
from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.runtime.params import EagleParams

Drafter, N = of_checkout("upstream").Drafter, 40


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """{architecture: a tiny random model}: snapshots of the state, checkpoints with a KV cache, and alone."""
    folder = tmp_path_factory.mktemp("generated")
    tool = program("architectures")
    for arch in ("qwen35", "nemotron_h", "mamba2"):
        (folder / arch).mkdir()
        run([tool, "save", arch, folder / arch])
    return {arch: str(folder / arch / f"{arch}-dense.gguf") for arch in ("qwen35", "nemotron_h", "mamba2")}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A hybrid whose head is right at two of three positions; prompt."""
    folder, model = tmp_path_factory.mktemp("hybrid"), hybrid_models.MODELS["tiny-hybrid"]
    files = (
        str(hybrid_models.target(folder / "t.gguf", model, 3.2)),
        str(hybrid_models.head(folder / "h.gguf", model)),
    )
    return *files, hybrid_models.cycles(model.shape).prompt(model.n_live)


def drafted(drafter, prompts, **setting):
    """The texts, and how many draft tokens were accepted and rejected."""
    drafter.setting = dataclasses.replace(drafter.setting, n_max=0, n_gram=0, n_text=0)
    drafter.setting = dataclasses.replace(drafter.setting, **setting)
    texts, accepted, rejected = [], 0, 0
    for prompt in prompts:
        tokens, _, rounds = drafter.run(prompt, N)
        assert sum(sampled for _, sampled, _ in rounds) == len(tokens) - 1
        accepted += sum(sampled - 1 for _, sampled, n in rounds if n)
        rejected += sum(n - sampled + 1 for _, sampled, n in rounds if n)
        texts.append(tokens)
    return texts, accepted, rejected


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ["qwen35", "nemotron_h", "mamba2"])
@pytest.mark.parametrize(
    "spec, setting",
    [
        ("ngram-simple", {"n_gram": 1, "n_text": 4}),
        ("ngram-mod", {"n_gram": 1, "n_text": 24}),
        ("ngram-map-k", {"n_gram": 1, "n_text": 8}),
    ],
)
def test_text_drafts_on_a_recurrent_memory(generated, arch, spec, setting):
    """The prompts have all tokens, so each brings drafts that are wrong; checkpoints take them back."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 128) for _ in range(120)] for _ in range(3)]
    drafter = Drafter(generated[arch], None, spec, 1, 256, None)
    try:
        plain, *none = drafted(drafter, prompts)
        assert none == [0, 0]
        texts, accepted, rejected = drafted(drafter, prompts, **setting)
    finally:
        drafter.close()
    assert texts == plain and rejected > 20


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["draft-eagle3", "draft-eagle3,ngram-mod"])
def test_a_head_on_a_hybrid(hybrid, spec):
    """By snapshots for the head's drafts, and by checkpoints for those of the text that are longer."""
    target, head, prompt = hybrid
    drafter = Drafter(target, head, spec, 1, 512, None)
    prompts = [prompt, prompt[20:], prompt[:60]]
    try:
        plain, *_ = drafted(drafter, prompts)
        for n_max in (1, 3, 8):
            texts, accepted, rejected = drafted(drafter, prompts, n_max=n_max, n_gram=1, n_text=24)
            assert texts == plain and accepted > 20 and rejected > 20, n_max
    finally:
        drafter.close()


@pytest.mark.thorough
def test_the_layers_of_the_target_itself(hybrid):
    """draft-mtp takes no file."""
    target, _, prompt = hybrid
    drafter = Drafter(target, None, "draft-mtp", 1, 512, None)
    try:
        plain, *_ = drafted(drafter, [prompt])
        for n_max in (1, 3):
            texts, accepted, rejected = drafted(drafter, [prompt], n_max=n_max)
            assert texts == plain and accepted > 10 and rejected > 5
    finally:
        drafter.close()


@pytest.mark.thorough
def test_a_small_model_that_is_a_hybrid_too(hybrid, tmp_path):
    """Its own memory needs checkpoints. Its noise is another, so some of its tokens are wrong."""
    target, _, prompt = hybrid
    small = hybrid_models.target(tmp_path / "d.gguf", hybrid_models.MODELS["tiny-hybrid"], 1.0)
    drafter = Drafter(target, str(small), "draft-simple", 1, 512, None)
    try:
        plain, *_ = drafted(drafter, [prompt, prompt[:60]])
        texts, accepted, rejected = drafted(drafter, [prompt, prompt[:60]], n_max=3)
        assert texts == plain and accepted > 20 and rejected > 10
    finally:
        drafter.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spec, why", [("draft-mtp", "no layers that draft-mtp could"), ("draft-eagle3", "needs a file")]
)
def test_what_cannot_draft_says_why(generated, spec, why):
    with pytest.raises(EagleError, match=why) as e:
        Drafter(generated["qwen35"], None, spec, 1, 256, None)
    assert e.value.kind is ErrorKind.NATIVE


def test_which_drafters_read_the_file_of_eagle():
    specs = "draft-mtp", "draft-mtp+ngram-mod", "draft-dflash", "draft-dspark"
    modes = [f"upstream:{spec}" for spec in specs]
    found = parse_modes(["eagle", *modes], ["h.gguf"], None, EagleParams(), [])
    assert [m.head for m in found] == ["h.gguf", None, None, "h.gguf", "h.gguf"]
    assert [m.name for m in found[1:]] == modes
