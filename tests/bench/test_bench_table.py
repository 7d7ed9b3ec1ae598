"""The printed tables of a benchmark."""

import re
import sys

import pytest
from commands import run

from eagle3_llama.bench.prompts import DEFAULT, read_prompts
from eagle3_llama.bench.report import ROWS
from eagle3_llama.bench.table import FIGURES, explanation, lay_out, results_table, terminal_width
from eagle3_llama.cli import demo


def row(mode, kind=None, category="all", fmt="Q8_0", **more):
    drafts = kind not in ("plain", "stock")
    return {
        "target": f"/models/smollm2-135m-instruct-{fmt}.gguf",
        "format": fmt,
        "mode": mode,
        "kind": kind or mode.partition(":")[0].partition(" ")[0],
        "category": category,
        "answers": 12,
        "tok_per_s": 1234.5,
        "ratio": 1.3,
        "identical": True,
        "first_divergence_gaps": [],
        "loop_share": 0.25,
        "mean_accepted_length": 1.87,
        "mean_accepted_length_outside_loops": 1.65,
        "accept_per_position": [0.49, 0.24, 0.13, 0.05, 0.02, 0.01] if drafts else [],
        "mean_drafted": 3.0,
        "rounds_by_drafted": {"3": 40} if drafts else {},
        "time_share": {"target": 0.753, "draft": 0.087, "verify": 0.154, "other": 0.006} if drafts else None,
        **more,
    }


HEADS = ("smollm2-135m-instruct-eagle3-Q8_0", "another-head-with-a-long-name")
LONG = [
    row(mode, kind, category, limit=1.5, share_of_limit=1.043)
    for category in ("summarization", "a category that nobody would name like this", "all")
    for mode, kind in [
        ("plain", "plain"),
        ("stock", "stock"),
        ("stock_prompt_lookup", "stock_prompt_lookup"),
        *((f"eagle:{head}{more}", "eagle") for head in HEADS for more in ("", " n_max=3", " tree=60x6x10")),
    ]
] + [row("upstream:" + HEADS[0], "upstream", failed="crashed: SIGILL")]


@pytest.mark.parametrize("width", [80, 100, 160, 240])
def test_no_line_is_wider_than_the_terminal(width):
    """Whatever the names: and each figure is in the table once for each row that has it."""
    lines = results_table(LONG, width)
    assert max(map(len, lines)) <= width
    headers = [line for line in lines if line.startswith("mode ")]
    assert (len(headers) == 1) == (width == 240) and all("category" in h for h in headers)
    for column in FIGURES:
        assert sum(f"  {column.title}  " in f"{h}  " for h in headers) == 1, column.title
        assert any(line.startswith(column.title + "  ") for line in lines), column.title
    assert sum("75.3 8.7 15.4 0.6" in line for line in lines) == sum(1 for r in LONG if r["time_share"]) - 1


def test_long_names_of_heads_have_letters_that_the_legend_explains():
    lines = results_table(LONG, 80)
    table = "\n".join(lines)
    assert "eagle:B tree=60x6x10 " in table and "eagle:A tree=60x6x10 " in table
    assert [line.split() for line in lines if re.match("[AB] ", line)] == [["A", HEADS[1]], ["B", HEADS[0]]]
    short = results_table([row("plain", "plain"), row("eagle:one"), row("eagle:two")], 80)
    assert any(line.startswith("eagle:one ") for line in short)


def test_what_crashed_and_what_differs_is_said():
    rows = [
        row("plain", "plain"),
        row("stock", "stock", identical=False, first_divergence_gaps=[0.0321, 0.004]),
        row("stock_prompt_lookup", num_pred_tokens=5),
        row("upstream", n_max=2),
        row("draft_model", failed="crashed: SIGSEGV"),
    ]
    lines = results_table(rows, 80)
    said = " ".join(" ".join(lines).split())
    assert "stock: 2 of 12 answers differ" in said and "apart by 0.004, 0.032" in said
    assert any(line.startswith("draft_model ") and line.endswith("crashed: SIGSEGV") for line in lines)
    starts = [line.split("  ")[0] for line in lines]
    assert "stock_prompt_lookup:5" in starts and "upstream n_max=2" in starts
    assert next(line for line in lines if line.startswith("stock ")).endswith("10 of 12")
    assert "category" not in said.partition("tok/s ")[0]


def test_a_legend_explains_only_what_is_there():
    said = " ".join(results_table([row("plain", "plain")], 80))
    assert "tokens a second" in said and "per round" not in said and "100%" not in said


def test_columns_without_room_go_below_behind_the_names():
    titles, rows = ["mode", "x", "y", "empty"], [["plain", "1", "", ""], ["eagle", "22", "333", ""]]
    assert list(lay_out(titles, rows, 1, 10)) == [
        "mode    x",
        "plain   1",
        "eagle  22",
        "",
        "mode     y",
        "eagle  333",
    ]
    assert list(lay_out(titles, rows, 1, 40))[1:] == ["plain   1", "eagle  22  333"]


def test_the_width_is_80_without_a_terminal_and_in_a_narrower_one(monkeypatch):
    for columns, width in (("40", 80), ("133", 133)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal_width() == width
    code = "from eagle3_llama.bench.table import terminal_width; print(terminal_width())"
    monkeypatch.delenv("COLUMNS")
    assert run([sys.executable, "-c", code]).stdout == "80\n"


def test_the_planners_choices_fit():
    curve = {str(n): dict.fromkeys(("decode", "layers", "output", "head"), 12.34) for n in ROWS}
    lines = explanation("Q4_K_M", curve, {}, row("eagle:" + 3 * "name-of-a-head-"), 1.4, 80)
    assert max(map(len, lines)) <= 80 and "predicted 1.40, measured 1.30" in " ".join(lines)
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == [str(n) for n in ROWS]
    assert next(line for line in lines if line.startswith("4 ")).endswith("100%")


def test_the_demos_table_fits():
    """Its header is whole, and no figure is on another line."""
    result = {
        **{name: 234.5 for name in ("plain_tok_per_s", "eagle_tok_per_s")},
        **{name: 1.5 for name in ("ratio", "mean_drafted", "mean_accepted_length")},
        "accept_per_position": [0.5] * 8,
        "format": "Q4_K_M",
        "drafts": "head",
        "identical": True,
    }
    lines = demo.table([result, result | {"drafts": "text", "identical": False}], 80)
    assert max(map(len, lines)) <= 80 and lines[0].endswith("same text")
    assert [line.split()[1] + line.split()[-1] for line in lines[1:3]] == ["headyes", "textNO"]
    assert lines[3] == ""


def test_the_prompts_of_the_package():
    prompts = read_prompts(DEFAULT)
    assert len(prompts) == 8 and len({category for category, _ in prompts}) == 4
