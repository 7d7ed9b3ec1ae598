"""Runs a benchmark, shows its progress and prints its tables."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..common.options import N_CTX, FlashAttn, NCtx, NPredict
from ..common.progress import progress
from ..common.settings import option
from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens
from ..runtime import machine
from .modes import Mode
from .prompts import DEFAULT, bench_target, capture_cost, read_prompts
from .report import cost_curve, curve_in_use, results
from .roofline import roofline
from .table import explanation, results_table, terminal_width
from .target import BenchTarget


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark. Every prompt runs in every mode, `rounds` times."""

    targets: tuple[str, ...]
    modes: tuple[Mode, ...]
    prompts: Annotated[
        tuple[str, ...],
        ".jsonl of strings or objects {prompt or messages, category, topic, split}; repeatable;"
        " default: eight prompts that the package has",
        list[Path] | None,
    ] = (str(DEFAULT),)
    category: Annotated[str | None, "run only prompts of this category; the results are by topic"] = None
    split: Annotated[str | None, "run only prompts whose field split is this: tune or report"] = None
    limit: Annotated[int | None, option("run only this many prompts, evenly spaced in the file", min=1)] = (
        None
    )
    n_predict: NPredict = 128
    rounds: Annotated[int, option("repetitions of each answer; the median counts", min=1)] = 1
    sampling: dict[str, Any] = dataclasses.field(default_factory=lambda: {"temp": 0.0})
    n_threads: int = 1
    n_ctx: NCtx = N_CTX
    flash_attn: FlashAttn = None
    explain: Annotated[bool, option("print costs, and what the planner chose", "--explain", metavar="")] = (
        False
    )

    def __post_init__(self) -> None:
        for path in (*self.targets, *self.prompts):
            if not Path(path).is_file():
                raise EagleError(ErrorKind.BAD_FILE, f"no such file: {path}")
        for mode in self.modes:
            mode.check_files(self.targets)
        greedy = sorted({m.kind for m in self.modes if m.greedy_only})
        if self.sampling.get("temp") and greedy:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"these modes decode greedily only: {', '.join(greedy)}; leave --temp out",
            )


def spaced(items: Sequence[Any], n: int | None) -> list[Any]:
    """n of the items, evenly spaced, or all items if n is None."""
    if n is None or n >= len(items):
        return list(items)
    return [items[i * len(items) // n] for i in range(n)]


def run_bench(s: BenchSettings) -> dict[str, Any]:
    """Runs the benchmark, prints its tables, and returns the report that bench --json writes."""
    chosen = spaced(read_prompts(s.prompts, s.category, s.split), s.limit)
    report: dict[str, Any] = {"results": [], "cost_curve": {}, "cost_in_use": {}, "capture_cost": {}}
    report.update(processor=machine.model(), n_prompts=len(chosen), settings=dataclasses.asdict(s))
    report.update(n_threads=s.n_threads, sampling=s.sampling)
    times = TimeElapsedColumn(), TimeRemainingColumn()
    tables: list[list[str]] = []
    for mode in s.modes:
        mode.prepare()
    bar_columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times
    with progress(Console(stderr=True), *bar_columns) as bar:
        for path in s.targets:
            task = bar.add_task(Path(path).name, total=len(chosen))
            target = BenchTarget(path, s.modes, s.n_threads, s.n_ctx, s.flash_attn)
            _measure(target, report)
            target.settle([chat_tokens(target.plain, text) for _, text in spaced(chosen, 6)])
            before = _foreseen(target) if s.explain else {}
            answers = bench_target(
                target, chosen, s.n_predict, s.rounds, s.sampling, functools.partial(bar.advance, task)
            )
            rows = results(target, answers)
            report["results"] += rows
            report["cost_in_use"][target.format] = curve_in_use(answers)
            if s.explain:
                tables += _explain(target, rows, report, s.n_threads, before)
            target.close()
    tables.insert(0, results_table(report["results"], terminal_width()))
    print("\n" + "\n\n".join("\n".join(lines) for lines in tables))
    return report


def _measure(target: BenchTarget, report: dict[str, Any]) -> None:
    """Adds the costs that the planner uses, and the cost of capture, to the report."""
    drafting = target.drafting()
    if drafting:
        llms = [target.llm(mode) for mode in drafting]
        llm = next((m for m in llms if m.engine.drafter), llms[0])
        report["cost_curve"][target.format] = cost_curve(llm.engine.planner.costs)
        report["capture_cost"][target.format] = round(capture_cost(llm), 4)


def _foreseen(target: BenchTarget) -> dict[str, tuple[float, float]]:
    """By the name of each mode with a planner: (seconds that it foresaw, those of plain decoding) so far."""
    planned = [mode for mode in target.drafting() if mode.params.planned]
    infos = {mode.name: target.llm(mode).engine.planner.info() for mode in planned}
    return {name: (info["foreseen"], info["foreseen_plain"]) for name, info in infos.items()}


def _explain(
    target: BenchTarget,
    rows: Sequence[dict[str, Any]],
    report: dict[str, Any],
    n_threads: int,
    before: dict[str, tuple[float, float]],
) -> list[list[str]]:
    out, after = [], _foreseen(target)
    for mode in target.drafting():
        if mode.params.planned:
            row = next(r for r in rows if r["mode"] == mode.name and r["category"] == "all")
            seconds, plain = (now - was for now, was in zip(after[mode.name], before[mode.name]))
            row["predicted"] = round(plain / max(seconds, 1e-9), 4)
            curve, in_use = (report[name][target.format] for name in ("cost_curve", "cost_in_use"))
            out.append(explanation(target.format, curve, in_use, row, row["predicted"], terminal_width()))
    if out:
        out.append(_reading(target, report, n_threads))
    return out


def _reading(target: BenchTarget, report: dict[str, Any], n_threads: int) -> list[str]:
    """How near the decodes come to reading the weights, as lines."""
    costs = target.llm(target.drafting()[0]).engine.planner.costs
    seconds = [costs.layers[n] + costs.output[n] for n in (1, 8)]
    limit = roofline(target.path, n_threads)
    report.setdefault("roofline", {})[target.format] = limit.report(*seconds)
    return textwrap.wrap(f"{target.format}: {limit.line(*seconds)}", terminal_width())
