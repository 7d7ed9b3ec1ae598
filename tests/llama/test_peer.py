"""llama-cpp-python's own tests, unchanged: what passes with Llama also passes with EagleLlama and a head."""

import actor
import peer
import pytest
import tiny_models
from converting import converted
from tiers import each

# What no other model than the hub's can meet, by the line that fails, with Llama and with EagleLlama alike.
CANNOT_HOLD = {
    "test_llama.py::test_real_model": (
        "[9419, 11, 1814, 0]",
        "token ids of Qwen's vocabulary; SmolLM2's has others",
    ),
    "test_llama.py::test_real_llama": (
        "lazy dog",
        "Qwen's greedy text; SmolLM2 goes on otherwise, by 1.6 in the logit",
    ),
    "test_llama.py::test_real_llama_repeated_prompt_cache": ("lazy dog", "the same text"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return peer.random_models(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def cast(tmp_path_factory, made):
    return peer.models(tmp_path_factory.mktemp("models"), made)


def run_both(folder, files, only="", drafting=()):
    """The tests' outcomes with Llama and with EagleLlama; the same tests.

    drafting: models that EagleLlama drafts for, besides those that it says it drafts for.
    """
    peer.unpack(folder)
    plain, ours = (peer.run(folder, files, eagle, only) for eagle in (False, True))
    assert set(plain["tests"]) == set(ours["tests"])
    assert plain["drafted"] == {} and {model for model, _ in drafting} <= set(ours["drafted"])
    assert all(n > 0 for n in ours["drafted"].values()), ours["drafted"]
    return plain["tests"], ours["tests"]


def same(plain, ours):
    """Each test ends alike, and a failure is that of the same line."""
    different = {
        name: (was, ours[name])
        for name, was in plain.items()
        if (was["outcome"], was["line"]) != (ours[name]["outcome"], ours[name]["line"])
    }
    assert not different, different


@pytest.mark.thorough
def test_on_real_and_random_models(tmp_path, cast, made):
    """SmolLM2 with the shipped head; random recurrent, hybrid and embedding models with their own heads."""
    drafting = [cast[peer.CHAT_MODEL], *(made[arch] for arch in ("mamba", "falcon-h1"))]
    plain, ours = run_both(tmp_path, cast, drafting=drafting)
    assert len(plain) >= 25 and {r["outcome"] for r in plain.values()} == {"passed", "failed"}
    failed = {name: r for name, r in plain.items() if r["outcome"] != "passed"}
    assert set(failed) == set(CANNOT_HOLD), failed
    for name, (line, _) in CANNOT_HOLD.items():
        assert line in failed[name]["line"], failed[name]
    same(plain, ours)


@pytest.mark.parametrize("arch", each(peer.HYBRIDS, quick=["qwen35"]))
def test_on_hybrids_with_snapshots(tmp_path, cast, made, arch):
    """Texts that are cut, saved, restored and reused: all that the tests do with a hybrid."""
    files = {**cast, peer.HYBRID_MODEL: made[arch]}
    plain, ours = run_both(tmp_path, files, "hybrid", drafting=[made[arch]])
    assert len(plain) >= 5 and {r["outcome"] for r in plain.values()} == {"passed"}, plain
    same(plain, ours)


@pytest.mark.thorough
def test_on_a_model_that_meets_them(tmp_path, cast):
    """Tests that fail early with SmolLM2 run to their end with a model that generates the expected text."""
    target = actor.actor(tmp_path / "actor.gguf")
    _, head = converted(
        tmp_path,
        "speculators, llama",
        target,
        n_embd=tiny_models.N_EMBD,
        n_layer=tiny_models.N_LAYER,
        n_vocab=actor.N_VOCAB,
    )
    only = " or ".join(name.partition("::")[2] for name in CANNOT_HOLD)
    files = [str(target), str(head)]
    plain, ours = run_both(tmp_path, {**cast, peer.CHAT_MODEL: files}, only, drafting=[files])
    assert set(CANNOT_HOLD) <= set(plain) and {r["outcome"] for r in plain.values()} == {"passed"}, plain
    same(plain, ours)
