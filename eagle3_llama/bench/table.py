"""The tables of a benchmark as plain lines that fit the terminal, and a legend of their columns."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .report import ROWS

NARROW = 80  # columns: without a terminal, and in any that is narrower
GAP = "  "
LONGEST_MODE, LONGEST_CATEGORY = 26, 16
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """title: its header. meaning: for the legend. cell: the text of a row, "" for none."""

    title: str
    meaning: str
    cell: Callable[[Row], str]


def _two(name: str) -> Callable[[Row], str]:
    return lambda r: f"{r[name]:.2f}" if r.get(name) else ""


def _drafts(text: Callable[[Row], str]) -> Callable[[Row], str]:
    """Text only for modes that draft."""
    return lambda r: text(r) if r["rounds_by_drafted"] else ""


def _same(r: Row) -> str:
    differ = len(r["first_divergence_gaps"])
    return "yes" if r["identical"] else f"{r['answers'] - differ} of {r['answers']}"


FIGURES = (
    Column(
        "tok/s",
        "tokens a second, from an answer's first token to its last",
        lambda r: f"{r['tok_per_s']:.1f}",
    ),
    Column("ratio", "speed, in units of plain decoding of the same prompts in this run", _two("ratio")),
    Column(
        "limit", "the ratio that these drafts would have if the head and Python took no time", _two("limit")
    ),
    Column(
        "of limit",
        "the ratio as a share of the limit. It may be above 100%: the limit comes from costs measured between"
        " the answers, when the machine may have been slower",
        lambda r: f"{r['share_of_limit']:.0%}" if r.get("share_of_limit") else "",
    ),
    Column("same text", "whether all answers have plain decoding's tokens, or else how many", _same),
    Column(
        "per round",
        "tokens a round: the accepted draft tokens, and one that the target adds by itself. So 1.26 means"
        " that 0.26 draft tokens were accepted; plain decoding has 1",
        _drafts(_two("mean_accepted_length")),
    ),
    Column(
        "outside loops",
        "tokens a round where the answer does not repeat itself: small models do, and repetition is easy to"
        " draft",
        _drafts(_two("mean_accepted_length_outside_loops")),
    ),
    Column(
        "accepted at 1, 2, ...",
        "the share of rounds whose draft token at that position was accepted",
        _drafts(lambda r: " ".join(f"{x:.2f}" for x in r["accept_per_position"][:5])),
    ),
    Column("drafted", "draft tokens a round", _drafts(lambda r: f"{r['mean_drafted']:.2f}")),
    Column(
        "loops",
        "the share of tokens that end a run of eight tokens which the answer had before",
        _drafts(lambda r: f"{r['loop_share']:.0%}"),
    ),
    Column(
        "target/draft/verify/other",
        "where the time went, in percent: the target's layers, the head, the output matrix and the sampler,"
        " the rest",
        lambda r: " ".join(f"{100 * v:.1f}" for v in (r["time_share"] or {}).values()),
    ),
)  # fmt: skip


def terminal_width() -> int:
    return max(shutil.get_terminal_size((NARROW, 24)).columns, NARROW)


def lay_out(titles: Sequence[str], rows: Sequence[Sequence[str]], fixed: int, width: int) -> Iterator[str]:
    """Lines of a table. Columns that have no room go below, behind the first `fixed` ones again.

    Columns without a cell are left out, and below the first part also rows without one.
    """
    sizes = [max(map(len, [title, *(row[i] for row in rows)])) for i, title in enumerate(titles)]
    left = [i for i in range(fixed, len(titles)) if any(row[i] for row in rows)]
    first = True
    while left:
        part, room = [left.pop(0)], width - sum(sizes[i] + len(GAP) for i in range(fixed))
        while left and sum(sizes[i] + len(GAP) for i in part) + sizes[left[0]] <= room:
            part.append(left.pop(0))
        shown = [row for row in rows if first or any(row[i] for i in part)]
        if not first:
            yield ""
        for cells in (titles, *shown):
            texts = [cells[i].ljust(sizes[i]) for i in range(fixed)] + [
                cells[i].rjust(sizes[i]) for i in part
            ]
            yield GAP.join(texts).rstrip()
        first = False


def results_table(results: Sequence[Row], width: int) -> list[str]:
    """A table for each target, then the legend."""
    letters = _letters(results)
    out = ["Speed and drafts by mode; greedy decoding unless --temp was given", ""]
    for path, group in itertools.groupby(results, key=lambda r: r["target"]):
        rows = list(group)
        out += [f"{rows[0]['format']}: {Path(path).name}", *_target_table(rows, letters, width), ""]
    out += _legend([r for r in results if "failed" not in r], letters, width)
    return out


def _target_table(rows: Sequence[Row], letters: dict[str, str], width: int) -> Iterator[str]:
    good = [r for r in rows if "failed" not in r]
    categories = len({r["category"] for r in good}) > 1
    cells = [
        [_mode(r, letters), *[_cut(r["category"])] * categories, *(c.cell(r) for c in FIGURES)] for r in good
    ]
    titles = ["mode", *["category"] * categories, *(c.title for c in FIGURES)]
    yield from lay_out(titles, cells, 1 + categories, width)
    size = max(len(line[0]) for line in cells)
    for r in rows:
        if "failed" in r:
            yield from _hanging(f"{_mode(r, letters).ljust(size)}  ", r["failed"], width)
    for r in good:
        if r["category"] == "all" and r["first_divergence_gaps"]:
            yield from _hanging(f"{_mode(r, letters)}: ", _divergence(r), width)


def _divergence(r: Row) -> str:
    """How far apart the two best tokens were where texts first differ: near ties may fall either way."""
    gaps = sorted(r["first_divergence_gaps"])
    shown = ", ".join(f"{g:.2g}" for g in gaps)
    return (
        f"{len(gaps)} of {r['answers']} answers differ from plain decoding's. Where they first do, the"
        f" logits of the two best tokens are apart by {shown}"
    )


def _mode(r: Row, letters: dict[str, str]) -> str:
    """The mode's name with the setting that it used, a long name of a head replaced by its letter."""
    name: str = r["mode"]
    for head, letter in letters.items():
        name = name.replace(f":{head}", f":{letter}")
    if "num_pred_tokens" in r and ":" not in name:
        return f"{name}:{r['num_pred_tokens']}"
    return f"{name} n_max={r['n_max']}" if "n_max" in r else name


def _letters(results: Sequence[Row]) -> dict[str, str]:
    """Letters for the heads' names, if they are too long for the table; the longest name first."""
    modes = [r["mode"] for r in results]
    if max(map(len, modes), default=0) <= LONGEST_MODE:
        return {}
    heads = {m.partition(":")[2].partition(" n_max=")[0].partition(" tree=")[0] for m in modes if ":" in m}
    named = zip(sorted(h for h in heads if not h.isdecimal()), map(chr, range(ord("A"), ord("Z") + 1)))
    return dict(sorted(named, key=lambda pair: -len(pair[0])))


def _cut(category: str) -> str:
    return category if len(category) <= LONGEST_CATEGORY else category[: LONGEST_CATEGORY - 1] + "…"


def _legend(rows: Sequence[Row], letters: dict[str, str], width: int) -> Iterator[str]:
    shown = [(c.title, c.meaning) for c in FIGURES if any(c.cell(r) for r in rows)]
    names = [(letter, head) for head, letter in sorted(letters.items(), key=lambda pair: pair[1])]
    size = max((len(title) for title, _ in shown + names), default=0)
    for title, meaning in shown + names:
        yield from _hanging(f"{title.ljust(size)}{GAP}", meaning, width)


def _hanging(label: str, text: str, width: int) -> list[str]:
    """A label and its text, whose further lines are indented."""
    indent = " " * (len(label) if len(label) < width // 2 else 4)
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=indent)


def explanation(
    fmt: str,
    curve: dict[str, dict[str, float]],
    in_use: dict[str, float],
    row: Row,
    predicted: float,
    width: int,
) -> list[str]:
    """The planner's choices as lines: costs, how often it chose each size, predicted and measured speed."""
    rounds = row["rounds_by_drafted"]
    total = sum(rounds.values()) or 1
    cells = [
        [
            str(n),
            *(f"{curve[str(n)][k]:.2f}" for k in ("decode", "layers", "output", "head")),
            f"{in_use.get(str(n), 0.0):.2f}",
            f"{rounds.get(str(n - 1), 0) / total:.0%}",
        ]
        for n in ROWS
    ]
    titles = ["rows", "decode", "layers", "output matrix", "head", "in use", "chosen"]
    meaning = (
        "Costs are in units of a decode of one row: of a decode with logits, of its layers and its output"
        " matrix, and of a pass of the head, as the planner has them; in use: of a decode, measured between"
        " the answers. chosen: the share of rounds with so many rows, the target's own token among them."
    )
    speeds = f"predicted {predicted:.2f}, measured {row['ratio']:.2f} times plain decoding"
    return [
        *textwrap.wrap(f"{fmt}, {row['mode']}: {speeds}", width),
        *lay_out(titles, cells, 1, width),
        *textwrap.wrap(meaning, width),
    ]
