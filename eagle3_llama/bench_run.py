"""Runs a benchmark with progress and prints its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .bench import MODES, Target, bench_target, capture_cost, cost_curve, read_prompts
from .bench_report import results, table
from .errors import EagleError, ErrorKind
from .params import EagleParams


def spaced(items: Sequence[Any], n: int | None) -> list[Any]:
    """n of the items, evenly spaced; all of them if n is None."""
    if n is None or n >= len(items):
        return list(items)
    return [items[i * len(items) // n] for i in range(n)]


def run_bench(targets: Sequence[str], heads: Sequence[str], prompts: str | Path, category: str | None, modes: Sequence[str],
              n_predict: int, rounds: int, n_max: str, limit: int | None, sampling: dict[str, Any], n_threads: int, n_ctx: int,
              costs: bool) -> dict[str, Any]:
    """The report that bench --json writes. Of several heads each is a mode of its own, `eagle:` and the file's stem."""
    _check(targets, heads, modes, n_max)
    chosen = spaced(read_prompts(prompts, category), limit)
    by_mode = {"eagle": heads[0]} if len(heads) == 1 else {f"eagle:{_name(h, heads)}": h for h in heads}
    modes = [m for mode in modes for m in (by_mode if mode == "eagle" else [mode])]
    report: dict[str, Any] = {"results": [], "cost_curve": {}, "capture_cost": {}, "n_threads": n_threads, "sampling": sampling}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for path in targets:
            task = progress.add_task(Path(path).name, total=len(chosen))
            target = Target(path, by_mode, modes, n_threads, n_ctx, 1 if n_max == "auto" else int(n_max))
            curve = _settings(target, n_max, costs, report)
            answers = bench_target(target, chosen, modes, n_predict, rounds, lambda i: sampling, lambda: progress.advance(task))
            report["results"] += results(target, answers, modes, curve)
            target.close()
    Console(width=200).print(table(report["results"]))
    return report


def _name(head: str, heads: Sequence[str]) -> str:
    """What tells a head's file from the others: its stem, or all of its path."""
    stem = Path(head).stem
    return stem if [Path(h).stem for h in heads].count(stem) == 1 else head


def _check(targets: Sequence[str], heads: Sequence[str], modes: Sequence[str], n_max: str) -> None:
    for path in [*targets, *heads]:
        if not Path(path).is_file():
            raise EagleError(ErrorKind.BAD_FILE, f"no such file: {path}")
    for mode in modes:
        if mode not in MODES:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"unknown mode {mode!r}; known are {', '.join(MODES)}")
    if "eagle" in modes and not heads:
        raise EagleError(ErrorKind.BAD_ARGUMENT, "mode eagle needs --head")
    if n_max != "auto" and not n_max.isdecimal():
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"--n-max is {n_max!r}, expected a number or auto")


def _settings(target: Target, n_max: str, costs: bool, report: dict[str, Any]) -> dict[str, float] | None:
    """Chooses n_max where asked and measures costs; returns the cost curve."""
    from .tune import tune

    drafting = [llm for llm in target.llms.values() if hasattr(llm, "eagle_params")]
    if n_max == "auto":
        for llm in drafting:
            llm.eagle_params = EagleParams(n_max=tune(llm).best)
    if not costs or not drafting:
        return None
    llm = drafting[0]
    report["cost_curve"][target.format] = curve = cost_curve(llm)
    report["capture_cost"][target.format] = round(capture_cost(llm), 4)
    return curve
