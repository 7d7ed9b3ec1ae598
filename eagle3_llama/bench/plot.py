"""Plots of a benchmark: acceptance by position, speed by format, cost curves with the chosen draft sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common import extras
from ..common.files import check_folder, make_folder, replacing
from ..errors import EagleError, ErrorKind


def check(folder: Path | None) -> None:
    """Raises EagleError if draw() could not write to the folder, LIBRARY without matplotlib. None: fine."""
    if folder is not None:
        check_folder(folder)
        _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as e:
        raise EagleError(ErrorKind.LIBRARY, f"plots need matplotlib: {extras.command('plots')}") from e
    return matplotlib


def draw(report: dict[str, Any], folder: str | Path) -> list[Path]:
    """Writes acceptance.png, speed.png and, if costs were measured, costs.png. Returns their paths."""
    _matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    make_folder(folder)
    rows = [r for r in report["results"] if r["category"] == "all" and "failed" not in r]
    out = []
    for name, what in (("acceptance", _acceptance), ("speed", _speed), ("costs", _costs)):
        figure, axes = plt.subplots(figsize=(8, 4.5))
        if what(axes, rows, report):
            axes.legend(fontsize=8)
            figure.tight_layout()
            with replacing(folder / f"{name}.png") as part:
                figure.savefig(part, dpi=120, format="png")
            out.append(folder / f"{name}.png")
        plt.close(figure)
    return out


def _acceptance(axes: Any, rows: list[dict[str, Any]], report: dict[str, Any]) -> bool:
    drawn = [r for r in rows if r["accept_per_position"]]
    for r in drawn:
        y = r["accept_per_position"][:12]
        axes.plot(range(1, len(y) + 1), y, marker="o", label=f"{r['format']} {r['mode']}")
    axes.set(xlabel="position in the draft", ylabel="accepted (share of rounds)", ylim=(0, 1))
    axes.set_title("acceptance by position")
    return bool(drawn)


def _speed(axes: Any, rows: list[dict[str, Any]], report: dict[str, Any]) -> bool:
    formats = list(dict.fromkeys(r["format"] for r in rows))
    modes = list(dict.fromkeys(r["mode"] for r in rows if r["kind"] != "plain"))
    width = 0.8 / max(len(modes), 1)
    for k, mode in enumerate(modes):
        at = {r["format"]: r for r in rows if r["mode"] == mode}
        x = [i + (k - (len(modes) - 1) / 2) * width for i, f in enumerate(formats) if f in at]
        bars = [at[f] for f in formats if f in at]
        axes.bar(x, [r["ratio"] for r in bars], width, label=mode)
        limits = {i: r["limit"] for i, r in zip(x, bars) if r.get("limit")}
        label = "limit" if k == 0 and limits else None
        axes.scatter(list(limits), list(limits.values()), marker="_", s=200, color="black", label=label)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xticks(range(len(formats)), formats)
    axes.set(ylabel="speed relative to plain decoding", title="speed, and the limit with a head at no cost")
    return bool(modes)


def _costs(axes: Any, rows: list[dict[str, Any]], report: dict[str, Any]) -> bool:
    for fmt, curve in report["cost_curve"].items():
        sizes = [int(n) for n in curve]
        (line,) = axes.plot(sizes, [c["decode"] for c in curve.values()], label=fmt)
        axes.plot(sizes, [c["layers"] for c in curve.values()], color=line.get_color(), linestyle=":")
        eagle = (r for r in rows if r["format"] == fmt and r["kind"] == "eagle")
        chosen: dict[str, int] = next((r["rounds_by_drafted"] for r in eagle), {})
        total = sum(chosen.values()) or 1
        for n, c in curve.items():
            share = chosen.get(str(int(n) - 1), 0) / total
            axes.scatter([int(n)], [c["decode"]], s=10 + 300 * share, color=line.get_color())
    axes.set(
        xlabel="rows in one decode",
        ylabel="cost relative to one row",
        title="cost of a decode (dotted: without the output matrix); dot size: how often chosen",
    )
    return bool(report["cost_curve"])
