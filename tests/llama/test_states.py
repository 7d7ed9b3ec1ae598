"""What outlives a call: completion caches, saved states, pickles; and what must not: a model whose head was
refused."""

import copy
import gc
import pickle
import sys

import numpy as np
import pytest
import tiny_models
from tiny_models import take

from eagle3_llama import (  # before llama_cpp: it brings the library
    EagleError,
    EagleLlama,
    EagleParams,
    ErrorKind,
)
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.llama import cache_settings

from llama_cpp import Llama, LlamaDiskCache, LlamaRAMCache, _internals, llama_cpp

CTX = {
    "n_ctx": 256,
    "n_batch": 32,
    "n_threads": 1,
    "n_threads_batch": 1,
    "flash_attn": True,
    "verbose": False,
}


@pytest.fixture
def eagle(files):
    llm = EagleLlama(files[0], eagle_path=files[1], n_max=4, **CTX)
    yield llm
    llm.close()


@pytest.fixture(params=["ram", "disk"])
def cache(request, tmp_path):
    return LlamaRAMCache() if request.param == "ram" else LlamaDiskCache(str(tmp_path))


def logprobs(llm, text, echo):
    rows = llm(text, max_tokens=6, temperature=0.0, logprobs=2, echo=echo, seed=1)["choices"][0]["logprobs"]
    return rows["tokens"], [x or 0.0 for x in rows["token_logprobs"]]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("logits_all", [True, False])
def test_logprobs_from_a_cache(files, cache, echo, logits_all):
    """After a cache hit, scores are right for the same prompt, a longer one, and one with the same start."""
    plain = Llama(files[0], logits_all=True, **CTX)
    eagle = EagleLlama(files[0], eagle_path=files[1], n_max=4, logits_all=logits_all, **CTX)
    eagle.set_cache(cache)
    for text in ("a5 b7 c8", "a5 b7 c8", "a5 b7 c8 d10 e11", "a5 b7 z9", "a5 b7 c8"):
        plain.reset()
        (tokens, values), expected = logprobs(eagle, text, echo), logprobs(plain, text, echo)
        assert tokens == expected[0] and values == pytest.approx(expected[1], abs=1e-3)
        eagle.reset()  # so that the cache has the longer prefix
    assert cache.cache_size > 0 and tuple(eagle.tokenize(b"a5 b7 c8")) in cache
    eagle.close()
    plain.close()


def test_caches_count_the_head(eagle):
    """And evict by it: the states kept are never more than the capacity."""
    eagle.eval([1, *range(5, 105)])
    state = eagle.save_state()
    everything = len(state.llama_state) + len(state.eagle_state) + state.input_ids.nbytes
    assert len(state.eagle_state) > 10_000
    cache = LlamaRAMCache(capacity_bytes=everything)
    cache[[1, 2]] = state
    assert cache.cache_size == everything and len(cache.cache_state) == 1
    cache[[1, 3]] = state
    assert len(cache.cache_state) == 1
    again = pickle.loads(pickle.dumps(state))
    assert again.llama_state_size == everything and again.eagle_state == state.eagle_state
    expected = take(eagle, 9, [1, *range(5, 105), 7])
    eagle.reset()
    eagle.load_state(again)
    assert take(eagle, 9, [1, *range(5, 105), 7]) == expected


def test_a_state_goes_between_models_with_a_head_and_without(files, eagle):
    """Without a head it brings the text to draft from. Where one side alone has a head, drafts start over."""
    prompt = [1, *range(5, 105)]
    with EagleLlama(files[0], **CTX) as first, EagleLlama(files[0], **CTX) as second:
        first.eval(prompt)
        eagle.eval(prompt)
        alone, with_head = first.save_state(), eagle.save_state()
        second.load_state(alone)
        assert second.save_state().eagle_state == alone.eagle_state
        second.load_state(with_head)
        assert len(second.save_state().eagle_state) < len(alone.eagle_state)  # it holds no token any more
        eagle.load_state(alone)
        assert eagle.n_tokens == len(prompt)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_max": 5, "n_min": 2, "p_min": 0.25},
        {"tree": "12x3x4", "p_min": 0.1},
        {"tree": [(0,), (1,), (0, 0)]},
        {"tree": False},
        {"n_max": 0},
        {"extract_layers": (0, 1, 2)},
        {"logits_all": True},
    ],
    ids=lambda s: ",".join(s),
)
def test_pickling(files, settings):
    """Every argument of ours, as it is now: eagle_params may have been set since."""
    llm = EagleLlama(files[0], eagle_path=files[1], **CTX, **settings)
    expected = take(llm, 12)
    for again in (pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm)):
        assert again.eagle_params == llm.eagle_params
        assert again.engine.head.info() == llm.engine.head.info()
        assert again.engine.has_head and bool(again._logits_all) == settings.get("logits_all", False)
        assert take(again, 12) == expected
        if settings.get("logits_all"):
            np.testing.assert_array_equal(again._scores, llm._scores)
        again.close()
    llm.eagle_params = EagleParams(n_max=7, p_min=0.5)
    again = pickle.loads(pickle.dumps(llm))
    assert again.eagle_params == EagleParams(n_max=7, p_min=0.5)
    again.close()
    llm.close()


# what changes keys or values and no shape, each with a value that is not the default
OTHERWISE = {
    "rope_scaling_type": 2,
    "rope_freq_base": 500.0,
    "rope_freq_scale": 0.25,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 2.0,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
    "yarn_orig_ctx": 64,
    "attention_type": 1,
}


def test_each_setting_of_a_context_is_looked_at():
    """A field that llama.cpp adds is either a part of what a state belongs to, or it is said why not."""
    fields = [name for name, *_ in llama_cpp.llama_context_params._fields_]
    assert sorted(fields) == sorted([*cache_settings.CHANGES, *cache_settings.LEAVES])
    assert set(OTHERWISE) == set(cache_settings.CHANGES) and all(cache_settings.LEAVES.values())


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_state_of_other_settings(files, eagle, name):
    """Shapes are the same, and the text would be wrong in silence."""
    eagle.eval([1, *range(5, 25)])
    with EagleLlama(files[0], **CTX, **{name: OTHERWISE[name]}) as other:
        other.eval([1, *range(5, 25)])
        for saved, into in ((other, eagle), (eagle, other)):
            with pytest.raises(EagleError, match=f"the state is of other settings, {name} was ") as e:
                into.load_state(saved.save_state())
            assert e.value.kind is ErrorKind.BAD_VALUE and into.n_tokens == 0
            into.eval([1, *range(5, 25)])
        with pickle.loads(pickle.dumps(other)) as again:  # a pickle has the settings
            again.load_state(other.save_state())
            assert again.n_tokens == 21


def test_a_state_of_other_rope_factors(tmp_path):
    """A context beyond the trained length uses long ones; a state that says nothing is of the short ones."""
    target = str(tiny_models.target(tmp_path / "long.gguf", n_ctx=256, factors=True))
    sizes = {**CTX, "n_ctx": 512}
    with EagleLlama(target, **CTX) as short, EagleLlama(target, **sizes) as long:
        assert short.n_ctx() == 256 and long.n_ctx() == 512
        for llm in (short, long):
            llm.eval([1, *range(5, 25)])
        for saved, into in ((short, long), (long, short)):
            with pytest.raises(EagleError, match="rope_factors was (unset|long) and is (unset|long) here"):
                into.load_state(saved.save_state())
        old = short.save_state()
        old.eagle_of = {name: of for name, of in old.eagle_of.items() if name != "settings"}
        short.load_state(old)
        with pytest.raises(EagleError, match="rope_factors"):
            long.load_state(old)


def refused(make):
    """The error, whose traceback is alive, and what was freed by then."""
    freed = []
    names = ("llama_model_free", "llama_free")
    own = {name: getattr(_internals.llama_cpp, name) for name in names}
    try:
        for name in names:
            setattr(_internals.llama_cpp, name, lambda p, name=name: (freed.append(name), own[name](p))[1])
        with pytest.raises(Exception) as e:
            make()
        return e, sorted(freed)
    finally:
        for name in names:
            setattr(_internals.llama_cpp, name, own[name])


def test_a_refused_head_frees_the_model(files, tmp_path):
    """At once, though the traceback of a notebook holds every frame."""
    other = str(tiny_models.head(tmp_path / "other.gguf", target_hidden_size=128))
    error, freed = refused(lambda: EagleLlama(files[0], eagle_path=other, **CTX))
    assert freed == [] and "hidden size" in str(error.value)  # nothing was loaded
    for make in (
        lambda: EagleLlama(files[0], eagle_path=files[1], extract_layers=(1, 2, 77), **CTX),
        lambda: EagleLlama(files[0], eagle_path=files[1], tree="12x3x4", **{**CTX, "flash_attn": False}),
        lambda: Batcher(
            BatchSettings(*files, n_parallel=2, n_ctx=128, n_threads=1, extract_layers=(1, 2, 77))
        ),
    ):
        error, freed = refused(make)
        assert freed == ["llama_free", "llama_model_free"], error.value
        assert error.tb is not None
    no_context = {**CTX, "flash_attn": False, "type_v": 8}  # Llama's own refusal
    error, freed = refused(lambda: EagleLlama(files[0], **no_context))
    assert freed == ["llama_model_free"] and "context" in str(error.value)


def test_wrong_arguments_leave_no_noise(files, monkeypatch):
    """An object that was never finished is collected in silence."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for make in (
        lambda: EagleLlama(),
        lambda: EagleLlama(files[0], n_max=-1),
        lambda: EagleLlama("no such file", verbose=False),
    ):
        with pytest.raises((TypeError, EagleError, ValueError)):
            make()
        gc.collect()
    assert not unraisable
