"""scripts/device/run_on_card.py, rehearsed with tiny models on the RPC device: each step works, and ends."""

import argparse
import itertools
import json
import os
import sys

import cycle_models
import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "device"))
import card_steps
import card_tools
import run_on_card
from run_on_card import Step

from eagle3_llama import EagleLlama

SCRIPT = ROOT / "scripts" / "device" / "run_on_card.py"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the RPC device is for Linux and macOS")


@pytest.mark.thorough
def test_a_rehearsal_runs_every_step(tmp_path):
    """Its first line, then a line for each step: texts right in every format and mode, also upstream's."""
    out = tmp_path / "out.jsonl"
    done = run([sys.executable, SCRIPT, "--rehearse", "--out", out, "--folder", tmp_path], code=None)
    first, *lines = map(json.loads, out.read_text().splitlines())
    assert done.returncode == 0, [line for line in lines if line["ended"] != "done"]
    assert first["what"] == "a rehearsal" and "--rehearse" in first["command"]
    assert [line["step"] for line in lines] == [step.name for step in run_on_card.STEPS]
    assert {line["ended"] for line in lines if line["step"] != "widths"} == {"done"}
    rows = {line["step"]: line["rows"] for line in lines}
    assert [row["name"] for row in rows["machine"] if row["what"] == "device"] == ["RPC0"]
    texts = [row for row in itertools.chain(*rows.values()) if "same" in row]
    assert len(texts) > 60 and all(row["same"] for row in texts)
    with_slots = {row["format"] for row in rows["texts"] if row.get("slots") == 4}
    assert with_slots == {"F16", "Q8_0", "Q4_0", "Q4_K"}
    assert {row["p"] for row in rows["upstream"]} == {0.6, 0.8}
    assert [row["differ"] for row in rows["ties"] if "mode" in row] == [0] * 10  # this device sums all alike
    assert not list(tmp_path.glob("eagle3-card-*"))  # the models are gone


def given(tmp_path):
    return argparse.Namespace(rehearse=True, tiny=False, commit="1234567", out=tmp_path, folder=tmp_path)


@pytest.mark.thorough
def test_a_step_that_fails_or_takes_too_long_has_its_line_and_the_next_begins(tmp_path):
    steps = [Step("no_such", 60), Step("texts", 0.02), Step("machine", 60)]
    lines = list(run_on_card.run(given(tmp_path), steps, tmp_path, dict(os.environ)))
    assert lines[0]["commit"] == "1234567"
    assert [line["ended"] for line in lines[1:]] == ["failed", "out of time", "done"]
    assert lines[1]["message"] == "KeyError: 'no_such'" and lines[1]["log"]
    assert lines[2]["message"] == "it was ended after 0 s" and lines[2]["seconds"] < 30
    assert lines[3]["rows"]


def test_what_a_step_found_before_its_time_ran_out_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_on_card, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "child.py").write_text("import time\nprint('{\"a\": 1}', flush=True)\ntime.sleep(600)\n")
    line = run_on_card.one(given(tmp_path), Step("rows", 3), 3.0, tmp_path, dict(os.environ))
    assert (line["ended"], line["rows"]) == ("out of time", [{"a": 1}])


def test_nothing_begins_when_the_eight_minutes_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_on_card, "TOTAL", 0.3)
    lines = list(run_on_card.run(given(tmp_path), [Step("machine", 60)], tmp_path, {}))
    assert lines[1]["ended"] == "not run" and "eight minutes" in lines[1]["message"]


def test_limits_fit_into_eight_minutes():
    assert sum(step.seconds for step in run_on_card.STEPS) <= run_on_card.TOTAL == 480
    assert [step.name for step in run_on_card.STEPS] == list(card_steps.STEPS)
    assert run_on_card.STEPS[1].name == "rehearsal" and run_on_card.STEPS[0].seconds + 45 <= 60


def test_another_text_is_a_fault(tmp_path):
    """The text of a model with another cycle stands for that of a device that computes wrongly."""
    shape = cycle_models.SHAPES["tiny"]
    context = card_tools.Context(tmp_path, card_tools.REHEARSAL, lambda **row: rows.append(row))
    rows = []
    head, other = context.head("tiny", 0.8), cycle_models.target(tmp_path / "o.gguf", shape, seed=1)
    text = cycle_models.cycle(shape).text(60)
    with EagleLlama(other, eagle=head, n_ctx=512, n_threads=1, verbose=False) as llm:
        wrong = list(card_steps.texts_of(context, llm, text, ("plain", "chain 3"), format="F16"))
    assert wrong == ["F16 plain, token 0", "F16 chain 3, token 0"]
    assert [row["same"] for row in rows if "mode" in row] == [False, False]
    with pytest.raises(AssertionError, match="is not the cycle: F16 plain, token 0"):
        card_tools.check(wrong)
    assert card_tools.difference([1, 2], [1, 2, 3]) == 2 and card_tools.difference([1], [1]) is None


def test_a_text_that_differs_at_no_near_tie_is_a_fault(tmp_path, monkeypatch):
    """The seventh token of one text is exchanged for an unlikely one."""
    rows, really = [], card_steps.answer

    def wrong(llm, params, prompt, n, sampling):
        found = really(llm, params, prompt, n, sampling)
        exchanged = params.n_max == 3 and prompt[0] == 340
        return found._replace(tokens=[*found.tokens[:6], 299, *found.tokens[7:]]) if exchanged else found

    monkeypatch.setattr(card_steps, "answer", wrong)
    monkeypatch.setattr(card_steps, "ERRORS", {"F16": 1e-2})
    context = card_tools.Context(tmp_path, card_tools.REHEARSAL, lambda **row: rows.append(row))
    with pytest.raises(AssertionError, match="a text differs where no two tokens are near"):
        card_steps.ties(context)
    at = {row["mode"]: row["gaps"] for row in rows if "mode" in row}
    assert len(at["chain 3"]) == 1 and at["chain 3"][0] > 0.1 and at["chain 1"] == []


def test_wrong_options_are_named(tmp_path):
    out = ["--out", tmp_path / "out"]
    assert "unknown steps: no" in run([sys.executable, SCRIPT, *out, "--steps", "no,texts"], code=2).stderr
    archive = ["--libraries", tmp_path / "none.tar.xz"]
    assert "none.tar.xz is missing: scripts/device/build_cuda.py makes it" in (
        run([sys.executable, SCRIPT, *out, *archive], code=2).stderr
    )
