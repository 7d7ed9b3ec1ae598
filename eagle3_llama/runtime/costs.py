"""Measures the costs of decoding and drafting on this machine, for the planner. A cache keeps them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import cache_dir, expanded, make_folder, remove_stale, replacing
from ..common.limits import MAX_ROWS
from ..errors import EagleError
from .cost_curves import curve, rising
from .measuring_plan import BUDGET, CONTEXTS, FAST_ROW, LARGE, SETTLING, SIZES, SLOW_ROW, plan_for
from .token_costs import TOKEN_COSTS, Memory, token_costs

SMALLEST, LARGEST = 1e-6, 1e6  # seconds of a decode or a pass that are believed; the clock's step is 1e-6
LOADS = 4  # the first LOADS loads of a model measure, because other programs may disturb one measurement
FAR_OFF = 1.5  # all loads were disturbed if one row takes less by this factor than in any of them
DISTURBED = 1.25  # a load was disturbed if one row took this many times as long as in the fastest load
# A thread that another program displaces counts an involuntary context switch. A program that keeps a core of
# two busy makes some 100 to 300 a second, a quiet machine some 10.
CALM = 50.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs in seconds. A list has the cost of n rows at index n; index 0 is unused. As eagle3_costs in C."""

    layers: list[float]
    output: list[float]
    head: list[float]
    cell: list[float]
    first: float
    context: float
    switches: float = 0.0  # involuntary context switches a second while they were measured

    @property
    def one_row(self) -> float:
        """The cost of a complete decode of one row."""
        return self.layers[1] + self.output[1]

    def decode(self, n: int, n_past: float) -> float:
        """The cost of a complete decode of n rows behind n_past tokens in the KV cache."""
        return self.layers[n] + self.cell[n] * (n_past - self.context) + self.output[n]


def fill_context(engine: Any, n: int, n_batch: int = 32, slot: int = 0, most: float = math.inf) -> int:
    """Fills the slot's KV cache with n tokens, or fewer in `most` seconds. Returns their number."""
    engine.rewind(0, slot)
    start, at = time.perf_counter(), 0  # any tokens do: all cost the same, and every vocabulary has low ids
    while at < n and time.perf_counter() - start < most:
        end = min(at + n_batch, n)
        engine.prefill([1 + i % 60 for i in range(at, end)], slot)
        at = end
    return at


class Times:
    """Measured times of the parts of a round, in several rounds of measurements.

    The speed of a machine changes from minute to minute. So each time is taken relative to the time of a
    single row in the same round of measurements.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[tuple[str, int], float]] = []  # seconds by (part, number of rows)

    def add(
        self,
        engine: Any,
        sizes: Sequence[int],
        slot: int = 0,
        most: float = math.inf,
        one: float | None = None,
    ) -> None:
        """Measures each size once, with the slot's KV cache as it is, and the parts in the order of a round.

        After `most` seconds it begins no further size, except for the first two. The head is quick and is
        measured after the first size. one: the time of an earlier decode of one row, to reuse if the model is
        slow.
        """
        start = time.perf_counter()
        took: dict[tuple[str, int], list[float]] = {}
        for i, n in enumerate(sizes):
            if i > 1 and time.perf_counter() - start > most:
                break
            layers = one if one and n == 1 else _decode(engine, n, slot)
            took.setdefault(("layers", n), []).append(layers)
            # each size of the output matrix once: a second time it would already be in the CPU's cache
            for m in {1: (), 2: (1,)}.get(n, (n,)):
                took["output", m] = [engine.measure_output(m)]
            if engine.has_head and i == 0:
                took["first", 1] = [engine.measure_head(1, slot)]
                took.update({("head", m): [engine.measure_head(m, slot)] for m in (1, 2, 4, 8) if m in sizes})
        self._rounds.append({part: statistics.median(t) for part, t in took.items()})

    def costs(self, context: float) -> Costs:
        """The medians over all rounds. context: tokens in the KV cache while they were measured."""
        one = statistics.median(r["layers", 1] for r in self._rounds)

        def figures(part: str) -> dict[int, float]:
            sizes = sorted({n for r in self._rounds for p, n in r if p == part})
            relative = lambda n: (r[part, n] / r["layers", 1] for r in self._rounds if (part, n) in r)
            return {n: one * statistics.median(relative(n)) for n in sizes}

        out, head = curve(rising(figures("output") or {1: 0.0})), rising(figures("head") or {1: 1.0})
        first, layers = figures("first").get(1, 0.0), figures("layers")
        layers[1] = one - out[1]  # a decode of one row includes its output
        layers = rising(layers, {1: SIZES.count(1)})
        layers, head = ({n: max(t, SMALLEST) for n, t in part.items()} for part in (layers, head))
        first = max(first - head[1], 0.0)
        return Costs(curve(layers), out, curve(head), curve({1: 0.0}), first, context)


def _decode(engine: Any, n: int, slot: int) -> float:
    """Seconds of a decode of n rows as generation has it: a draft's after another size, one row after one.

    The first decodes after one of another size take longer, by some percent of a fast model's time.
    """
    took: float = engine.measure_target(n, slot)
    for _ in range(SETTLING if n == 1 and took < FAST_ROW else 0):
        took = engine.measure_target(n, slot)
    return took


def measure(
    engine: Any, n_ctx: int, n_batch: int, budget: float = BUDGET, slot: int = 0, memory: Memory | None = None
) -> Costs:
    """Measures for about `budget` seconds, or fewer sizes if the model is slow. Empties the slot.

    memory: with it, what tokens in the KV cache cost is known for slow models too, and less noisy for others.
    """
    start = time.perf_counter()
    before = switches()
    elapsed = lambda: time.perf_counter() - start
    near_at = min(CONTEXTS[0], n_ctx // 4)
    sizes = [n for n in SIZES if n <= min(n_ctx - near_at, n_batch)]
    if memory:
        fill_context(engine, 1, n_batch, slot)
    one = min(engine.measure_target(1, slot) for _ in range(2))
    read = memory.token_seconds(one, 1, slot) if memory else 0.0
    plan = plan_for(one)
    near_at = fill_context(engine, near_at, n_batch, slot) if plan.fill_until else 0
    cells = {n: read * times for n, times in TOKEN_COSTS.items()}
    warmed = {1}
    far_at = min(CONTEXTS[1], n_ctx - 8)
    if plan.fill_until and far_at > near_at and 8 in sizes:
        # this also reads a model file that is not in memory yet
        most = max(plan.fill_until - elapsed(), plan.fill_least)
        far_at = fill_context(engine, far_at, min(n_batch, plan.fill_batch), slot, most)
        if far_at > near_at:
            cells = token_costs(engine, near_at, far_at, slot, read)
            warmed = {1, 8}
    if one <= SLOW_ROW / 2:
        _warm_up(engine, [n for n in dict.fromkeys(sizes) if n not in warmed], plan.warm_up, slot)
    times = Times()
    n_rounds = 0
    while plan.goes_on(n_rounds, elapsed(), budget):
        known = one if plan.each_once else None
        times.add(engine, plan.sizes(sizes), slot, plan.until(n_rounds) - elapsed(), known)
        n_rounds += 1
    if plan.large_until:
        _add_large(times, engine, min(n_ctx - near_at, n_batch), one, slot, plan.large_until - elapsed())
    engine.rewind(0, slot)
    rate = (switches() - before) / max(elapsed(), SMALLEST)
    return dataclasses.replace(times.costs(near_at), cell=curve(cells), switches=rate)


def _warm_up(engine: Any, sizes: Sequence[int], most: float, slot: int) -> None:
    """The first decode of each size takes some milliseconds longer. No further one begins after `most`."""
    end = time.perf_counter() + most
    for n in sizes:
        if time.perf_counter() > end:
            break
        engine.measure_target(n, slot)


def switches() -> int:
    """The involuntary context switches of this process so far; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def measure_in_use(
    engine: Any,
    n_ctx: int,
    times: Times,
    rounds: int = 3,
    slot: int = 0,
    n_batch: int = MAX_ROWS,
    large: bool = False,
    memory: Memory | None = None,
) -> Costs | None:
    """Measures with the slot's KV cache as an answer left it, or leaves it, and adds the times to `times`.

    The text stays. large: also what long drafts cost. Returns the costs from all times so far, or None if
    there is no room in the KV cache.
    """
    room = min(n_ctx - engine.n_past(slot), n_batch)
    sizes = [n for n in SIZES if n <= room]
    if 8 not in sizes:
        return None
    start = time.perf_counter()
    elapsed = lambda: time.perf_counter() - start
    one = engine.measure_target(1, slot)
    plan = plan_for(one)
    for _ in range(min(rounds, plan.most_rounds)):
        known = one if plan.each_once else None
        times.add(engine, plan.sizes(sizes), slot, plan.first_until - elapsed(), known)
    if large and plan.large_until:
        _add_large(times, engine, room, one, slot, plan.large_until - elapsed())
    n_past = engine.n_past(slot)
    found = times.costs(n_past)
    if memory and n_past > 0:
        read = memory.token_seconds(found.one_row, n_past, slot)
        found = dataclasses.replace(found, cell=curve({n: read * t for n, t in TOKEN_COSTS.items()}))
    return found


def _add_large(times: Times, engine: Any, room: int, one: float, slot: int, most: float) -> None:
    """Measures LARGE as far as there is room and time. one: seconds of a decode of one row.

    The first decode of a size takes some milliseconds longer, as its memory is planned and first touched. For
    a fast model that is up to half of its time, and a decode before does not count.
    """
    start, sizes = time.perf_counter(), [n for n in LARGE if n <= room]
    for n in sizes[1:] if one < FAST_ROW else []:
        engine.measure_target(n, slot)
    times.add(engine, sizes, slot, most - (time.perf_counter() - start))


def costs_dir() -> Path:
    """The folder with measured costs: EAGLE3_LLAMA_COSTS, or costs/ in the cache folder.

    Raises EagleError as cache_dir(). Without the folder, each load measures.
    """
    named = os.environ.get("EAGLE3_LLAMA_COSTS")
    return expanded(named) if named else cache_dir() / "costs"


def cached(
    engine: Any,
    key: Sequence[object],
    n_ctx: int,
    n_batch: int,
    memory: Callable[[], Memory | None] = lambda: None,
) -> Costs:
    """The costs for this key (model, format, backend, threads, library), from a file in costs_dir().

    memory: reads what measure() takes, from the model's files; called only if this load measures.

    Only the first LOADS loads measure, and as many more while others were disturbed by another program. With
    a single measurement, a disturbance would stay in the costs for ever. If all of them were disturbed, one
    row takes much less than they say, and this load measures too.
    """
    loads = _read(key, n_ctx)
    few = sum(c.switches <= CALM for c in loads) < LOADS and len(loads) < 2 * LOADS
    if few or _were_disturbed(engine, loads):
        return remember(key, n_ctx, measure(engine, n_ctx, n_batch, memory=memory()))
    return merged(loads)


def _were_disturbed(engine: Any, loads: Sequence[Costs]) -> bool:
    """Whether a decode of one row is now far from what any of these loads measured. Of two, unless slow."""
    one = engine.measure_target(1)
    one = one if one > SLOW_ROW else min(one, engine.measure_target(1))
    return bool(one * FAR_OFF < min(c.one_row for c in loads))


def known(key: Sequence[object], n_ctx: int) -> Costs | None:
    """The costs that earlier loads measured, None if none did."""
    loads = _read(key, n_ctx)
    return merged(loads) if loads else None


def remember(key: Sequence[object], n_ctx: int, costs: Costs) -> Costs:
    """Adds a measurement to those of earlier loads, in their file. Returns what all of them say."""
    loads = [*_read(key, n_ctx), costs]
    calm = sum(c.switches <= CALM for c in loads)
    if calm > LOADS or len(loads) > 2 * LOADS:  # the earlier ones were disturbed, see cached()
        least = min(c.one_row for c in _calm(loads))
        loads = [c for c in _calm(loads) if c.one_row <= DISTURBED * least][:LOADS]
    with contextlib.suppress(EagleError):  # the next load measures again
        path = _path(key, n_ctx)
        make_folder(path.parent)
        remove_stale(path.parent)
        with replacing(path) as part:
            part.write_text(json.dumps([dataclasses.asdict(c) for c in loads]) + "\n", encoding="utf-8")
    return merged(loads)


def _path(key: Sequence[object], n_ctx: int) -> Path:
    room = min(n_ctx, max(CONTEXTS) + 8)  # the part of the context that measure() uses
    digest = hashlib.sha256(json.dumps([str(k) for k in (*key, room)]).encode()).hexdigest()
    return costs_dir() / f"{digest[:24]}.json"


def merged(loads: Sequence[Costs]) -> Costs:
    """The median of each cost over the undisturbed loads, computed in units of one row's cost."""
    loads = _calm(loads)
    least = min(c.one_row for c in loads)
    fair = [c for c in loads if c.one_row <= DISTURBED * least]
    each = lambda name: [np.atleast_1d(getattr(c, name)) / c.one_row for c in fair]
    middle = lambda name: np.median(each(name), axis=0) * least
    curves = {name: middle(name).tolist() for name in ("layers", "output", "head", "cell")}
    return Costs(**curves, first=float(middle("first")[0]), context=fair[0].context)


def _calm(loads: Sequence[Costs]) -> Sequence[Costs]:
    """The loads that no other program disturbed much, or all if there are none."""
    return [c for c in loads if c.switches <= CALM] or loads


def _read(key: Sequence[object], n_ctx: int) -> list[Costs]:
    """The measurements of earlier loads. Empty if one of them is not what measure() returns."""
    try:
        loads = [Costs(**c) for c in json.loads(_path(key, n_ctx).read_text(encoding="utf-8"))]
    except (EagleError, OSError, ValueError, TypeError, RecursionError):
        return []
    return loads if all(map(_is_sound, loads)) else []


def _is_sound(c: Costs) -> bool:
    """Whether the planner takes them, and measure() could have returned them: see eagle3_plan_set."""

    def sound(rows: Any, least: float) -> bool:
        sized = isinstance(rows, list) and len(rows) == MAX_ROWS + 1
        return sized and number(rows[0], 0.0) and all(number(x, least) for x in rows[1:])

    def number(x: object, least: float) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool) and least <= x < LARGEST

    positive = sound(c.layers, SMALLEST) and sound(c.head, SMALLEST)
    rest = all(number(x, 0.0) for x in (c.first, c.context, c.switches))
    return positive and sound(c.output, 0.0) and sound(c.cell, 0.0) and rest
