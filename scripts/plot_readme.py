#!/usr/bin/env python3
"""Draw docs/speed.svg of the package from the tables of docs/performance.md. Needs the extra [plots].

python scripts/plot_readme.py
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "eagle3_llama" / "docs"


def table(text: str, first: str) -> dict[str, list[str]]:
    """The rows of the Markdown table whose header begins with `first`, by their first cell."""
    lines = text[text.index(first) :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells[2:]}


def draw(out: Path) -> None:
    """Bars of the planner, and the limit above them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "eagle3"  # the same figures give the same file
    from matplotlib import pyplot

    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    rows = table(text, "| format | planner | best fixed")
    at = range(len(rows))
    figure, axes = pyplot.subplots(figsize=(7.6, 2.8))
    axes.axhline(1.0, color="#888", linewidth=1, label="plain decoding")
    planner = [float(row[0]) for row in rows.values()]
    bars = axes.bar(at, planner, 0.55, color="#3b6ea5", label="eagle3-llama")
    axes.bar_label(bars, [f"{speed:.2f}" for speed in planner], label_type="center", color="white")
    limit = [float(row[3]) for row in rows.values()]
    axes.scatter(at, limit, marker="_", s=700, color="#d08020", label="limit: if the head cost nothing")
    axes.set_xticks(list(at), list(rows))
    axes.set_ylim(0, 1.95)
    axes.set_ylabel("speed, plain decoding = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", ncols=3, frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(DOCS / "speed.svg")
    print(f"wrote {DOCS / 'speed.svg'}")
