"""Names of settings: aliases work, a wrong one is told the right one, and nothing is dropped in silence."""

import os
import sys
import warnings

import pytest
from commands import run
from tiny_models import PROMPT, take

from eagle3_llama import EagleError, EagleLlama, EagleParams, ErrorKind
from eagle3_llama.batching import BatchSettings
from eagle3_llama.common import keywords
from eagle3_llama.server.settings import ServerSettings
from eagle3_llama.train.settings import TrainSettings

COMMON = {"n_ctx": 128, "n_batch": 64, "n_threads": 1, "verbose": False}


@pytest.fixture
def load(files):
    """Loads the tiny target with these keywords; what was loaded is closed afterwards."""
    loaded = []

    def load(**given):
        loaded.append(EagleLlama(files[0], **{**COMMON, **given}))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.close()


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(keywords, "_told", set())


def warned(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if w.category is RuntimeWarning]


@pytest.mark.parametrize("name", ["eagle", "eagle_path", "head"])
def test_one_thing_by_each_of_its_names(load, files, name):
    llm = load(**{name: files[1]}, n_max=2)
    take(llm, 8)
    assert llm.engine.has_head and llm.stats.drafted > 0


def test_names_that_contradict_each_other(load, files):
    assert load(eagle=files[1], head=files[1], eagle_path=None).engine.has_head
    with pytest.raises(
        EagleError, match="eagle=.* and head='other.gguf' are the same setting with different values"
    ) as e:
        load(eagle=files[1], head="other.gguf")
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("head_path", "eagle"),
        ("eagle_model", "eagle"),
        ("eagle_head", "eagle"),
        ("eagles", "eagle"),
        ("eagle_file", "eagle"),
        ("speculative", "eagle"),
        ("assistant_model", "eagle"),
        ("draft_path", "eagle"),
        ("draft_p_min", "p_min"),
        ("spec_draft_n_min", "n_min"),
        ("speculative_config", "eagle"),
        ("Eagle", "eagle"),
        ("n_draft", "n_max"),
        ("num_draft_tokens", "n_max"),
        ("draft_max", "n_max"),
        ("num_pred_tokens", "n_max"),
        ("num_speculative_tokens", "n_max"),
        ("nmax", "n_max"),
        ("pmin", "p_min"),
        ("trees", "tree"),
        ("eagle_tree_depth", "tree"),
        ("extract_layer", "extract_layers"),
    ],
)
def test_a_keyword_that_means_one_of_ours(load, wrong, right):
    with pytest.raises(EagleError, match=f"'{wrong}': did you mean {right}\\?") as e:
        load(**{wrong: 3})
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


def test_other_keywords_that_llama_ignores(load, told):
    """Old ones, which frameworks go on passing: said once each, with the nearest that Llama has."""
    for name, said in (
        ("f16_kv", "leave it out"),
        ("n_gqa", "leave it out"),
        ("n_gpu_layer", "mean n_gpu_layers"),
        ("flash_attention", "mean flash_attn"),
        ("thread", "mean n_threads"),
        ("min_p", "the method that generates"),
        ("temperature", "the method that"),
    ):
        first, second = warned(lambda: load(**{name: 1})), warned(lambda: load(**{name: 1}))
        assert len(first) == 1 and name in first[0] and said in first[0], (name, first)
        assert second == []


def test_all_that_llama_takes_is_taken(load, told, files):
    llm = load(eagle=files[1])
    assert (
        warned(
            lambda: load(**{k: v for k, v in llm.__getstate__().items() if k not in ("model_path", *COMMON)})
        )
        == []
    )


@pytest.mark.parametrize(
    "given, said",
    [
        ({"embedding": True}, "head is not used, because a model with embedding=True"),
        ({"vocab_only": True}, "head is not used, because a model with vocab_only=True"),
    ],
)
def test_a_head_is_not_dropped_in_silence(load, files, given, said):
    heard = warned(lambda: load(eagle=files[1], **given))
    assert len(heard) == 1 and said in heard[0]
    assert warned(lambda: load(**given)) == []


def test_settings_without_a_head(load):
    for given in ({"n_max": 3}, {"tree": "4x2x2"}, {"extract_layers": [1, 2, 3]}):
        (name,) = given
        with pytest.raises(
            EagleError, match=f"{name} has no effect, because there is no head to draft with"
        ) as e:
            load(**given)
        assert e.value.kind is ErrorKind.BAD_ARGUMENT
    assert warned(lambda: load(n_max=0)) == warned(load) == []


def test_a_head_beside_a_draft_model(load, files):
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft_model = LlamaPromptLookupDecoding()
    with pytest.raises(EagleError, match="eagle or draft_model"):
        load(head=files[1], draft_model=draft_model)
    with pytest.raises(EagleError, match="draft_model has its own settings: give eagle, or leave n_max out"):
        load(draft_model=draft_model, n_max=3)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda m: EagleParams(nmax=3), "'nmax': did you mean n_max"),
        (lambda m: EagleParams(num_draft_tokens=3), "did you mean n_max"),
        (lambda m: BatchSettings(m, eagel="x"), "'eagel': did you mean eagle"),
        (lambda m: BatchSettings(m, n_slots=2), "settings are model, eagle"),
        (lambda m: ServerSettings(m, n_paralel=2), "did you mean n_parallel"),
        (lambda m: ServerSettings(m, eagle_model="x"), "did you mean eagle"),
        (lambda m: TrainSettings((m,), "out", step=2), "did you mean steps"),
        (lambda m: BatchSettings(m, "a.gguf", head="b.gguf"), "same setting with different values"),
    ],
)
def test_settings_refuse_what_they_do_not_know(files, make, said):
    with pytest.raises(EagleError, match=said) as e:
        make(files[0])
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


def test_settings_take_the_aliases(files):
    assert (
        BatchSettings(files[0], head=files[1])
        == BatchSettings(files[0], eagle_path=files[1])
        == BatchSettings(files[0], files[1])
    )
    assert ServerSettings(files[0], head=files[1]).eagle == files[1]


def test_flash_attention_is_llamas_unless_left_to_llama_cpp(files):
    """The class has Llama's default, so that its text is Llama's; None is that of all else."""
    import inspect

    import llama_cpp

    assert BatchSettings(files[0]).flash_attn is ServerSettings(files[0]).flash_attn is None
    assert (
        inspect.signature(EagleLlama).parameters["flash_attn"].default
        == inspect.signature(llama_cpp.Llama).parameters["flash_attn"].default
    )
    for given, kind in ((False, "DISABLED"), (True, "ENABLED"), (None, "AUTO")):
        llm = EagleLlama(files[0], eagle=files[1], flash_attn=given, **COMMON)
        assert llm.context_params.flash_attn_type == getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
        assert llm.engine.can_tree == (given is not False)
        assert llm.__getstate__()["flash_attn"] is given
        llm.close()


def test_left_to_llama_cpp_the_text_is_that_of_flash_attention(files):
    auto, on = (EagleLlama(files[0], eagle=files[1], flash_attn=f, **COMMON) for f in (None, True))
    plain = sys.modules["llama_cpp"].Llama(files[0], flash_attn=True, **COMMON)
    assert take(auto, 60, prompt=PROMPT) == take(on, 60, prompt=PROMPT) == take(plain, 60, prompt=PROMPT)
    for llm in (auto, on, plain):
        llm.close()


def test_paths_may_be_paths(files):
    from pathlib import Path

    llm = EagleLlama(Path(files[0]), eagle=Path(files[1]), **COMMON)
    assert llm.engine.has_head and llm.model_path == files[0]
    llm.close()


def test_a_cache_named_by_its_tilde():
    code = "from eagle3_llama.models import cache_dir; print(cache_dir())"
    env = {**os.environ, "HOME": "/home/someone", "EAGLE3_LLAMA_CACHE": "~/models"}
    done = run([sys.executable, "-c", code], env=env)
    assert done.stdout.strip() == "/home/someone/models"


def test_settings_of_another_kind(load, files):
    with pytest.raises(EagleError, match="expected EagleParams"):
        load(eagle=files[1]).eagle_params = {"n_max": 3}
