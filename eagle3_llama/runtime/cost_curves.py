"""Cost curves from the costs that were measured for some numbers of rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ..common.limits import MAX_ROWS


def rising(points: dict[int, float], times: Mapping[int, int] = MappingProxyType({})) -> dict[int, float]:
    """The nearest costs that do not fall with the number of rows: more rows never cost less.

    Neighbours that seem to fall get their common median. times: how often a point was measured, else once.
    The least of them would be too low wherever further rows cost almost nothing. Source: isotonic regression
    of least absolute errors, by pooling adjacent violators.
    """
    pools: list[tuple[list[int], list[float]]] = []  # numbers of rows, and their costs as often as measured
    for n, seconds in sorted(points.items()):
        pools.append(([n], [seconds] * times.get(n, 1)))
        while len(pools) > 1 and statistics.median(pools[-2][1]) > statistics.median(pools[-1][1]):
            sizes, costs = pools.pop()
            pools[-1][0].extend(sizes)
            pools[-1][1].extend(costs)
    return {n: statistics.median(costs) for sizes, costs in pools for n in sizes}


def curve(points: dict[int, float]) -> list[float]:
    """Costs of 0..MAX_ROWS rows: linear between the points, beyond them with the average slope."""
    first, least = min(points.items())
    last, most = max(points.items())
    slope = max(most - least, 0.0) / max(last - first, 1)
    beyond = [most + slope * (n - last) for n in range(last + 1, MAX_ROWS + 1)]
    between = np.interp(range(1, last + 1), sorted(points), [points[n] for n in sorted(points)])
    return [0.0, *between.tolist(), *beyond]
