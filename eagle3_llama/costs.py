"""What decoding and drafting cost on this machine: measured once, kept beside the build, told to the planner."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Sequence

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


def _contexts(n_ctx: int) -> tuple[int, int]:
    """Tokens before the rows that are measured near the start, and far from it."""
    return min(CONTEXTS[0], n_ctx // 4), min(CONTEXTS[1], n_ctx - 8)


def fill_context(engine: Any, n: int, n_batch: int = 32, slot: int = 0) -> None:
    """The slot holds n tokens afterwards; any text costs the same, and every vocabulary has the first ids."""
    engine.rewind(0, slot)
    for at in range(0, n, n_batch):
        engine.prefill([1 + i % 60 for i in range(at, min(at + n_batch, n))], slot)


class Times:
    """Seconds that the parts of a round took, by rows, each time they were measured."""

    def __init__(self) -> None:
        self.layers: dict[int, list[float]] = {}
        self.output: dict[int, list[float]] = {}
        self.head: dict[int, list[float]] = {}

    def add(self, engine: Any, sizes: Sequence[int], slot: int = 0, most: float = math.inf) -> None:
        """Each size once, in the slot as it stands; after `most` seconds none is begun, but for the first two."""
        start = time.perf_counter()
        for i, n in enumerate(sizes):
            if i > 1 and time.perf_counter() - start > most:
                break
            self.layers.setdefault(n, []).append(engine.measure_target(n, slot))
            for m in (m for m in sizes if (n == 8 and m <= 8) or m == n == 12):
                self.output.setdefault(m, []).append(engine.measure_output(m))
        for n in (n for n in (1, 2, 4, 8) if engine.has_head and n in sizes):
            self.head.setdefault(n, []).append(engine.measure_head(n, slot))

    def costs(self, of: Callable[[list[float]], float], cell: list[float], context: float) -> Costs:
        """The curves of one figure for each size: `of` its times. More rows never cost less, or fewer were disturbed."""
        out, head = _curve(_figures(self.output, of) or {1: 0.0}), _curve(_figures(self.head, of) or {1: 1.0})
        layers = {**self.layers, 1: [max(t - out[1], 1e-6) for t in self.layers[1]]}  # one row is decoded whole
        return Costs(_curve(_figures(layers, of)), out, head, cell, 0.5 * head[1], 0.0, context)


def measure(engine: Any, n_ctx: int, n_batch: int, budget: float = 1.0, slot: int = 0) -> Costs:
    """Measures for about `budget` seconds, a slow model once for each size for which there is time; the slot is empty afterwards.
    The least time of each size counts: whatever disturbs only adds."""
    start = time.perf_counter()
    near_at, far_at = _contexts(n_ctx)
    sizes = [n for n in SIZES if n <= min(n_ctx - near_at, n_batch)]
    near, far = Times(), {}
    fill_context(engine, near_at, n_batch, slot)
    slow = min(engine.measure_target(1, slot) for _ in range(2)) > SLOW
    if not slow and far_at > near_at and 8 in sizes:
        fill_context(engine, far_at, n_batch, slot)
        for n in (1, 8, 1, 8, 1, 8, 1, 1):  # two sizes far apart say what a row adds
            far.setdefault(n, []).append(engine.measure_target(n, slot))
        engine.rewind(near_at, slot)
    rounds = 0
    while rounds < 1 or (not slow and (rounds < 2 or (rounds < 9 and time.perf_counter() - start < budget))):
        near.add(engine, sizes, slot, MOST - (time.perf_counter() - start) if slow else math.inf)
        rounds += 1
    engine.rewind(0, slot)
    costs = near.costs(min, [], near_at)
    far[1] = [t - costs.output[1] for t in far.get(1, [])]
    more = {n: max(t - costs.layers[n], 0.0) / (far_at - near_at) for n, t in _figures(far, min).items()} or {1: 0.0}
    return dataclasses.replace(costs, cell=_curve(more))


def measure_in_use(engine: Any, n_ctx: int, times: Times, rounds: int = 3) -> Costs | None:
    """Measures behind an answer, the cache as it left it, and adds to `times`: the median of each size so far; None if the cache is full."""
    sizes = [n for n in SIZES if n <= n_ctx - engine.n_past()]
    if 8 not in sizes:
        return None
    for _ in range(rounds):
        times.add(engine, sizes)
    return times.costs(statistics.median, [0.0] * (MAX_ROWS + 1), engine.n_past())


def _figures(times: dict[int, list[float]], of: Callable[[list[float]], float]) -> dict[int, float]:
    """One time for each size, none above that of more rows."""
    one = {n: of(t) for n, t in times.items() if t}
    return {n: min(t for m, t in one.items() if m >= n) for n in one}


def _curve(points: dict[int, float]) -> list[float]:
    """Costs of 0..MAX_ROWS rows: linear between the points, and beyond them at the slope of the whole."""
    (first, least), (last, most) = min(points.items()), max(points.items())
    slope = max(most - least, 0.0) / max(last - first, 1)
    beyond = [most + slope * (n - last) for n in range(last + 1, MAX_ROWS + 1)]
    return [0.0, *np.interp(range(1, last + 1), sorted(points), [points[n] for n in sorted(points)]).tolist(), *beyond]


def cached(engine: Any, key: Sequence[object], n_ctx: int, n_batch: int) -> Costs:
    """Costs under this key (model, format, backend, threads, library), kept from load to load. The first TIMES loads measure, the
    later ones less, and the least of all counts: what else ran at the time of one would be believed for ever."""
    room = min(n_ctx, max(CONTEXTS) + 8)  # what measure() uses of it
    path = cache_dir() / "costs" / (hashlib.sha256(json.dumps([str(k) for k in (*key, room)]).encode()).hexdigest()[:24] + ".json")
    known, times = _read(path)
    if known is not None and times >= TIMES:
        return known
    if known is None:
        costs, times = measure(engine, n_ctx, n_batch), 0
    else:
        near_at, far_at = _contexts(n_ctx)
        costs = _least_of(known, measure(engine, n_ctx, n_batch, budget=0.25), far_at - near_at)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps({**dataclasses.asdict(costs), "times": times + 1}) + "\n", encoding="utf-8")
    except (EagleError, OSError):
        pass  # measured again next time
    return costs


def _least_of(known: Costs, new: Costs, distance: int) -> Costs:
    """Of each size the shorter time, near the start and so many positions from there."""
    least = {name: [min(a, b) for a, b in zip(getattr(known, name), getattr(new, name))] for name in ("layers", "output", "head")}
    far = [min(c.layers[n] + distance * c.cell[n] for c in (known, new)) for n in range(MAX_ROWS + 1)]
    cell = [max(f - near, 0.0) / max(distance, 1) for f, near in zip(far, least["layers"])]
    return dataclasses.replace(known, cell=cell, first=min(known.first, new.first), **least)


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
