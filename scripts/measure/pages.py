#!/usr/bin/env python3
"""Writes the tables of speeds in performance.md, platforms.md and README.md, and README's picture.

    scripts/measure/pages.py                     # all pages, from scripts/data/measurements
    scripts/measure/pages.py --check             # exit status 1 if a page differs from the data
    scripts/measure/pages.py --add FILE [--machine NAME] [--conditions TEXT] [--command COMMAND]

--add makes a measurement of FILE, with the commit, the processor and the command, and writes the pages. FILE
is what `eagle3-llama bench --json` or a script of this folder wrote on this machine, or what
scripts/device/run_on_card.py wrote on a card. Only the picture needs
matplotlib, and only if its figures have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import measurements
from measurements import ROOT, Measurement
from tables import BARS, TABLES, against_stock

END = "<!-- end of what scripts/measure/pages.py writes -->"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "eagle3_llama" / "docs" / "performance.md"
PLATFORMS = ROOT / "eagle3_llama" / "docs" / "platforms.md"
PICTURE = ROOT / "eagle3_llama" / "docs" / "speed.svg"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--add", type=Path, metavar="FILE", help="what a measuring command wrote")
    parser.add_argument("--machine", help="its short name in the tables")
    parser.add_argument("--conditions", help="prompts and tokens, in words")
    parser.add_argument("--command", help="what was run, if FILE does not say it")
    given = parser.parse_args()
    try:
        if given.add is not None:
            print(measurements.add(given.add, given.command, given.machine, given.conditions))
        stale = list(different(measurements.read()))
        if given.check:
            print("\n".join(f"{path.relative_to(ROOT)} differs from its data" for path in stale))
            return 1 if stale else 0
        write(measurements.read())
    except (OSError, ValueError) as e:
        parser.error(str(e))
    return 0


def different(all_of: Sequence[Measurement]) -> Iterator[Path]:
    """The pages, and the picture, that are not as these measurements make them."""
    for page in (README, PERFORMANCE, PLATFORMS):
        text = page.read_text(encoding="utf-8")
        if rendered(text, all_of) != text:
            yield page
    if f"data {digest(all_of)}" not in PICTURE.read_text(encoding="utf-8"):
        yield PICTURE


def write(all_of: Sequence[Measurement]) -> None:
    for path in different(all_of):
        if path == PICTURE:
            draw(all_of)
            continue
        text = rendered(path.read_text(encoding="utf-8"), all_of)
        part = path.with_name(f"{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def rendered(page: str, all_of: Sequence[Measurement]) -> str:
    """The page with each table between its comments. Raises ValueError if a comment is missing."""
    found = 0
    for name, make in TABLES.items():
        begin = f"<!-- scripts/measure/pages.py writes this: {name} -->"
        if begin not in page:
            continue
        before, _, rest = page.partition(begin)
        if END not in rest:
            raise ValueError(f"the page has {begin} without {END}: write it where the table ends")
        page, found = f"{before}{begin}\n{make(all_of)}\n{END}{rest.partition(END)[2]}", found + 1
    if not found:
        raise ValueError(f"the page has no comment of these tables: {', '.join(TABLES)}")
    return page


def digest(all_of: Sequence[Measurement]) -> str:
    """Tells whether the picture shows these figures."""
    m, figures = against_stock(all_of)
    shown = json.dumps([m.machine, m.threads, figures], sort_keys=True)
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


def draw(all_of: Sequence[Measurement]) -> None:
    """Writes the picture beside README's table. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the picture needs matplotlib: python3 scripts/_env.py --extra plots") from None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "eagle3-llama"})
    import matplotlib.pyplot as plt

    m, figures = against_stock(all_of)
    figure, axes = plt.subplots(figsize=(7, 3))
    for k, bar in enumerate(BARS):
        at = [i + (k - 1) * 0.27 for i in range(len(figures))]
        drawn = axes.bar(at, [row[bar] for row in figures.values()], 0.25, label=bar)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xticks(range(len(figures)), list(figures))
    axes.set(ylabel="times stock's speed", title=f"{m.machine}, {m.threads} threads")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_ylim(0, 1.25 * max(max(row.values()) for row in figures.values()))
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None, "Description": f"data {digest(all_of)}"})


if __name__ == "__main__":
    sys.exit(main())
