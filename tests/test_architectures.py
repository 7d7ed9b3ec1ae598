"""Capture on every architecture that llama.cpp's own generator makes models of, and text with every head on some of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import heads
import pytest
from test_variants import converted
from tiny_models import take

from eagle3_llama import EagleLlama
from eagle3_llama.convert.target import read_target

ROOT = Path(__file__).parent.parent
SHAPES = ["llama", "qwen3", "gemma3", "phi3", "gpt-oss", "mistral3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder of the models, results of tests/architectures.py)."""
    folder = tmp_path_factory.mktemp("architectures")
    done = subprocess.run([sys.executable, ROOT / "tests" / "architectures.py", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads(line) for line in done.stdout.splitlines()]


def test_capture_is_the_graphs(models):
    """All layer inputs equal, bit for bit, or refused with a code; no process dies, and the next decode works."""
    captured, refused = set(), set()
    for r in models[1]:
        if "missing" in r:
            continue
        assert "died" not in r, r
        arch = r["model"].rsplit("-", 1)[0]
        if r["code"] == 0:
            assert r["captured"] == r["seen"] and len(r["seen"]) == r["n_layer"], r
            captured.add(arch)
        else:
            assert r["code"] < 0 and r["plain"] == 0, r
            refused.add(arch)
    assert len(captured - refused) >= 60
    listed = readme_list()
    assert listed["captured"] == captured - refused and listed["refused"] == refused
    assert listed["missing"] == {r["model"] for r in models[1] if "missing" in r}


def readme_list():
    """The architectures that README lists, by what it says of them."""
    text = (ROOT / "README.md").read_text()
    out = {}
    for kind, start in (("captured", "Captured, equal to the graph"), ("refused", "Refused, for they have no one stream"), ("missing", "Not tried")):
        paragraph = text.split(f"**{start}", 1)[1].split("\n\n", 1)[0]
        out[kind] = set(re.findall(r"`([\w.-]+)`", paragraph))
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_text_with_every_head(models, tmp_path, shape):
    """Greedy text is plain decoding's with a head of each layout on a target of another family."""
    target = next(p for kind in ("dense", "moe") if (p := models[0] / f"{shape}-{kind}.gguf").exists())
    about = read_target(target)
    size = {"n_embd": about.n_embd, "n_layer": about.n_layer, "n_vocab": about.n_vocab}
    prompt = [5, 17, 29, 41, 53]
    plain = take(EagleLlama(str(target), n_ctx=128, n_threads=2, verbose=False), 24, prompt)
    for name, recipe in heads.RECIPES.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        _, path = converted(folder, name, target, "q8_0", **size)
        llm = EagleLlama(str(target), eagle_path=str(path), n_max=3, n_ctx=128, n_threads=2, verbose=False)
        assert take(llm, 24, prompt) == plain, name
        assert llm.stats.drafted > 20, name
        llm.close()
