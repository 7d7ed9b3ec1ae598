"""The figures of a benchmark."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime.costs import Costs
from .modes import Mode
from .prompts import Answer, loop_flags
from .target import BenchTarget

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def results(target: BenchTarget, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """One entry per mode and category, and one per mode for the category `all`."""
    out = []
    categories = sorted({a.category for a in answers})  # "all" are also those that have none
    for category in [*(c for c in categories if c != "all" and len(categories) > 1), "all"]:
        chosen = [a for a in answers if category in ("all", a.category)]
        out += [_result(target, chosen, mode, category) for mode in target.working()]
    return out + [_failure(target, mode) for mode in target.modes if mode.name in target.failed]


def _failure(target: BenchTarget, mode: Mode) -> dict[str, Any]:
    """The entry of a mode that could not go on. It has no figures, also not of the prompts before."""
    return {
        "target": target.path,
        "format": target.format,
        "mode": mode.name,
        "kind": mode.kind,
        "category": "all",
        "failed": target.failed[mode.name],
    }


def cost_curve(costs: Costs) -> dict[str, dict[str, float]]:
    """Costs by number of rows: a complete decode, its layers, its output matrix, and a pass of the head.

    They are relative to a complete decode of one row.
    """
    one = costs.one_row
    return {
        str(n): {
            "decode": round((costs.layers[n] + costs.output[n]) / one, 3),
            "layers": round(costs.layers[n] / one, 3),
            "output": round(costs.output[n] / one, 3),
            "head": round(costs.head[n] / one, 3),
        }
        for n in ROWS
    }


def _result(target: BenchTarget, answers: Sequence[Answer], mode: Mode, category: str) -> dict[str, Any]:
    name = mode.name
    tokens = sum(len(a.tokens(name)) for a in answers)
    seconds = sum(a.seconds(name) for a in answers)
    plain = [a.seconds("plain") for a in answers]
    relative = [a.relative(name) for a in answers]
    quartiles = (0.75, 0.25)  # over prompts
    out: dict[str, Any] = {
        "target": target.path,
        "format": target.format,
        "mode": name,
        "kind": mode.kind,
        "category": category,
        "tokens": tokens,
        "tok_per_s": round(tokens / seconds, 2) if seconds else 0.0,
        "ratio": round(sum(plain) / sum(p * r for p, r in zip(plain, relative)), 4) if seconds else 0.0,
        "spread": [round(1 / r, 3) for r in np.quantile(relative, quartiles)] if seconds else None,
        "answers": len(answers),
        "runs": sum(len(a.runs[name]) for a in answers),
        "identical": all(a.tokens(name) == a.tokens("plain") for a in answers),
        "first_divergence_gaps": [a.gaps[name] for a in answers if name in a.gaps],
        "loop_share": _loop_share(answers, name),
    }
    out.update(_acceptance(answers, mode))
    out["sources"] = _sources(answers, name)
    out["time_share"] = _time_share(answers, name)
    out.update(mode.used(target.llm(mode)))
    measured = [a for a in answers if a.costs is not None]
    if measured and mode.drafts and mode.limited:
        out["limit"] = _limit(measured, name)
        out["share_of_limit"] = round(out["ratio"] / out["limit"], 4) if out["limit"] else None
    return out


def _loop_share(answers: Sequence[Answer], mode: str) -> float:
    flags = [f for a in answers for f in loop_flags(a.tokens(mode))]
    return round(sum(flags) / len(flags), 4) if flags else 0.0


def _acceptance(answers: Sequence[Answer], mode: Mode) -> dict[str, Any]:
    if not mode.drafts:
        return {
            "mean_accepted_length": 1.0,
            "accept_per_position": [],
            "mean_accepted_length_outside_loops": 1.0,
            "mean_drafted": 0.0,
            "rounds_by_drafted": {},
        }
    every, outside, drafted = [], [], []
    for a in answers:
        flags = loop_flags(a.tokens(mode.name))
        # the limit on tokens, or the end of the answer, may have cut off the last round
        for start, length, n in a.runs[mode.name][0].rounds[:-1]:
            every.append(length)
            drafted.append(n)
            if not flags[start]:
                outside.append(length)
    mean = lambda xs: round(sum(xs) / len(xs), 4) if xs else 0.0
    positions = [round(sum(n > i for n in every) / len(every), 4) for i in range(1, max(every, default=1))]
    return {
        "mean_accepted_length": mean(every),
        "accept_per_position": positions,
        "mean_accepted_length_outside_loops": mean(outside),
        "mean_drafted": mean(drafted),
        "rounds_by_drafted": {str(n): c for n, c in sorted(collections.Counter(drafted).items())},
    }


def _sources(answers: Sequence[Answer], mode: str) -> dict[str, dict[str, int]]:
    """By source of drafts: its draft tokens, and those that were accepted."""
    out: dict[str, dict[str, int]] = {}
    for source, (accepted, drafted) in ((s, n) for a in answers for s, n in a.runs[mode][0].sources.items()):
        counts = out.setdefault(source, {"drafted": 0, "accepted": 0})
        counts["drafted"] += drafted
        counts["accepted"] += accepted
    return out


def _time_share(answers: Sequence[Answer], mode: str) -> dict[str, float] | None:
    shares = [r.shares for a in answers for r in a.runs[mode] if r.shares]
    total = sum(sum(s.values()) for s in shares)
    return {name: round(sum(s[name] for s in shares) / total, 4) for name in shares[0]} if total else None


def _limit(answers: Sequence[Answer], mode: str) -> float | None:
    """The speed relative to plain decoding that these drafts would give if head and Python took no time.

    This is the cost of decoding the tokens one by one, divided by the cost of the rounds: of their layers,
    and of the rows of the output matrix that verification reached. The costs were measured between the runs.
    """
    plain = seconds = 0.0
    for a, costs in ((a, a.costs) for a in answers if a.costs is not None):
        for _, length, drafted in a.runs[mode][0].rounds[:-1]:
            plain += length * costs.one_row
            rows = min(costs.output[min(length, drafted + 1)], length * costs.output[1])
            seconds += costs.layers[drafted + 1] + rows
    return round(plain / seconds, 4) if seconds else None


def curve_in_use(answers: Sequence[Answer]) -> dict[str, float]:
    """The cost of a complete decode by number of rows, measured between the runs: the median over prompts.

    It is relative to a decode of one row. Empty if no mode drafts.
    """
    curves = [cost_curve(a.costs) for a in answers if a.costs is not None]
    rows = [str(n) for n in ROWS if curves]
    return {n: round(statistics.median(c[n]["decode"] for c in curves), 3) for n in rows}
