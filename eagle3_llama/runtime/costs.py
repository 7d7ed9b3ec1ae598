"""What decoding and drafting cost on this machine: measured once, kept beside the build, told to the planner."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import cache_dir, replacing
from ..errors import EagleError

SIZES = (
    1,
    4,
    2,
    1,
    8,
    3,
    1,
    6,
    5,
    1,
    12,
)  # rows that are measured, most telling first; between them costs are interpolated
CONTEXTS = (8, 256)  # tokens before the rows
PIECE, FILL, LEAST_FILL = (
    32,
    0.45,
    0.1,
)  # tokens at once, and seconds until the second of them is filled: formats differ by four times in this
FAR, FAR_TIMES = (
    0.1,
    3,
)  # seconds after which decodes that tell what a context costs are not repeated; how often at most
SLOW = 0.08  # seconds of one row from which on there is time for each size once
BUDGET = 1.0  # seconds of measuring after which no further round begins
WARM = 0.2  # seconds of decodes that do not count
ENOUGH = 1.25  # seconds after which a second round begins no further size
MOST = 1.35  # the first round does not
MOST_SLOW = 2.5  # of a slow model
MAX_ROWS = 64
LOADS = 4  # that measure: one of them may have had the machine to itself
DISTURBED = 1.25  # of the quickest load's time for one row: above that something else ran


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

    @property
    def one_row(self) -> float:
        """A whole decode of one row."""
        return self.layers[1] + self.output[1]


def fill_context(engine: Any, n: int, n_batch: int = 32, slot: int = 0, most: float = math.inf) -> int:
    """The slot holds n tokens afterwards, or those that `most` seconds sufficed for, and their number is returned. Any text costs
    the same, and every vocabulary has the first ids."""
    engine.rewind(0, slot)
    start, at = time.perf_counter(), 0
    while at < n and time.perf_counter() - start < most:
        end = min(at + n_batch, n)
        engine.prefill([1 + i % 60 for i in range(at, end)], slot)
        at = end
    return at


class Times:
    """Seconds that the parts of a round took. All of a round are seen against the single rows between them: the machine's speed
    changes from minute to minute, for all alike."""

    def __init__(self) -> None:
        self._rounds: list[dict[tuple[str, int], float]] = []  # of each part and number of rows

    def add(
        self,
        engine: Any,
        sizes: Sequence[int],
        slot: int = 0,
        most: float = math.inf,
        one: float | None = None,
    ) -> None:
        """Each size once, in the slot as it stands, each part after what it follows in a round; after `most` seconds no size is
        begun, but for the first two, and the head, which is quick, is measured behind the first. one: what the last decode, of a
        single row, took, where another would take too long."""
        start = time.perf_counter()
        took: dict[tuple[str, int], list[float]] = {}
        for i, n in enumerate(sizes):
            if i > 1 and time.perf_counter() - start > most:
                break
            took.setdefault(("layers", n), []).append(
                one if one and n == 1 else engine.measure_target(n, slot)
            )
            for m in {1: (), 2: (1,)}.get(
                n, (n,)
            ):  # one of each size, or the second finds the matrix in the cache
                took["output", m] = [engine.measure_output(m)]
            if engine.has_head and i == 0:
                took["first", 1] = [engine.measure_head(1, slot)]
                took.update({("head", m): [engine.measure_head(m, slot)] for m in (1, 2, 4, 8) if m in sizes})
        self._rounds.append({part: statistics.median(t) for part, t in took.items()})

    def costs(self, context: float) -> Costs:
        """The medians over rounds. More rows never cost less, or they were less disturbed."""
        one = statistics.median(r["layers", 1] for r in self._rounds)

        def figures(part: str) -> dict[int, float]:
            sizes = sorted({n for r in self._rounds for p, n in r if p == part})
            each = {
                n: one
                * statistics.median(r[part, n] / r["layers", 1] for r in self._rounds if (part, n) in r)
                for n in sizes
            }
            return {n: min(t for m, t in each.items() if m >= n) for n in sizes}

        out, head, first = (
            _curve(figures("output") or {1: 0.0}),
            _curve(figures("head") or {1: 1.0}),
            figures("first").get(1, 0.0),
        )
        layers = figures("layers")
        layers[1] = min(max(one - out[1], 1e-6), *layers.values())  # one row is decoded whole
        return Costs(_curve(layers), out, head, _curve({1: 0.0}), max(first - head[1], 0.0), 0.0, context)


def _cells(engine: Any, near_at: int, far_at: int, slot: int) -> dict[int, float]:
    """Seconds that a token before the rows adds to a decode of one row and of eight, by decodes behind all far_at tokens of the slot
    and, right after, behind the first near_at, which it keeps: the quickest of a few, for what disturbs takes longer."""
    least = []
    for at in (far_at, near_at):
        engine.rewind(at, slot)
        start, took = time.perf_counter(), {1: math.inf, 8: math.inf}
        for _ in range(FAR_TIMES):
            took = {n: min(t, engine.measure_target(n, slot)) for n, t in took.items()}
            if time.perf_counter() - start > FAR:
                break
        least.append(took)
    cells = {n: max(least[0][n] - least[1][n], 0.0) / (far_at - near_at) for n in (1, 8)}
    # one row adds no less than an eighth of what eight do, and no more than they do
    return {1: max(cells[1], cells[8] / 8), 8: max(cells[1], cells[8])}


def measure(engine: Any, n_ctx: int, n_batch: int, budget: float = BUDGET, slot: int = 0) -> Costs:
    """Measures for about `budget` seconds, a slow model once for each size for which there is time; the slot is empty afterwards."""
    start, elapsed = time.perf_counter(), lambda: time.perf_counter() - start
    near_at, far_at = min(CONTEXTS[0], n_ctx // 4), min(CONTEXTS[1], n_ctx - 8)
    sizes = [n for n in SIZES if n <= min(n_ctx - near_at, n_batch)]
    one = min(engine.measure_target(1, slot) for _ in range(2))
    slow, cells, warmed = one > SLOW, {1: 0.0}, {1}
    near_at = 0 if slow else fill_context(engine, near_at, n_batch, slot)
    if not slow and far_at > near_at and 8 in sizes:
        far_at = fill_context(
            engine, far_at, min(n_batch, PIECE), slot, max(FILL - elapsed(), LEAST_FILL)
        )  # a cold file is read until here
        if far_at > near_at:
            cells, warmed = _cells(engine, near_at, far_at, slot), {1, 8}
    end = elapsed() + WARM
    for n in dict.fromkeys(sizes):  # the first of each size takes some milliseconds longer
        if one > SLOW / 2 or elapsed() > end:
            break
        if n not in warmed:
            engine.measure_target(n, slot)
    times = Times()
    rounds = 0
    while rounds < 1 or (not slow and (rounds < 2 or (rounds < 9 and elapsed() < budget))):
        most = MOST_SLOW if slow else ENOUGH if rounds else MOST
        times.add(
            engine,
            list(dict.fromkeys(sizes)) if slow else sizes,
            slot,
            most - elapsed(),
            one if slow else None,
        )
        rounds += 1
    engine.rewind(0, slot)
    return dataclasses.replace(times.costs(near_at), cell=_curve(cells))


def measure_in_use(engine: Any, n_ctx: int, times: Times, rounds: int = 3) -> Costs | None:
    """Measures behind an answer, the cache as it left it, and adds to `times`: the costs by all so far; None if the cache is full."""
    sizes = [n for n in SIZES if n <= n_ctx - engine.n_past()]
    if 8 not in sizes:
        return None
    for _ in range(rounds):
        times.add(engine, sizes)
    return times.costs(engine.n_past())


def _curve(points: dict[int, float]) -> list[float]:
    """Costs of 0..MAX_ROWS rows: linear between the points, and beyond them at the slope of the whole."""
    (first, least), (last, most) = min(points.items()), max(points.items())
    slope = max(most - least, 0.0) / max(last - first, 1)
    beyond = [most + slope * (n - last) for n in range(last + 1, MAX_ROWS + 1)]
    return [
        0.0,
        *np.interp(range(1, last + 1), sorted(points), [points[n] for n in sorted(points)]).tolist(),
        *beyond,
    ]


def costs_dir() -> Path:
    """EAGLE3_LLAMA_COSTS, or costs/ of the cache."""
    return Path(os.environ.get("EAGLE3_LLAMA_COSTS") or cache_dir() / "costs").expanduser()


def cached(engine: Any, key: Sequence[object], n_ctx: int, n_batch: int) -> Costs:
    """Costs under this key (model, format, backend, threads, library), kept from load to load. The first LOADS measure: what else
    ran at the time of one would be believed for ever."""
    room = min(n_ctx, max(CONTEXTS) + 8)  # what measure() uses of it
    path = costs_dir() / (
        hashlib.sha256(json.dumps([str(k) for k in (*key, room)]).encode()).hexdigest()[:24] + ".json"
    )
    loads = _read(path)
    if len(loads) < LOADS:
        loads.append(measure(engine, n_ctx, n_batch))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                part.write_text(json.dumps([dataclasses.asdict(c) for c in loads]) + "\n", encoding="utf-8")
        except (EagleError, OSError):
            pass  # measured again next time
    return merged(loads)


def merged(loads: Sequence[Costs]) -> Costs:
    """Of each cost, in units of one row, the median of the loads that had the machine to themselves: one row took them not much longer
    than it took the quickest."""
    least = min(c.one_row for c in loads)
    fair = [c for c in loads if c.one_row <= DISTURBED * least]
    middle = lambda name: (
        np.median([np.atleast_1d(getattr(c, name)) / c.one_row for c in fair], axis=0) * least
    )
    curves = {name: middle(name).tolist() for name in ("layers", "output", "head", "cell")}
    return Costs(**curves, first=float(middle("first")[0]), other=0.0, context=fair[0].context)


def _read(path: Path) -> list[Costs]:
    """What earlier loads measured; none for a file that is not there or not what cached() writes."""
    try:
        loads = [Costs(**c) for c in json.loads(path.read_text(encoding="utf-8"))]
        for c in loads:
            rows = [*c.layers, *c.output, *c.head, *c.cell]
            numbers = [*rows, c.first, c.other, c.context]
            if (
                len(rows) != 4 * (MAX_ROWS + 1)
                or not all(isinstance(x, (int, float)) and 0 <= x < 1e6 for x in numbers)
                or not c.layers[1]
            ):
                return []
        return loads
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
