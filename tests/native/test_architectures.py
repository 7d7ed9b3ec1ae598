"""Capture on every architecture that llama.cpp's generator can make, and text with every head on some."""

import re

import heads
import pytest
from architectures import check_all
from commands import run
from converting import converted
from cores import THREADS
from native_programs import program
from paths import ROOT
from tiers import each
from tiny_models import take

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads.convert.target import read_target
from eagle3_llama.heads.self_test import self_test

import llama_cpp

# captured and refused ones, one that is no model, and all that other tests here name
FEW = ["llama", "gemma3n", "eagle3", "kimi-linear", "plamo2", "minimax-01", "minimax-m3"]
SHAPES = ["llama", "qwen3", "gemma3", "phi3", "gpt-oss", "mistral3"]


@pytest.fixture(scope="module")
def tool():
    return program("architectures")


@pytest.fixture(scope="module", params=each([FEW, None], quick=[FEW], ids=["few", "all"]))
def checked(request, tool):
    return list(check_all(tool, request.param))


def names_in(checked):
    return {r["arch"] for r in checked}


def test_capture_is_the_graphs(checked):
    """Layer inputs are bit-equal or refused. The next decode works. The documents list them."""
    found = {"captured": set(), "refused": set(), "missing": set()}
    for r in checked:
        if "why" in r:
            found["missing"].add(r["arch"])
        elif r["code"] == 0:
            assert r["equal"] == r["seen"] == list(range(1, r["n_layer"] + 1)) and r["plain"] == 0, r
            found["captured"].add(r["arch"])
        else:
            assert r["code"] < 0 and r["plain"] == 0, r
            found["refused"].add(r["arch"])
    assert found == {kind: names & names_in(checked) for kind, names in readme_lists().items()}
    assert all(found.values()) and (len(found["captured"]) >= 60 or names_in(checked) == set(FEW))


def test_three_sequences(checked):
    """A context is made for them, and decodes them. kimi-linear and plamo2 ended the process (patch 0011)."""
    ended = {r["arch"] for r in checked if "generator ends" in r.get("why", "")}
    assert ended == {"eagle3", "dflash"} & names_in(checked)  # heads: they are no models by themselves
    assert not [r["arch"] for r in checked if r.get("three")]


# llama.cpp computes one row of them in another order of sums. They are decoded plainly.
ROUNDED = ["minimax-01", "minimax-m3"]


def test_rows_alone_and_together(checked):
    """Logits of rows that are decoded one by one and together have the same bits, or nothing drafts."""
    alike = {r["arch"] for r in checked if r.get("rows")}
    assert {r["arch"] for r in checked if r.get("rows") is False} == set(ROUNDED)
    assert len(alike) > 90 or names_in(checked) == set(FEW)


@pytest.mark.parametrize("arch", ROUNDED)
def test_no_drafts_where_rows_differ(tool, tmp_path, arch):
    """With a head, one warning says why such a target is decoded plainly; the text drafts nothing either."""
    run([tool, "save", arch, tmp_path])
    target = next(tmp_path.glob("*.gguf"))
    about = read_target(target)
    size = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
    _, head = converted(tmp_path, "SpecForge", target, "q8_0", **size)
    with pytest.warns(RuntimeWarning, match=f"decodes plainly: .* a row of {arch} alone") as said:
        llm = EagleLlama(str(target), eagle_path=str(head), n_ctx=128, n_threads=THREADS, verbose=False)
    take(llm, 24, [5, 17, 29, 41] * 4)
    assert len(said) == 1 and llm.stats.drafted == 0
    llm.close()


@pytest.mark.parametrize("arch", ["dream", "llada", "llada-moe", "rnd1"])
def test_diffusion_models_are_refused(tool, tmp_path, arch):
    """The error says what they are, and not that they lack the memory of a text."""
    run([tool, "save", arch, tmp_path])
    target = next(tmp_path.glob("*.gguf"))
    with pytest.raises(EagleError, match="diffusion model.* does not decode it from left to right") as e:
        EagleLlama(str(target), n_ctx=128, n_threads=THREADS, verbose=False)
    assert e.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", ["deepseek2", "glm-dsa"])
def test_models_with_mla_load(tool, tmp_path, arch, kind):
    """Their attention multiplies weights of three dimensions with permuted activations (patch 0202)."""
    run([tool, "save", arch, tmp_path])
    path = tmp_path / "quantised.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    target = next(tmp_path.glob("*.gguf"))
    assert llama_cpp.llama_model_quantize(str(target).encode(), str(path).encode(), params) == 0
    llm = EagleLlama(str(path), n_ctx=128, n_threads=THREADS, verbose=False)
    assert len(take(llm, 8, [5, 17, 29, 41, 53])) == 8
    llm.close()


def readme_lists():
    """The architectures in docs/architectures.md, by what it says of them."""
    text, out = (ROOT / "eagle3_llama/docs/architectures.md").read_text(), {}
    for kind, start in (
        ("captured", "Captured, equal to the graph"),
        ("refused", "Refused"),
        ("missing", "Not tried"),
    ):
        paragraph = text.split(f"**{start}", 1)[1].split("\n\n", 1)[0]
        out[kind] = set(re.findall(r"`([\w.-]+)`", paragraph))
    return out


@pytest.mark.parametrize("few", each([True, False], quick=[True]), ids=["few", "others"])
@pytest.mark.parametrize("shape", SHAPES)
def test_text_with_every_head(tool, tmp_path, shape, few):
    """Greedy text is plain decoding's with a head on a target of another family: three for each layout."""
    run([tool, "save", shape, tmp_path])
    target = next(tmp_path.glob("*.gguf"))
    about = read_target(target)
    size = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
    prompt = [5, 17, 29, 41, 53]
    plain = take(EagleLlama(str(target), n_ctx=128, n_threads=THREADS, verbose=False), 24, prompt)
    at, names = SHAPES.index(shape), list(heads.RECIPES)
    for name in names[at % 2 :: 2]:
        if (name in names[at :: len(SHAPES)]) != few:
            continue
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        _, path = converted(folder, name, target, "q8_0", **size)
        llm = EagleLlama(
            str(target), eagle_path=str(path), n_max=3, n_ctx=128, n_threads=THREADS, verbose=False
        )
        assert take(llm, 24, prompt) == plain, name
        assert llm.stats.drafted > 20, name
        llm.close()


def test_self_test_of_targets_whose_rows_differ(tool, tmp_path, arch="minimax-01"):
    """Their text would depend on drafts, so that none are made: the self-test says so."""
    run([tool, "save", arch, tmp_path])
    target = next(tmp_path.glob("*.gguf"))
    about = read_target(target)
    _, head = converted(
        tmp_path,
        "SpecForge",
        target,
        "q8_0",
        n_embd=about.n_embd,
        n_layer=about.n_layer,
        n_vocab=about.n_vocab,
    )
    with pytest.raises(EagleError, match="otherwise than among others") as e:
        self_test(head, target, THREADS)
    assert e.value.kind is ErrorKind.UNSUPPORTED
