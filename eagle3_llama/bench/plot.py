"""A benchmark's report as pictures: acceptance by position, speed by format, cost curves with the sizes chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import EagleError, ErrorKind


def draw(report: dict[str, Any], folder: str | Path) -> list[Path]:
    """Writes acceptance.png, speed.png and, where costs were measured, costs.png; returns their paths."""
    try:
        import matplotlib
    except ImportError as e:
        raise EagleError(ErrorKind.LIBRARY, "plots need matplotlib: pip install 'eagle3-llama[plots]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot make {folder}: {e.strerror or e}") from e
    rows = [r for r in report["results"] if r["category"] == "all"]
    out = []
    for name, what in (("acceptance", _acceptance), ("speed", _speed), ("costs", _costs)):
        figure, axes = plt.subplots(figsize=(8, 4.5))
        if what(axes, rows, report):
            axes.legend(fontsize=8)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=120)
            out.append(folder / f"{name}.png")
        plt.close(figure)
    return out


def _acceptance(axes: Any, rows: list[dict[str, Any]], report: dict[str, Any]) -> bool:
    drawn = [r for r in rows if r["accept_per_position"]]
    for r in drawn:
        y = r["accept_per_position"][:12]
        axes.plot(range(1, len(y) + 1), y, marker="o", label=f"{r['format']} {r['mode']}")
    axes.set(
        xlabel="position in the draft",
        ylabel="accepted (share of rounds)",
        ylim=(0, 1),
        title="acceptance by position",
    )
    return bool(drawn)


def _speed(axes: Any, rows: list[dict[str, Any]], report: dict[str, Any]) -> bool:
    formats, modes = (
        list(dict.fromkeys(r["format"] for r in rows)),
        list(dict.fromkeys(r["mode"] for r in rows if r["kind"] != "plain")),
    )
    width = 0.8 / max(len(modes), 1)
    for k, mode in enumerate(modes):
        at = {r["format"]: r for r in rows if r["mode"] == mode}
        x = [i + (k - (len(modes) - 1) / 2) * width for i, f in enumerate(formats) if f in at]
        bars = [at[f] for f in formats if f in at]
        axes.bar(x, [r["ratio"] for r in bars], width, label=mode)
        limits = [(i, r["limit"]) for i, r in zip(x, bars) if r.get("limit")]
        axes.scatter(
            [i for i, _ in limits],
            [v for _, v in limits],
            marker="_",
            s=200,
            color="black",
            label="limit" if k == 0 and limits else None,
        )
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xticks(range(len(formats)), formats)
    axes.set(ylabel="speed against plain decoding", title="speed, and the limit of a head that costs nothing")
    return bool(modes)


def _costs(axes: Any, rows: list[dict[str, Any]], report: dict[str, Any]) -> bool:
    for fmt, curve in report["cost_curve"].items():
        (line,) = axes.plot([int(n) for n in curve], [c["decode"] for c in curve.values()], label=fmt)
        axes.plot(
            [int(n) for n in curve],
            [c["layers"] for c in curve.values()],
            color=line.get_color(),
            linestyle=":",
        )
        chosen = next(
            (r["rounds_by_drafted"] for r in rows if r["format"] == fmt and r["kind"] == "eagle"), {}
        )
        total = sum(chosen.values()) or 1
        for n, c in curve.items():
            share = chosen.get(str(int(n) - 1), 0) / total
            axes.scatter([int(n)], [c["decode"]], s=10 + 300 * share, color=line.get_color())
    axes.set(
        xlabel="rows decoded together",
        ylabel="cost, in units of one row",
        title="cost of rows (dotted: without the output matrix); dots: how often chosen",
    )
    return bool(report["cost_curve"])
