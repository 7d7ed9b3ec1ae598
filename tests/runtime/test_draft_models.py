"""draft_model="small.gguf": a small model drafts, and the text is plain decoding's."""

import cycle_models
import hybrid_models
import pair_models
import pytest
import tiny_models
from native_programs import passes
from tiers import each
from tiny_models import take

from eagle3_llama import EagleError, EagleLlama, EagleParams, ErrorKind
from eagle3_llama.batching import Batcher, BatchSettings

LOAD = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "flash_attn": True}
PROMPT = cycle_models.cycle(pair_models.BIG).text(4)
CHANCES = [0.0, 0.3, 0.7, 1.0]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return cycle_models.target(tmp_path_factory.mktemp("pair") / "big.gguf", pair_models.BIG, "Q8_0")


@pytest.fixture(scope="module")
def smalls(tmp_path_factory):
    """By the chance of a token: (the file, the share of tokens behind which it is right)."""
    d = tmp_path_factory.mktemp("small")
    make = lambda p: pair_models.small(d / f"{p}.gguf", pair_models.BIG, pair_models.SMALL, p)
    return {p: (d / f"{p}.gguf", make(p)) for p in CHANCES}


@pytest.fixture(scope="module")
def plain(target):
    with EagleLlama(target, text=False, **LOAD) as llm:
        yield llm


@pytest.mark.parametrize("p", each(CHANCES, quick=[0.7]))
def test_bits_and_tokens_a_round(request, target, smalls, p):
    """1 and 4 slots, greedy and sampled, chains and planned: the logits of each row, tokens as in theory."""
    programs = request.getfixturevalue("programs" if p == 0.7 else "fast_programs")
    passes(
        programs, "draft_model_test", target, smalls[p][0], smalls[p][1], 60 if p == 0.7 else 1000, PROMPT[0]
    )


@pytest.mark.parametrize(
    "target_is, small_is", [("hybrid", "hybrid"), ("hybrid", "small"), ("cycle", "hybrid")]
)
def test_states_that_cannot_drop_rows(programs, target, smalls, tmp_path, target_is, small_is):
    """A hybrid as target, as drafter, as both: each row's logits, also after going back."""
    model = hybrid_models.MODELS["tiny-hybrid"]
    hybrid = hybrid_models.target(tmp_path / "hybrid.gguf", model, hybrid_models.ALWAYS)
    files = {"hybrid": hybrid, "cycle": target, "small": smalls[1.0][0]}
    start = hybrid_models.cycles(model.shape).prompt(model.n_live)[0] if target_is == "hybrid" else PROMPT[0]
    chance = float(target_is == small_is)  # their cycles are not the others'
    passes(programs, "draft_model_test", files[target_is], files[small_is], chance, 40, start)


@pytest.mark.parametrize("sampling", [{"temp": 0.0}, {"temp": 0.9, "top_k": 50}], ids=["greedy", "sampled"])
def test_the_same_text(target, smalls, plain, sampling):
    small = str(smalls[0.7][0])
    with EagleLlama(target, draft_model=small, **LOAD) as llm:
        for params in (EagleParams(), EagleParams(n_max=3), EagleParams(text=False), EagleParams(n_max=0)):
            llm.eagle_params = params
            assert take(llm, 200, PROMPT, **sampling) == take(plain, 200, PROMPT, **sampling), params
        llm.eagle_params = EagleParams(n_max=3, text=False)
        llm.stats.reset()
        take(llm, 200, PROMPT, temp=0.0)
        assert llm.stats.drafted_from["model"] == llm.stats.drafted > llm.stats.accepted > 0
        assert "drafter" in str(llm.memory()) and llm.memory().head_weights > 0
        with pytest.raises(EagleError, match="chains, not trees of a given shape: leave tree out"):
            llm.eagle_params = EagleParams(tree="8x2x2")


def test_a_saved_state(target, smalls, plain):
    """It has nothing of the small model, which reads the text again."""
    with EagleLlama(target, draft_model=smalls[1.0][0], n_max=3, **LOAD) as llm:
        first = take(llm, 40, PROMPT, temp=0.0)
        state = llm.save_state()
        llm.reset()
        take(llm, 20, PROMPT[2:], temp=0.0)
        llm.load_state(state)
        llm.stats.reset()
        again = [t for t, _ in zip(llm.generate([*PROMPT, *first], temp=0.0), range(40))]
        assert again == take(plain, 80, PROMPT, temp=0.0)[40:]
        assert llm.stats.accepted > 20


def test_several_slots(target, smalls, plain):
    settings = BatchSettings(target, str(smalls[0.7][0]), n_parallel=3, n_ctx=256, n_threads=1)
    prompts = [cycle_models.cycle(pair_models.BIG).text(4, start=50 * i) for i in range(3)]
    batcher = Batcher(settings)
    try:
        for params in (None, EagleParams(n_max=4)):
            for prompt in prompts:
                with batcher.request(params=params) as llm:
                    assert take(llm, 60, prompt, temp=0.0) == take(plain, 60, prompt, temp=0.0)
        assert batcher.engine.stats.drafted_from["model"] > 0
        with pytest.raises(EagleError, match="not trees of a given shape"):
            batcher.request(params=EagleParams(tree="8x2x2"))
    finally:
        batcher.close()


def test_a_longer_vocabulary(target, tmp_path, capfd, plain):
    """Ids that the target does not have are never offered."""
    small = tmp_path / "wide.gguf"
    pair_models.small(small, pair_models.BIG, pair_models.SMALL, 1.0, more=64)
    with EagleLlama(target, draft_model=small, n_max=3, **{**LOAD, "verbose": True}) as llm:
        assert "2112 tokens, the target's 2048" in capfd.readouterr().err
        assert take(llm, 60, PROMPT, temp=0.0) == take(plain, 60, PROMPT, temp=0.0)
        assert llm.stats.accepted > 20


def test_what_is_refused(target, tmp_path, smalls, files):
    other, head = tmp_path / "other.gguf", files[1]
    pair_models.small(other, pair_models.BIG, pair_models.SMALL, 1.0, names={1000: "another"})
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(smalls[1.0][0].read_bytes()[:100_000])
    (tmp_path / "text.gguf").write_text("no model")
    random = tiny_models.target(tmp_path / "random.gguf")
    for given, words, kind in (
        ({"draft_model": other}, "token 1000 is another .* take a draft model of the target's family", None),
        ({"draft_model": random}, "take a draft model of the target's family", None),
        ({"draft_model": head}, "is a head: give it as eagle=", ErrorKind.HEAD_MISMATCH),
        ({"draft_model": tmp_path / "none.gguf"}, "no such file", ErrorKind.BAD_FILE),
        ({"draft_model": tmp_path / "text.gguf"}, "is not a GGUF file", ErrorKind.BAD_FILE),
        ({"draft_model": damaged}, "", None),
        ({"draft_model": smalls[1.0][0], "eagle": head}, "eagle or draft_model", ErrorKind.BAD_ARGUMENT),
        ({"draft_model": 5}, "expected the path of a small model", ErrorKind.BAD_ARGUMENT),
    ):
        with pytest.raises(EagleError, match=words) as e:
            EagleLlama(target, **given, **LOAD)
        assert kind is None or e.value.kind is kind, given
