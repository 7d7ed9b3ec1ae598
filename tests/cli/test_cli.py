"""The command line: with --all on the real model, too."""

import json
import sys

import hybrid_models
import pytest
import tiny_models
from commands import run
from paths import ROOT
from tiers import each
from typer.testing import CliRunner

from eagle3_llama.bench import child
from eagle3_llama.bench.modes import default_modes
from eagle3_llama.bench.prompts import loop_flags, read_prompts
from eagle3_llama.cli.main import app
from eagle3_llama.errors import EagleError
from eagle3_llama.models import shipped_head, smollm2


def cli(*args, module="eagle3_llama.cli"):
    return run([sys.executable, "-m", module, *args], None, cwd=ROOT)


@pytest.fixture(scope="module", params=each(["tiny", "demo"], ["tiny"]))
def pair(request, tmp_path_factory):
    """A target in Q4_0 and a head: tiny ones, of which the head knows what comes, or the demo's."""
    if request.param == "demo":
        return smollm2("Q4_0"), shipped_head()
    at = tmp_path_factory.mktemp("pair")
    model = hybrid_models.MODELS["tiny-experts"]
    target = hybrid_models.target(at / "tiny-Q4_0.gguf", model, 0.1, "Q4_0")
    return target, hybrid_models.head(at / "head.gguf", model)


def test_generate_is_the_same_with_a_head(pair):
    common = ["generate", "--model", pair[0], "--prompt", "Name three rivers.", "-n", 24, "--seed", 3]
    plain, eagle = cli(*common), cli(*common, "--eagle", pair[1], "--n-max", 3)
    assert plain.returncode == eagle.returncode == 0, eagle.stderr
    assert plain.stdout == eagle.stdout and len(plain.stdout) > 20
    assert "tokens per round" in eagle.stderr


WRONG = [
    (["generate", "--model", "README.md", "--prompt", "x"], "README.md"),
    (["generate", "--model", "none.gguf", "--prompt", "x"], "none.gguf"),
    (["bench", "--target", "none.gguf", "--prompts", "none.jsonl", "--modes", "plain"], "none.gguf"),
]


@pytest.mark.parametrize("args, said", each(WRONG, WRONG[:1]))
def test_errors_are_one_line(args, said):
    done = cli(*args)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_the_demo_is_a_command(tmp_path):
    done = cli("demo", "--format", "none", "--json", tmp_path / "figures.json")
    assert done.returncode == 2 and "NONE" in done.stderr and not list(tmp_path.iterdir())


def test_head_of_another_target(tmp_path):
    done = cli("generate", "--model", smollm2("Q4_0"), "--eagle", smollm2("Q4_0"), "--prompt", "x")
    assert done.returncode == 2 and "is the target itself" in done.stderr


def test_bench_json(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"Name a colour."\n{"prompt": "Count to ten.", "category": "numbers"}\n')
    out = tmp_path / "out.json"
    done = cli(
        "bench",
        "--target",
        pair[0],
        "--head",
        pair[1],
        "--prompts",
        prompts,
        "--n-predict",
        8,
        "--modes",
        "plain,eagle,prompt_lookup",
        "--fixed",
        "2,8x3x3",
        "--rounds",
        2,
        "--explain",
        "--plot",
        tmp_path / "plots",
        "--json",
        out,
    )
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout and "measured" in done.stdout
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"acceptance.png", "speed.png", "costs.png"}
    report = json.loads(out.read_text())
    assert {(r["mode"], r["category"]) for r in report["results"]} == {
        (m, c)
        for m in ("plain", "eagle", "eagle n_max=2", "eagle tree=8x3x3", "prompt_lookup")
        for c in ("all", "numbers")
    }
    [fmt] = {r["format"] for r in report["results"]}
    assert fmt == "Q4_0" or pair[0] != smollm2("Q4_0")
    limit = report["roofline"][fmt]
    assert limit["bytes"] > 0 and limit["bytes_per_second"] > 0 and limit["share_of_one_row"] > 0
    curve = report["cost_curve"][fmt]
    assert (
        curve["1"]["decode"] == 1.0
        and curve["16"]["layers"] >= curve["1"]["layers"] > 0
        and curve["1"]["head"] > 0
    )
    assert report["cost_in_use"][fmt]["1"] == 1.0 <= report["cost_in_use"][fmt]["16"]
    for r in report["results"]:
        assert r["identical"] and r["tok_per_s"] > 0 and not r["first_divergence_gaps"]
        if r["kind"] == "eagle":
            assert abs(sum(r["time_share"].values()) - 1) < 0.01 and r["mean_accepted_length"] >= 1
            assert r["limit"] > 0 and r["share_of_limit"] == pytest.approx(r["ratio"] / r["limit"], rel=1e-3)
        if r["mode"] == "plain":
            assert r["ratio"] == 1.0


def test_bench_of_a_long_prompt(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps("word " * 300) + "\n")
    done = cli(
        "bench",
        "--target",
        smollm2("Q4_0"),
        "--prompts",
        prompts,
        "--n-predict",
        16,
        "--n-ctx",
        256,
        "--modes",
        "plain",
    )
    assert (
        done.returncode == 2
        and "--n-ctx leaves room for 240" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "a checkout"])
def test_bench_without_a_head(installed, tmp_path, monkeypatch):
    if installed:
        monkeypatch.setattr(child, "__file__", str(tmp_path / "eagle3_llama" / "bench" / "child.py"))
    modes = ["plain", "text"] if installed else ["plain", "text", "stock"]
    assert default_modes([]) == modes and default_modes(["head.gguf"]) == ["plain", "eagle"]
    if not installed:  # stock is compiled once, in minutes
        return
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('"Name a colour."\n')
    target = tiny_models.target(tmp_path / "target.gguf", ends=False)
    common = ["--prompts", prompts, "-n", 4, "-c", 256, "-t", 1, "--json", out]
    done = CliRunner().invoke(app, ["bench", "-m", *map(str, [target, *common])])
    assert done.exit_code == 0, done.output
    assert {r["mode"] for r in json.loads(out.read_text())["results"]} == {"plain", "text"}


def test_bench_of_two_heads(pair, tmp_path):
    """Each a mode of its own, on the prompts of one category, by topic."""
    prompts, other, out = tmp_path / "prompts.jsonl", tmp_path / "other.gguf", tmp_path / "out.json"
    prompts.write_text(
        '"Name a colour."\n{"prompt": "Count to ten.", "category": "numbers", "topic": "counting"}\n'
    )
    other.write_bytes(pair[1].read_bytes())
    done = cli(
        "bench",
        "--target",
        pair[0],
        "--head",
        pair[1],
        "--head",
        other,
        "--prompts",
        prompts,
        "--n-predict",
        8,
        "--category",
        "numbers",
        "--n-max",
        2,
        "--json",
        out,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    assert [r["mode"] for r in results] == ["plain", f"eagle:{pair[1].stem}", "eagle:other"]
    assert (
        results[1]["accept_per_position"] == results[2]["accept_per_position"]
        and 0 < results[1]["mean_drafted"] <= 2
    )
    assert read_prompts(prompts, "numbers") == [("counting", "Count to ten.")]
    with pytest.raises(EagleError, match="category 'poems'"):
        read_prompts(prompts, "poems")


@pytest.mark.parametrize("rounds", each([1, None], [1]), ids=["short", "whole"])
def test_demo_json(tmp_path, rounds):
    """short: each answer is timed once."""
    out = tmp_path / "out.json"
    words = ["--format", "Q4_0", "--n-predict", "12", "--json", out]
    if rounds:
        less = f"demo.ROUNDS = dict.fromkeys(demo.ROUNDS, {rounds})"
        code = f"import typer; from eagle3_llama.cli import demo; {less}; typer.run(demo.main)"
        done = run([sys.executable, "-c", code, *words], None)
    else:
        done = cli(*words, module="eagle3_llama.cli.demo")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["identical"] is True and [r["drafts"] for r in report["results"]] == ["head", "text"]


def test_prompt_files(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('"fine"\n{"text": 1}\n')
    with pytest.raises(EagleError, match="line 2"):
        read_prompts(bad)


def test_several_prompt_files_with_conversations_and_halves(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('"a"\n{"prompt": "b", "category": "x", "split": "tune"}\n')
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]
    two.write_text(json.dumps({"messages": turns, "category": "y", "split": "report"}) + "\n")
    assert read_prompts([one, two]) == [("all", "a"), ("x", "b"), ("y", turns)]
    assert read_prompts([one, two], split="report") == [("y", turns)]
    with pytest.raises(EagleError, match=r"one\.jsonl, .*two\.jsonl has no prompts of split 'other'"):
        read_prompts([one, two], split="other")
    two.write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "d"}]}) + "\n")
    with pytest.raises(EagleError, match="line 1.*ends with the turn that is to be answered"):
        read_prompts(two)


def test_loops_are_seen():
    assert loop_flags([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [False] * 9
    assert loop_flags([1, 2] * 6) == [False] * 9 + [True] * 3
