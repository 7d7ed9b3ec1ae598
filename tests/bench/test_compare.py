"""scripts/measure/compare.py: each of its comparisons, on tiny models."""

import importlib
import json
import sys

import pytest
import tiny_models
from commands import run
from paths import ROOT

from eagle3_llama.runtime.library import find_lib_dir

MEASURE = ROOT / "scripts" / "measure"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target that answers without an end, and a head."""
    d = tmp_path_factory.mktemp("pair")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    target = tiny_models.target(d / "target.gguf", chat_template=template, ends=False)
    return target, tiny_models.head(d / "head.gguf")


def compare(*words, code=0):
    return run([sys.executable, MEASURE / "compare.py", *words, "-t", "1"], code)


def rows_of(out, *words):
    """The figures, and what was printed."""
    done = compare(*words, "--json", out)
    report = json.loads(out.read_text())
    assert report["n_threads"] == 1 and "compare.py" in report["command"]
    return report["rows"], done.stdout


@pytest.mark.thorough
def test_all_modes_of_ours_decode_plains_text_whatever_n_rs_seq_is(tmp_path):
    given = "tiny-hybrid --prompts 1 -n 24 --n-rs-seq default,0,4 --modes none,eagle,head,text,chain:3"
    rows, said = rows_of(tmp_path / "out.json", *given.split(), "--models", tmp_path)
    assert len(rows) == 3 * 5 and all(row["same"] for row in rows)
    assert all(row["per_round"] > 1.2 for row in rows if row["mode"].startswith("chain:3"))
    assert "| chain:3 n_rs_seq=4 |" in said and "n_rs_seq=0 (default) |" in said
    assert "fastest of ours: " in said


@pytest.mark.thorough
def test_windows_and_loads(tmp_path, pair):
    """Whole and pruned, each loaded twice; a mode of others is among them, and all texts are plain's."""
    given = "--windows whole,pruned --modes plain,text,prompt_lookup --kinds prose --prompts 1 -n 8 --loads 2"
    rows, said = rows_of(tmp_path / "out.json", pair[0], *given.split())
    names = ["plain", "text whole windows", "prompt_lookup", "text pruned windows"] * 2
    assert [row["mode"].partition(" num")[0] for row in rows] == names and all(row["same"] for row in rows)
    assert [row["load"] for row in rows] == [0] * 4 + [1] * 4 and all(r["speed"] == 1 for r in rows[::4])
    assert "| prose | text pruned windows |" in said and "fastest of others: prompt_lookup" in said


@pytest.mark.thorough
def test_two_libraries(tmp_path, pair):
    """A library and itself, in plain decoding and with a head: four processes, one text."""
    given = ["--lib", find_lib_dir(), "--eagle", pair[1], "--prompts", "2", "-n", "8"]
    rows, _ = rows_of(tmp_path / "out.json", pair[0], *given)
    assert [row["side"] for row in rows] == ["base plain", "base eagle", "lib plain", "lib eagle"]
    assert all(row["other texts"] == 0 and row["least"] > 0 for row in rows)
    assert all(row["ratio"] == 1 for row in rows[:2])
    assert "name a folder with libeagle3" in compare(pair[0], "--lib", tmp_path, code=2).stderr


@pytest.mark.thorough
def test_beside_a_busy_program(tmp_path, pair):
    """Cold and warm, with threads that are chosen and that are fixed."""
    given = ["--eagle", pair[1], "--beside", "nothing,spin", "--tokens", "4,8", "--prompts", "1"]
    rows, _ = rows_of(tmp_path / "out.json", pair[0], *given)
    sides = ["eagle", "none", "threads:1"]
    cells = [(b, n, c) for b in ("nothing", "spin") for n in (4, 8) for c in ("cold", "warm")]
    assert [(r["beside"], r["tokens"], r["costs"], r["side"]) for r in rows] == [
        (*cell, side) for cell in cells for side in sides
    ]
    assert all(row["other texts"] == 0 for row in rows)
    assert all(row["of the best fixed threads"] == 1 for row in rows[2::3])


@pytest.mark.thorough
def test_clients_of_a_batcher():
    """The demo's model, whose answers are long enough for rounds that both clients are in."""
    given = ["--prompts", "2", "-n", "32", "--n-ctx", "1024", "--clients", "2"]
    lines = compare("Q8_0", *given).stdout.splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["2"]
    assert all(float(cell) > 0 for cell in lines[2].split("|")[3:7])


@pytest.mark.thorough
def test_ways_to_take_drafts_back_are_counted(tmp_path):
    compare("tiny-hybrid", "--models", tmp_path, "--prompts", "1", "-n", "4", "--modes", "plain")
    [made] = tmp_path.glob("tiny-hybrid-Q8_0*")
    lines = compare(made, "--modes", "checkpoint,snapshots,again", "--most", "2").stdout.splitlines()
    assert lines[0].startswith("state: 0.4") and [line[:10] for line in lines[-2:]] == [
        "| 1 | 1.70",
        "| 2 | 2.19",
    ]


@pytest.mark.thorough
def test_a_slice_that_leaves_something(tmp_path):
    """The exit status is 75, and the file says under which conditions it goes on."""
    file = tmp_path / "speed.jsonl"
    compare("Q8_0", "--file", file, "--minutes", "-1", "--modes", "plain,text", code=75)
    [settings] = map(json.loads, file.read_text().splitlines())
    assert settings["what"] == "settings" and settings["n_threads"] == 1 and settings["split"] == "report"
    assert "geometric mean at least" in compare("--file", file, "--table").stdout


def test_modes_by_name():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MEASURE)
        modes_of = importlib.import_module("comparing.modes").modes_of
    names = ["plain", "none", "chain:3", "eagle", "upstream:ngram-mod", "upstream:draft-eagle3", "stock"]
    modes = modes_of(names, "h.gguf")
    assert [mode.name for mode in modes] == names
    assert [mode.head for mode in modes] == [None, *["h.gguf"] * 3, None, "h.gguf", None]
    assert modes[1].params.n_max == 0 and modes[2].params.n_max == 3 and not modes[2].params.text
    assert len({mode.key for mode in modes[1:4]}) == 1  # they share a load
    for wrong in ("chain", "chain:0", "chain:x"):
        with pytest.raises(ValueError, match="write chain:N"):
            modes_of([wrong], "h.gguf")
    assert "no such file: no.gguf" in compare("no.gguf", code=2).stderr
