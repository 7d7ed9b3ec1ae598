"""What decoding and drafting cost on this machine: measured once, kept beside the build, told to the planner."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from .convert.files import replacing
from .errors import EagleError
from .models import cache_dir

SIZES = (1, 4, 2, 8, 3, 6, 5, 12)  # rows that are measured, most telling first; between them costs are interpolated
CONTEXTS = (8, 256)  # tokens before the rows
SLOW = 0.08  # seconds of one row from which on there is time for each size once
MOST = 2.5  # seconds after which no further size is begun
MAX_ROWS = 64
TIMES = 4  # loads that measure: one of them may have had the machine to itself


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds; lists hold the cost of n rows at n, entry 0 unused. See struct eagle3_costs."""

    layers: list[float]
    output: list[float]
    head: list[float]
    cell: list[float]
    first: float
    other: float
    context: float


def fill_context(engine: Any, n: int, n_batch: int = 32, slot: int = 0) -> None:
    """The slot holds n tokens afterwards; any text costs the same, and every vocabulary has the first ids."""
    engine.rewind(0, slot)
    for at in range(0, n, n_batch):
        engine.prefill([1 + i % 60 for i in range(at, min(at + n_batch, n))], slot)


def measure(engine: Any, n_ctx: int, n_batch: int, budget: float = 1.0, slot: int = 0, far_too: bool = True) -> Costs:
    """Measures for about `budget` seconds, a slow model once for each size for which there is time; the slot is empty afterwards.
    far_too: also far from the start, what a position more costs."""
    start = time.perf_counter()
    near_at, far_at = min(CONTEXTS[0], n_ctx // 4), min(CONTEXTS[1], n_ctx - 8)
    sizes = [n for n in SIZES if n <= min(n_ctx - near_at, n_batch)]
    layers: dict[int, list[float]] = {}
    output: dict[int, list[float]] = {}
    head: dict[int, list[float]] = {}
    far: dict[int, list[float]] = {}
    fill_context(engine, near_at, n_batch, slot)
    slow = min(engine.measure_target(1, slot) for _ in range(2)) > SLOW
    if far_too and not slow and far_at > near_at and 8 in sizes:
        fill_context(engine, far_at, n_batch, slot)
        for n in (1, 8, 1, 8, 1, 8):  # two sizes far apart say what a row adds
            far.setdefault(n, []).append(engine.measure_target(n, slot))
        engine.rewind(near_at, slot)
    rounds = 0
    while rounds < 1 or (not slow and (rounds < 2 or (rounds < 9 and time.perf_counter() - start < budget))):
        for n in sizes:
            if slow and len(layers) > 1 and time.perf_counter() - start > MOST:
                break
            layers.setdefault(n, []).append(engine.measure_target(n, slot))
            for m in (m for m in sizes if (n == 8 and m <= 8) or m == n == 12):
                output.setdefault(m, []).append(engine.measure_output(m))
        for n in (n for n in (1, 2, 4, 8) if engine.has_head and n in sizes):
            head.setdefault(n, []).append(engine.measure_head(n, slot))
        rounds += 1
    engine.rewind(0, slot)
    out, hd = _curve(_least(output) or {1: 0.0}), _curve(_least(head) or {1: 1.0})
    layers[1], far[1] = ([max(t - out[1], 1e-6) for t in times.get(1, [])] for times in (layers, far))  # one row is decoded whole
    near = _curve(_least(layers))
    more = {n: max(t - near[n], 0.0) / (far_at - near_at) for n, t in _least(far).items()} or {1: 0.0}
    return Costs(near, out, hd, _curve(more), 0.5 * hd[1], 0.0, near_at)


def _least(times: dict[int, list[float]]) -> dict[int, float]:
    """The shortest time of each size: whatever disturbs only adds. More rows never cost less, or fewer were disturbed."""
    least = {n: min(t) for n, t in times.items() if t}
    return {n: min(t for m, t in least.items() if m >= n) for n in least}


def _curve(points: dict[int, float]) -> list[float]:
    """Costs of 0..MAX_ROWS rows: linear between the points, and beyond them at the slope of the whole."""
    (first, least), (last, most) = min(points.items()), max(points.items())
    slope = max(most - least, 0.0) / max(last - first, 1)
    beyond = [most + slope * (n - last) for n in range(last + 1, MAX_ROWS + 1)]
    return [0.0, *np.interp(range(1, last + 1), sorted(points), [points[n] for n in sorted(points)]).tolist(), *beyond]


def cached(engine: Any, key: Sequence[object], n_ctx: int, n_batch: int) -> Costs:
    """Costs under this key (model, format, backend, threads, library), kept from load to load. The first TIMES loads measure, the
    later ones less, and the least of all counts: what else ran at the time of one would be believed for ever."""
    room = min(n_ctx, CONTEXTS[1] + 8)  # what measure() uses of it
    path = cache_dir() / "costs" / (hashlib.sha256(json.dumps([str(k) for k in (*key, room)]).encode()).hexdigest()[:24] + ".json")
    known, times = _read(path)
    if known is not None and times >= TIMES:
        return known
    if known is None:
        costs, times = measure(engine, n_ctx, n_batch), 0
    else:
        costs = _least_of(known, measure(engine, n_ctx, n_batch, budget=0.25, far_too=False))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps({**dataclasses.asdict(costs), "times": times + 1}) + "\n", encoding="utf-8")
    except (EagleError, OSError):
        pass  # measured again next time
    return costs


def _least_of(known: Costs, new: Costs) -> Costs:
    """Of each size the shorter time; what a position more costs, and where, from `known`."""
    least = {name: [min(a, b) for a, b in zip(getattr(known, name), getattr(new, name))] for name in ("layers", "output", "head")}
    return dataclasses.replace(known, **least, first=min(known.first, new.first))


def _read(path: Path) -> tuple[Costs | None, int]:
    """None for a file that is not there or not what cached() writes; and how many loads have measured."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        times = kept.pop("times")
        costs = Costs(**kept)
        rows = [*costs.layers, *costs.output, *costs.head, *costs.cell]
        numbers = [*rows, costs.first, costs.other, costs.context, times]
        fine = len(rows) == 4 * (MAX_ROWS + 1) and all(isinstance(x, (int, float)) and 0 <= x < 1e6 for x in numbers)
        return (costs, int(times)) if fine else (None, 0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, 0
