"""Keeps measured costs in files: what earlier loads of a model measured, and what all of them say."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.files import cache_dir, expanded, make_folder, remove_stale, replacing
from ..common.limits import MAX_ROWS
from ..errors import EagleError
from .costs import LARGEST, SMALLEST, Costs, measure
from .measuring_plan import CONTEXTS, SLOW_ROW
from .token_costs import Memory

if TYPE_CHECKING:
    from .session import Session

LOADS = 4  # the first LOADS loads of a model measure, because other programs may disturb one measurement
FAR_OFF = 1.5  # all loads were disturbed if one row takes less by this factor than in any of them
DISTURBED = 1.25  # a load was disturbed if one row took this many times as long as in the fastest load
# A thread that another program displaces counts an involuntary context switch. A program that keeps a core of
# two busy makes some 100 to 300 a second, a quiet machine some 10.
CALM = 50.0


def costs_dir() -> Path:
    """The folder with measured costs: EAGLE3_LLAMA_COSTS, or costs/ in the cache folder.

    Raises EagleError as cache_dir(). Without the folder, each load measures.
    """
    named = os.environ.get("EAGLE3_LLAMA_COSTS")
    return expanded(named) if named else cache_dir() / "costs"


def cached(
    engine: Session,
    key: Sequence[object],
    n_ctx: int,
    n_batch: int,
    memory: Callable[[], Memory | None] = lambda: None,
    on_device: bool = False,
) -> Costs:
    """The costs for this key (model, format, backend, threads, library), from a file in costs_dir().

    memory: reads what measure() takes, from the model's files; called only if this load measures. on_device:
    layers of the model are.

    Only the first LOADS loads measure, and as many more while others were disturbed by another program. With
    a single measurement, a disturbance would stay in the costs for ever. If all of them were disturbed, one
    row takes much less than they say, and this load measures too.
    """
    loads = _read(key, n_ctx)
    few = sum(c.switches <= CALM for c in loads) < LOADS and len(loads) < 2 * LOADS
    if few or _were_disturbed(engine, loads):
        return remember(key, n_ctx, measure(engine, n_ctx, n_batch, memory=memory(), on_device=on_device))
    return merged(loads)


def _were_disturbed(engine: Session, loads: Sequence[Costs]) -> bool:
    """True if a decode of one row is now far from what any of these loads measured. Of two, unless slow."""
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

    def middle(name: str) -> list[float]:
        each = [np.atleast_1d(getattr(c, name)) / c.one_row for c in fair]
        return [float(x) for x in np.median(each, axis=0) * least]

    first, back = middle("first")[0], middle("back")[0]
    layers, output, head, cell = map(middle, ("layers", "output", "head", "cell"))
    return Costs(layers, output, head, cell, first, fair[0].context, back=back)


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
    """True if the planner takes them, and measure() could have returned them: see eagle3_plan_set."""

    def sound(rows: Any, least: float) -> bool:
        sized = isinstance(rows, list) and len(rows) == MAX_ROWS + 1
        return sized and number(rows[0], 0.0) and all(number(x, least) for x in rows[1:])

    def number(x: object, least: float) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool) and least <= x < LARGEST

    positive = sound(c.layers, SMALLEST) and sound(c.head, SMALLEST)
    rest = all(number(x, 0.0) for x in (c.first, c.context, c.switches, c.back))
    return positive and sound(c.output, 0.0) and sound(c.cell, 0.0) and rest
