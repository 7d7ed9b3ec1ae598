"""What a comparison's file says: ratios by format and category, geometric means, worst cells, and bars."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

Record = dict[str, Any]
Cell = tuple[str, str]  # format, category
COPIES = ("editing", "extraction", "quoting")  # categories whose answers copy from the prompt
PROSE = ("prose", "writing", "roleplay")
OURS = ("eagle", "head", "text")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit. titles: of the ratio. categories, formats: None is all. worst: of every cell, not the mean."""

    title: str
    least: float
    worst: bool = False
    categories: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None

    def takes(self, cell: Cell) -> bool:
        of = lambda value, allowed: allowed is None or value in allowed
        return of(cell[0], self.formats) and of(cell[1], self.categories)


WITH_HEAD, ALONE, OTHERS = "eagle / head", "text / plain", "eagle / best other"
BARS = (
    Bar(WITH_HEAD, 1.12),
    Bar(WITH_HEAD, 1.3, categories=COPIES),
    Bar(WITH_HEAD, 0.99, worst=True, categories=PROSE),
    Bar(ALONE, 1.25, categories=COPIES, formats=("BF16",)),
    Bar(ALONE, 1.25, categories=COPIES, formats=("Q8_0",)),
    Bar(ALONE, 0.98, worst=True),
    Bar(OTHERS, 1.1),
    Bar(OTHERS, 0.98, worst=True),
)


def ratios(records: Sequence[Record]) -> dict[Cell, dict[str, float]]:
    """By cell and mode: speed in units of plain decoding, over the prompts that all modes have answered."""
    by: dict[Cell, dict[str, dict[str, Record]]] = {}
    for r in records:
        if r["what"] == "answer" and min(r["tokens"], r["plain_tokens"]) > 1:
            by.setdefault((r["format"], r["category"]), {}).setdefault(r["mode"], {})[r["id"]] = r
    return {cell: _cell(modes) for cell, modes in by.items()}


def _cell(modes: dict[str, dict[str, Record]]) -> dict[str, float]:
    common = set.intersection(*(set(answers) for answers in modes.values()))
    out = {}
    for mode, answers in modes.items() if common else ():
        plain = sum(answers[i]["plain_seconds"] for i in common)
        out[mode] = plain / sum(answers[i]["plain_seconds"] * answers[i]["relative"] for i in common)
    return out


def others(modes: dict[str, float]) -> dict[str, float]:
    """The drafters that are not ours: llama.cpp's, and llama-cpp-python's prompt lookup."""
    return {m: r for m, r in modes.items() if m.startswith(("upstream", "prompt_lookup"))}


def compared(modes: dict[str, float]) -> dict[str, float]:
    """A cell's ratios by the titles of bars, those whose modes were run."""
    out, rest = {}, others(modes)
    if {"eagle", "head"} <= set(modes):
        out[WITH_HEAD] = modes["eagle"] / modes["head"]
    if "text" in modes:
        out[ALONE] = modes["text"]
    if "eagle" in modes and rest:
        out[OTHERS] = modes["eagle"] / max(rest.values())
    return out


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def tables(records: Sequence[Record]) -> Iterator[str]:
    """The lines of the report, as Markdown."""
    cells = ratios(records)
    names = list(dict.fromkeys(m for modes in cells.values() for m in modes))
    yield from _rows(["format", "category", *names], _speeds(cells, names))
    yield ""
    by = {cell: compared(modes) for cell, modes in cells.items()}
    titles = [t for t in (WITH_HEAD, ALONE, OTHERS) if any(t in row for row in by.values())]
    found = {(r["format"], r["category"], r["mode"]): r["found"] for r in records if r["what"] == "found"}
    yield from _rows(["format", "category", *titles, "the best other"], _compared(cells, by, titles, found))
    yield ""
    for bar in BARS:
        yield _said(bar, by)
    yield from _texts(records)
    for r in records:
        if r["what"] == "failed":
            yield f"- {r['format']}: {r['mode']} {r['why']}"


def _rows(titles: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _speeds(cells: dict[Cell, dict[str, float]], names: Sequence[str]) -> Iterator[list[str]]:
    for cell, modes in cells.items():
        yield [*cell, *(f"{modes[m]:.2f}" if m in modes else "" for m in names)]
    yield from _means(cells, names)


def _means(cells: dict[Cell, dict[str, float]], titles: Sequence[str]) -> Iterator[list[str]]:
    """Two rows: the geometric mean of each column, and its worst cell."""
    columns = [{cell: row[t] for cell, row in cells.items() if t in row} for t in titles]
    yield [
        "all",
        "geometric mean",
        *(f"{geometric_mean(list(c.values())):.3f}" if c else "" for c in columns),
    ]
    yield ["all", "worst", *(_worst(c) if c else "" for c in columns)]


def _worst(values: dict[Cell, float]) -> str:
    cell = min(values, key=lambda c: values[c])
    return f"{values[cell]:.3f} ({' '.join(cell)})"


def _compared(
    cells: dict[Cell, dict[str, float]],
    by: dict[Cell, dict[str, float]],
    titles: Sequence[str],
    found: dict[tuple[str, str, str], dict[str, Any]],
) -> Iterator[list[str]]:
    for cell, row in by.items():
        rest = others(cells[cell])
        best = max(rest, key=lambda m: rest[m], default="")
        setting = " ".join(f"{k}={v}" for k, v in found.get((*cell, best), {}).items() if v)
        yield [*cell, *(f"{row[t]:.3f}" if t in row else "" for t in titles), f"{best} {setting}".strip()]
    for line in _means(by, titles):
        yield [*line, ""]


def _said(bar: Bar, by: dict[Cell, dict[str, float]]) -> str:
    values = {cell: row[bar.title] for cell, row in by.items() if bar.title in row and bar.takes(cell)}
    where = ", ".join([*(bar.formats or ("every format",)), *(bar.categories or ("every category",))])
    what = "worst cell" if bar.worst else "geometric mean"
    start = f"- {bar.title}, {where}, {what} at least {bar.least}: "
    if not values:
        return start + "not measured"
    value = min(values.values()) if bar.worst else geometric_mean(list(values.values()))
    told = _worst(values) if bar.worst else f"{value:.3f}"
    return f"{start}{told}, {'reached' if value >= bar.least else '**missed**'}"


def _texts(records: Sequence[Record]) -> Iterator[str]:
    """How many answers of each mode are not plain decoding's. Ours must have none."""
    answers = [r for r in records if r["what"] == "answer"]
    for mode in dict.fromkeys(r["mode"] for r in answers):
        mine = [r for r in answers if r["mode"] == mode]
        gaps = [r["gap"] for r in mine if not r["same"]]
        if gaps:
            strict = "**the text must not differ:** " if mine[0]["kind"] in (*OURS, "plain") else ""
            yield (
                f"- {mode}: {strict}{len(gaps)} of {len(mine)} answers differ from plain decoding's; the two"
                f" best logits were apart by at most {max(gaps):.2g} there"
            )
