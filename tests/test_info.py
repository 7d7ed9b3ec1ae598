"""What `info` says of targets and heads, and what `convert --self-test` finds out."""

from pathlib import Path

import heads
import pytest
import tiny_models
from cores import THREADS
from test_variants import converted
from typer.testing import CliRunner

from eagle3_llama import EagleError, cli
from eagle3_llama.info import describe
from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.self_test import self_test, verdict

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=12)


def test_target(target):
    rows = dict(describe(target))
    assert rows["kind"] == "target, architecture llama" and rows["layers"] == "12" and rows["hidden size"] == "64"
    assert rows["vocabulary"] == "320" and "F32" in rows["weights"]


def test_shipped_head():
    rows = dict(describe(shipped_head()))
    assert rows["kind"] == "EAGLE-3 head" and rows["captured layers"].startswith("[2, 15, 27]")
    assert rows["draft vocabulary"] == "8192 of 49152" and "hidden size 576, 49152 tokens" in rows["fits a target of"]


@pytest.mark.parametrize("name, said", [
    ("speculators, qwen3", "q/k norms"), ("SpecForge, EAGLE-3.1", "norm_output, fc_norm"), ("two projections", "two projections"),
    ("speculators, llama", "norm_before_residual, norm_before_fc"), ("yarn rope", "yarn rope"), ("SpecForge, no final norm", "no final norm"), ("EAGLE-1", "fc bias")])
def test_variants(tmp_path, target, name, said):
    rows = dict(describe(converted(tmp_path, name, target, "q8_0")[1]))
    assert said in rows["variant"]
    assert rows["decoder layers"] == str(heads.RECIPES[name].n_blocks)
    assert rows["kind"] == ("EAGLE-1 head" if name == "EAGLE-1" else "EAGLE-3 head")


def test_command(tmp_path, target):
    done = CliRunner().invoke(cli.app, ["info", str(target)])
    assert done.exit_code == 0 and "architecture llama" in done.stdout
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(EagleError, match="no.gguf is not a GGUF"):
        describe(tmp_path / "no.gguf")
    with pytest.raises(EagleError, match="cannot read"):
        describe(tmp_path / "none.gguf")


def test_self_test(tmp_path):
    """On the real model: the right layers are found right, layers off by one are told."""
    from eagle3_llama.convert import convert

    right, wrong = tmp_path / "right.gguf", tmp_path / "wrong.gguf"
    layers = convert(DATA / "reference-head", smollm2("Q4_0"), right, "q8_0").layers
    convert(DATA / "reference-head", smollm2("Q4_0"), wrong, "q8_0", extract_layers=[i - 1 for i in layers])
    for head, fine in ((right, True), (wrong, False)):
        trials = self_test(head, smollm2("Q4_0"), n_threads=THREADS)
        assert len(trials) == 3 and all(len(t.accepted) == 4 for t in trials)
        assert verdict(trials)[0] == fine, trials
    assert "--extract-layers " + ",".join(map(str, layers)) in verdict(trials)[1]
