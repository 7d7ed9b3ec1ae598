"""Capture on every architecture that llama.cpp's generator can make, and text with every head on some."""

import re

import heads
import pytest
from architectures import check_all, compile_tool
from commands import run
from converting import converted
from cores import THREADS
from paths import ROOT
from tiny_models import take

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads.convert.target import read_target
from eagle3_llama.heads.self_test import self_test

SHAPES = ["llama", "qwen3", "gemma3", "phi3", "gpt-oss", "mistral3"]


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    return compile_tool(tmp_path_factory.mktemp("architectures"))


def test_capture_is_the_graphs(tool):
    """Layer inputs are bit-equal or refused. The next decode works. The documents list them."""
    found = {"captured": set(), "refused": set(), "missing": set()}
    for r in check_all(tool):
        if "why" in r:
            found["missing"].add(r["arch"])
        elif r["code"] == 0:
            assert r["equal"] == r["seen"] == list(range(1, r["n_layer"] + 1)) and r["plain"] == 0, r
            found["captured"].add(r["arch"])
        else:
            assert r["code"] < 0 and r["plain"] == 0, r
            found["refused"].add(r["arch"])
    assert len(found["captured"]) >= 60 and readme_lists() == found


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


@pytest.mark.parametrize("shape", SHAPES)
def test_text_with_every_head(tool, tmp_path, shape):
    """Greedy text is plain decoding's with a head on a target of another family: three for each layout."""
    run([tool, "save", shape, tmp_path])
    target = next(tmp_path.glob("*.gguf"))
    about = read_target(target)
    size = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
    prompt = [5, 17, 29, 41, 53]
    plain = take(EagleLlama(str(target), n_ctx=128, n_threads=THREADS, verbose=False), 24, prompt)
    for name in list(heads.RECIPES)[SHAPES.index(shape) % 2 :: 2]:
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        _, path = converted(folder, name, target, "q8_0", **size)
        llm = EagleLlama(
            str(target), eagle_path=str(path), n_max=3, n_ctx=128, n_threads=THREADS, verbose=False
        )
        assert take(llm, 24, prompt) == plain, name
        assert llm.stats.drafted > 20, name
        llm.close()


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_self_test_of_targets_without_a_way_back(tool, tmp_path, arch):
    """Recurrent and hybrid targets cannot be drafted for: the self-test says so."""
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
    with pytest.raises(EagleError, match="recurrent or hybrid") as e:
        self_test(head, target, THREADS)
    assert e.value.kind is ErrorKind.UNSUPPORTED
