"""What `info` says of targets and heads."""

import heads
import pytest
import tiny_models
from test_variants import converted
from typer.testing import CliRunner

from eagle3_llama import EagleError
from eagle3_llama.cli import main as cli
from eagle3_llama.heads.info import describe
from eagle3_llama.models import shipped_head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=12)


def test_target(target):
    rows = dict(describe(target))
    assert (
        rows["kind"] == "target, architecture llama"
        and rows["layers"] == "12"
        and rows["hidden size"] == "64"
    )
    assert rows["vocabulary"] == "320" and "F32" in rows["weights"]


def test_shipped_head():
    rows = dict(describe(shipped_head()))
    assert rows["kind"] == "EAGLE-3 head" and rows["captured layers"].startswith("[2, 15, 27]")
    assert (
        rows["draft vocabulary"] == "8192 of 49152"
        and "hidden size 576, 49152 tokens" in rows["fits a target of"]
    )


@pytest.mark.parametrize(
    "name, said",
    [
        ("speculators, qwen3", "q/k norms"),
        ("SpecForge, EAGLE-3.1", "norm_output, fc_norm"),
        ("two projections", "two projections"),
        ("speculators, llama", "norm_before_residual, norm_before_fc"),
        ("yarn rope", "yarn rope"),
        ("SpecForge, no final norm", "no final norm"),
        ("EAGLE-1", "fc bias"),
    ],
)
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
