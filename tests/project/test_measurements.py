"""Measurements and the pages made of them: they agree, every figure has a commit, and runs are added."""

import argparse
import dataclasses
import json
import re
import sys

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import bench_rows
import measurements
import pages
import tables

ALL = measurements.read()
PERFORMANCE = pages.PERFORMANCE.read_text(encoding="utf-8")
MAIN = [sys.executable, ROOT / "scripts" / "measure" / "pages.py"]


def test_pages_and_picture_are_as_their_data_say():
    assert list(pages.different(ALL)) == []


def test_a_figure_that_was_changed_by_hand_is_found():
    for page in (pages.README, pages.PERFORMANCE):
        text = page.read_text(encoding="utf-8")
        changed = text.replace("| Q4_0 |", "| Q4_9 |", 1)
        assert changed != text and pages.rendered(changed, ALL) == text


def test_data_that_changed_are_found():
    """In every page and in the picture."""
    faster = lambda row: {k: v * 2 if isinstance(v, float) else v for k, v in row.items()}
    changed = [dataclasses.replace(m, data=tuple(map(faster, m.data))) for m in ALL]
    assert list(pages.different(changed)) == [pages.README, pages.PERFORMANCE, pages.PICTURE]


@pytest.mark.parametrize("m", ALL, ids=lambda m: m.file().stem)
def test_a_measurement_says_what_it_is_of(m):
    assert re.fullmatch("[0-9a-f]{7}", m.commit) and re.fullmatch(r"20\d\d-\d\d-\d\d", m.date)
    assert m.cpu and m.instruction_sets and m.threads > 0 and m.command and m.file().exists()
    assert not measurements.too_old(m), "measure it again, or delete it"
    assert f"| {m.commit} | {m.date} | {m.cpu} (" in PERFORMANCE


def test_a_measurement_of_older_kernels_is_too_old():
    assert measurements.too_old(dataclasses.replace(ALL[0], commit="e6fbe38", date="2026-11-26"))


def test_every_table_of_performance_has_commits():
    sections = re.split(r"^## ", PERFORMANCE, flags=re.MULTILINE)[1:]
    tables = [section for section in sections if "\n|" in section]
    assert len(tables) >= 6 and len(PERFORMANCE.splitlines()) <= 150
    for section in tables:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        commit = re.search(r"commit [0-9a-f]{7}\.", section)
        assert commit or "commit" in lines[0] and all(re.search("[0-9a-f]{7}", line) for line in lines[2:])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small repository with a folder for measurements, in place of this one."""
    git = lambda *words: run(["git", "-C", tmp_path, *words])
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "a.cpp").write_text("int a;\n")
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(measurements, "ROOT", tmp_path)
    monkeypatch.setattr(measurements, "FOLDER", tmp_path / "data")
    return tmp_path


def bench(fmt="Q8_0", ratio=1.8, **more):
    """What `eagle3-llama bench --json` writes, as far as it is read."""
    ratios = {"plain": 1.0, "stock": 0.5, "eagle": ratio, "text": 1.5}
    rows = [
        {"format": fmt, "kind": kind, "mode": kind, "category": "all", "ratio": r, "tok_per_s": 100 * r}
        for kind, r in ratios.items()
    ]
    report = {"results": rows, "n_prompts": 12, "n_threads": 4, "settings": {"n_predict": 48}}
    return {**report, "command": "bench", **more}


def added(checkout, report, name="a.json", **given):
    file = checkout / name
    file.write_text(report if isinstance(report, str) else json.dumps(report))
    measurements.add(file, given.get("command"), given.get("machine", "A"), given.get("conditions"))
    return measurements.read()


def test_a_run_of_bench_is_added(checkout):
    [m] = added(checkout, bench())
    git = ["git", "-C", checkout, "rev-parse", "--short=7", "HEAD"]
    assert m.commit == run(git).stdout.strip()
    assert (m.command, m.threads) == ("bench", 4)
    assert (m.name, m.machine, m.conditions) == ("speeds", "A", "12 prompts, 48 tokens") and m.cpu
    figures = {"plain_tokens_per_second": 100.0, "head_and_text": 1.8, "text": 1.5, "over_stock": 3.6}
    assert m.data == ({"format": "Q8_0", **figures},)
    assert "| A | 12 prompts, 48 tokens | plain over stock | 2.00 |" in tables.speeds([m])
    assert "| Q8_0 | 2.0 times | 3.0 times | 3.6 times |" in tables.readme([m])


def test_a_newer_run_takes_the_place_of_the_older_one(checkout):
    added(checkout, bench("BF16"))
    added(checkout, bench("Q8_0", 1.6), "b.json", machine="B")
    found = added(checkout, bench("Q8_0", 1.7), "c.json", machine="B")
    assert sorted((m.machine, m.data[0]["format"], m.data[0]["head_and_text"]) for m in found) == [
        ("A", "BF16", 1.8),
        ("B", "Q8_0", 1.7),
    ]


def test_a_run_of_another_format_stands_beside_the_older_one(checkout):
    """Although they are of the same day, machine and prompts."""
    added(checkout, bench("BF16"))
    found = added(checkout, bench("Q8_0"), "b.json")
    assert sorted(row["format"] for m in found for row in m.data) == ["BF16", "Q8_0"]


def test_changes_that_are_not_committed_are_refused(checkout):
    (checkout / "native" / "a.cpp").write_text("int b;\n")
    with pytest.raises(ValueError, match="commit the changes below eagle3_llama, native, patches first"):
        added(checkout, bench())
    assert not list((checkout / "data").iterdir())


def test_other_commands_figures_are_read(checkout):
    answer = {"what": "answer", "format": "BF16", "id": "1", "tokens": 8, "plain_tokens": 8}
    answer |= {"category": "prose", "plain_seconds": 2.0}
    lines = [
        {"what": "settings", "n_predict": 64, "split": "report", "n_threads": 2},
        *({**answer, "mode": m, "relative": r} for m, r in
          (("eagle", 0.5), ("head", 0.8), ("upstream:ngram-mod", 1.25))),
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    [speeds] = added(checkout, text, "a.jsonl", command="compare.py Q8_0 --file a.jsonl")
    figures = {"head_and_text": 2.0, "head": 1.25, "upstream": 0.8, "upstream_drafter": "ngram-mod"}
    assert speeds.data == ({"format": "BF16", "kind": "prose", **figures},)
    runs = {"Q8_0": {"8": [{"on": 300.0, "off": 200.0, "other": 100.0}]}}
    added(checkout, {"command": "load.py", "prompts": 16, "runs": runs}, machine="B")
    runs["Q8_0"]["8"][0] |= {"first_on": 0.5, "first_other": 2.0}
    command = "load.py bench --kind tools"
    asked = {"command": command, "prompts": 8, "kind": "tools", "runs": runs}
    added(checkout, asked, machine="C")
    alone = {"Q4_0": {"4": [{"on": 240.0, "off": 200.0, "first_on": 0.5}]}}
    found = added(checkout, {"command": "load.py", "prompts": 9, "runs": alone})
    table = tables.server(found)
    assert "| B | 16 prompts, all busy | Q8_0 | 8 | 300 | 200 | 100 | 1.50" in table
    assert "| 1.50 | 3.00 | 2.00 |  |" in table
    assert "| C | 8 prompts, tools, all busy | Q8_0 | 8 | 300 | 200" in table
    assert "| 1.50 | 3.00 | 2.00 | 0.25 |" in table
    assert "| 9 prompts, all busy | Q4_0 | 4 | 240 | 200 |  | 1.20 |" in tables.server(found)


def test_rows_are_read(checkout):
    """What bench_rows.py makes of its times, in milliseconds by library, tokens and rows."""
    times = {("stock", 256, 1): 8.0, ("1", 256, 1): 4.0, ("1", 256, 8): 6.0, ("stock", 256, 8): 20.0}
    given = argparse.Namespace(rows=[1, 8], tokens=[256, 2000], t=2, random=[], shape="1.7B")
    report = bench_rows.report(given, [bench_rows.figures("Q8_0", times, given)])
    [m] = added(checkout, report)
    assert m.data == ({"format": "Q8_0", "rows": {"1": 0.5, "8": 0.75}},)
    assert "| A | 256 tokens in the KV cache | 0.50, ?, 0.75, ? |" in tables.rows([m])


def test_what_is_no_measurement_is_refused(checkout):
    with pytest.raises(ValueError, match="of no command that measures"):
        added(checkout, {"a": 1})
    with pytest.raises(ValueError, match="give it with --command"):
        added(checkout, bench(command=None))
    (checkout / "data" / "b.json").write_text('{"name": "speeds"}')
    with pytest.raises(ValueError, match="is no measurement: it needs"):
        measurements.read()


def test_a_comment_that_is_missing_is_named():
    with pytest.raises(ValueError, match="without <!-- end"):
        pages.rendered("<!-- scripts/measure/pages.py writes this: speeds -->\n", ALL)
    with pytest.raises(ValueError, match="no comment of these tables"):
        pages.rendered("nothing\n", ALL)


def test_the_command_checks():
    done = run([*MAIN, "--check"])
    assert (done.stdout.strip(), done.stderr) == ("", "")


def card_run(*changes):
    """Lines that run_on_card.py writes, as far as they are read."""
    speed = lambda mode, *found, p=0.8: {
        "format": "Q4_0", "p": p, "mode": mode, "same": True, "tokens_per_second": list(found),
        "share": {"target": 0.8, "draft": 0.11},
    }  # fmt: skip
    peer = lambda n, found: {"format": "Q4_0", "p": 0.8, "n_max": n, "tokens_per_second": found, "same": True}
    steps = {
        "machine": [
            {"what": "processor", "name": "Xeon, x86_64", "cores": 16, "sets": ["avx2", "fpu"]},
            {"what": "device", "name": "CUDA0", "description": "NVIDIA H200"},
        ],
        "speeds": [
            speed("plain", 200.0, 200.0), speed("chain 1", 300.0, 300.0), speed("chain 3", 400.0, 420.0),
            speed("tree 12x4x4", 380.0, 380.0), speed("planner", 390.0, 390.0),
            speed("plain", 100.0, 100.0, p=0.6),
        ],
        "upstream": [peer(1, 250.0), peer(3, 320.0)],
    }  # fmt: skip
    first = {"what": "a run on a card", "commit": "1234567", "date": "2026-12-01"}
    first["command"] = "run_on_card.py"
    lines = [first, *({"step": name, "ended": "done", "rows": rows} for name, rows in steps.items())]
    for change in changes:
        change(lines)
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_run_on_a_card_is_added(checkout):
    """With the machine, date and commit that it names itself: it was run elsewhere."""
    [m] = added(checkout, card_run(), "card.jsonl", machine=None)
    assert (m.name, m.machine, m.commit, m.date) == ("card", "NVIDIA H200", "1234567", "2026-12-01")
    assert (m.cpu, m.instruction_sets, m.threads) == ("NVIDIA H200 beside Xeon, x86_64", ("avx2",), 8)
    assert m.model == "random weights with a known text, 8B" and m.command == "run_on_card.py"
    row = "| NVIDIA H200 | Q4_0 | 80% | 200 | 2.05 (3) | 1.90 (12x4x4) | 1.95 | 1.60 (3) | 11% | 1234567 |"
    assert row in tables.cards([m])
    assert tables.cards([]) == "Never run on a card." and tables.cards([]) in pages.PLATFORMS.read_text()


def test_a_run_on_a_card_that_shows_nothing_is_refused(checkout):
    def changed(at, **fields):
        return lambda lines: lines[at].update(fields)

    wrong = {"format": "Q4_0", "p": 0.8, "mode": "plain", "same": False}
    for change, message in (
        (changed(0, what="a rehearsal"), "a rehearsal, which measures nothing"),
        (changed(0, commit="unknown"), "run it with --commit"),
        (changed(1, rows=[]), "the file names no card"),
        (changed(2, rows=[wrong]), "not the expected one in speeds"),
    ):
        with pytest.raises(ValueError, match=message):
            added(checkout, card_run(change), "card.jsonl", machine=None)
    assert not list((checkout / "data").iterdir())
