"""Measures the costs of decoding and drafting on this machine, for the planner. cost_files keeps them."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..common.limits import MAX_ROWS
from .cost_curves import curve, rising
from .measuring_plan import BUDGET, CONTEXTS, FAST_ROW, LARGE, SETTLING, SLOW_ROW, plan_for
from .token_costs import TOKEN_COSTS, Memory, fill_context, token_costs

if TYPE_CHECKING:
    from .session import Session

SMALLEST = 1e-6  # the least seconds of a decode or a pass that are believed: the clock's step
LARGEST = 1e6  # the most


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
    back: float = 0.0  # a checkpoint of a recurrent state, taken and restored; 0 where none is needed

    @property
    def one_row(self) -> float:
        """The cost of a complete decode of one row."""
        return self.layers[1] + self.output[1]

    def decode(self, n: int, n_past: float) -> float:
        """The cost of a complete decode of n rows behind n_past tokens in the KV cache."""
        return self.layers[n] + self.cell[n] * (n_past - self.context) + self.output[n]


class Times:
    """Measured times of the parts of a round, in several rounds of measurements.

    The speed of a machine changes from minute to minute. So each time is taken relative to the time of a
    single row in the same round of measurements.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[tuple[str, int], float]] = []  # seconds by (part, number of rows)
        self._times_of_one = 1  # how often a round measures one row

    def add(
        self,
        engine: Session,
        sizes: Sequence[int],
        slot: int = 0,
        most: float = math.inf,
        one: float | None = None,
        settling: int = 0,
    ) -> None:
        """Measures each size once, with the slot's KV cache as it is, and the parts in the order of a round.

        After `most` seconds it begins no further size, except for the first two. The head is quick and is
        measured after the first size. one: the time of an earlier decode of one row, to reuse if the model is
        slow. settling: decodes and passes of each size that do not count.
        """
        start = time.perf_counter()
        self._times_of_one = max(sizes.count(1), 1)
        took: dict[tuple[str, int], list[float]] = {}
        for i, n in enumerate(sizes):
            if i > 1 and time.perf_counter() - start > most:
                break
            layers = one if one and n == 1 else _decode(engine, n, slot, settling)
            took.setdefault(("layers", n), []).append(layers)
            # each size of the output matrix once: a second time it would already be in the CPU's cache
            for m in {1: (), 2: (1,)}.get(n, (n,)):
                took["output", m] = [engine.measure_output(m)]
            if i == 0:
                took["back", 1] = [engine.measure_back(slot)]
            if engine.drafter and i == 0:
                took["first", 1] = [engine.measure_head(1, slot) for _ in range(settling + 1)][-1:]
                # on a device a draft is one graph: a step of it is less than a pass, which is waited for
                step = engine.measure_step if settling else engine.measure_head
                for m in (m for m in (1, 2, 4, 8) if m in sizes):
                    took["head", m] = [step(m, slot) for _ in range(settling + 1)][-1:]
        self._rounds.append({part: statistics.median(t) for part, t in took.items()})

    def costs(self, context: float) -> Costs:
        """The medians over all rounds. context: tokens in the KV cache while they were measured."""
        one = statistics.median(r["layers", 1] for r in self._rounds)

        def figures(part: str) -> dict[int, float]:
            sizes = sorted({n for r in self._rounds for p, n in r if p == part})
            return {
                n: one
                * statistics.median(r[part, n] / r["layers", 1] for r in self._rounds if (part, n) in r)
                for n in sizes
            }

        out = curve(rising(figures("output") or {1: 0.0}))
        head = rising(figures("head") or {1: 1.0})
        first, back = (figures(part).get(1, 0.0) for part in ("first", "back"))
        layers = figures("layers")
        layers[1] = one - out[1]  # a decode of one row includes its output
        layers = rising(layers, {1: self._times_of_one})
        layers, head = ({n: max(t, SMALLEST) for n, t in part.items()} for part in (layers, head))
        first = max(first - head[1], 0.0)
        return Costs(curve(layers), out, curve(head), curve({1: 0.0}), first, context, back=back)


def _decode(engine: Session, n: int, slot: int, settling: int) -> float:
    """Seconds of a decode of n rows as generation has it: a draft's after another size, one row after one.

    The first decodes after one of another size take longer, by some percent of a fast model's time.
    settling: further decodes before the one that counts, whatever their size.
    """
    took: float = engine.measure_target(n, slot)
    for _ in range(settling or (SETTLING if n == 1 and took < FAST_ROW else 0)):
        took = engine.measure_target(n, slot)
    return took


def measure(
    engine: Session,
    n_ctx: int,
    n_batch: int,
    budget: float = BUDGET,
    slot: int = 0,
    memory: Memory | None = None,
    on_device: bool = False,
) -> Costs:
    """Measures for about `budget` seconds, or fewer sizes if the model is slow. Empties the slot.

    memory: with it, what tokens in the KV cache cost is known for slow models too, and less noisy for others.
    on_device: layers of the model are on a device, whose costs have other steps.
    """
    before = switches()
    elapsed = _stopwatch()
    near_at = min(CONTEXTS[0], n_ctx // 4)
    room = min(n_ctx - near_at, n_batch)
    if memory:
        fill_context(engine, 1, n_batch, slot)
    one = min(engine.measure_target(1, slot) for _ in range(2))
    read = memory.token_seconds(one, 1, slot) if memory else 0.0
    plan = plan_for(one, on_device)
    sizes = plan.sizes(room)
    near_at = fill_context(engine, near_at, n_batch, slot) if plan.fill_until else 0
    cells = {n: read * times for n, times in TOKEN_COSTS.items()}
    warmed = {1}
    far_at = min(CONTEXTS[1], n_ctx - 8)
    if plan.fill_until and far_at > near_at and 8 in sizes:
        # this also reads a model file that is not in memory yet
        most = max(plan.fill_until - elapsed(), plan.fill_least)
        far_at = fill_context(engine, far_at, min(n_batch, plan.fill_batch), slot, most)
        if far_at > near_at:
            cells = token_costs(engine, near_at, far_at, slot, read, n_batch)
            warmed = {1, 8}
    if one <= SLOW_ROW / 2:
        _warm_up(engine, [n for n in dict.fromkeys(sizes) if n not in warmed], plan.warm_up, slot)
    times = Times()
    n_rounds = 0
    while plan.goes_on(n_rounds, elapsed(), budget):
        most = plan.until(n_rounds) - elapsed()
        times.add(engine, sizes, slot, most, plan.known(one), plan.settling)
        n_rounds += 1
    if plan.large_until:
        _add_large(times, engine, min(n_ctx - near_at, n_batch), one, slot, plan.large_until - elapsed())
    engine.rewind(0, slot)
    rate = (switches() - before) / max(elapsed(), SMALLEST)
    return dataclasses.replace(times.costs(near_at), cell=curve(cells), switches=rate)


def _stopwatch() -> Callable[[], float]:
    """Returns the seconds since this call whenever it is called."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def _warm_up(engine: Session, sizes: Sequence[int], most: float, slot: int) -> None:
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
    engine: Session,
    n_ctx: int,
    times: Times,
    rounds: int = 3,
    slot: int = 0,
    n_batch: int = MAX_ROWS,
    large: bool = False,
    memory: Memory | None = None,
    on_device: bool = False,
) -> Costs | None:
    """Measures with the slot's KV cache as an answer left it, or leaves it, and adds the times to `times`.

    The text stays. large: also what long drafts cost. Returns the costs from all times so far, or None if
    there is no room in the KV cache.
    """
    room = min(n_ctx - engine.n_past(slot), n_batch)
    if room < 8:
        return None
    elapsed = _stopwatch()
    one = engine.measure_target(1, slot)
    plan = plan_for(one, on_device)
    for _ in range(min(rounds, plan.most_rounds)):
        most = plan.first_until - elapsed()
        times.add(engine, plan.sizes(room), slot, most, plan.known(one), plan.settling)
    if large and plan.large_until:
        _add_large(times, engine, room, one, slot, plan.large_until - elapsed())
    n_past = engine.n_past(slot)
    found = times.costs(n_past)
    if memory and n_past > 0:
        read = memory.token_seconds(found.one_row, n_past, slot)
        found = dataclasses.replace(found, cell=curve({n: read * t for n, t in TOKEN_COSTS.items()}))
    return found


def _add_large(times: Times, engine: Session, room: int, one: float, slot: int, most: float) -> None:
    """Measures LARGE as far as there is room and time. one: seconds of a decode of one row.

    The first decode of a size takes some milliseconds longer, as its memory is planned and first touched. For
    a fast model that is up to half of its time, and a decode before does not count.
    """
    start = time.perf_counter()
    sizes = [n for n in LARGE if n <= room]
    for n in sizes[1:] if one < FAST_ROW else []:
        engine.measure_target(n, slot)
    times.add(engine, sizes, slot, most - (time.perf_counter() - start))
