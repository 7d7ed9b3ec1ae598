"""The cost of a token in the KV cache: measured, and told by the bytes that it has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..errors import EagleError, ErrorKind

if TYPE_CHECKING:
    from .session import Session

# What a token in the KV cache adds to a decode of one row and of eight: so many times what reading it takes.
# Attention is arithmetic, too. Measured with SmolLM2: 1.3 and 5.
TOKEN_COSTS = {1: 1.5, 8: 5.0}
NOISE = 0.05  # share of a decode by which the least times of two sets of decodes differ by
FAR_TIMES = 3  # how often a decode for the cost of context is repeated
FAR = 0.1  # seconds after which it is not repeated any more


class Memory(NamedTuple):
    """The bytes that a loaded model reads."""

    row_bytes: float  # read from the weights for a row
    slot_bytes: Callable[[int], int]  # read from the KV cache for a slot

    def token_seconds(self, one: float, n_past: int, slot: int) -> float:
        """Seconds that reading a token in the KV cache takes. one: those of a decode of one row.

        n_past: tokens that the slot has, at least 1.
        """
        return one * self.slot_bytes(slot) / n_past / self.row_bytes


def fill_context(engine: Session, n: int, n_batch: int = 32, slot: int = 0, most: float = math.inf) -> int:
    """Fills the slot's KV cache with n tokens, or fewer in `most` seconds. Returns their number."""
    engine.rewind(0, slot)
    start = time.perf_counter()
    at = 0
    while at < n and time.perf_counter() - start < most:
        end = min(at + n_batch, n)
        # any tokens do: all cost the same, and every vocabulary has low ids
        engine.prefill([1 + i % 60 for i in range(at, end)], slot)
        at = end
    return at


def token_costs(
    engine: Session, near_at: int, far_at: int, slot: int, read: float, n_batch: int
) -> dict[int, float]:
    """Seconds that each token in the KV cache adds to a decode of one row and of eight rows.

    It decodes after the slot's far_at tokens and then after its first near_at, which stay in the KV cache. Of
    a few decodes the fastest counts, because disturbances only make them slower. read: seconds that reading a
    token takes, 0 if they are not known. A large model's decodes differ by more than the tokens cost.
    """
    least = []
    for at in (far_at, near_at):
        _go_to(engine, at, n_batch, slot)
        start = time.perf_counter()
        took = {1: math.inf, 8: math.inf}
        for _ in range(FAR_TIMES):
            took = {n: min(t, engine.measure_target(n, slot)) for n, t in took.items()}
            if time.perf_counter() - start > FAR:
                break
        least.append(took)
    cells = {n: max(least[0][n] - least[1][n], 0.0) / (far_at - near_at) for n in (1, 8)}
    if read:
        noise = {n: NOISE * t / (far_at - near_at) for n, t in least[1].items()}
        cells = {n: _likely(t, TOKEN_COSTS[n] * read, noise[n]) for n, t in cells.items()}
    # a token costs one row at least an eighth of what it costs eight rows, and at most as much
    return {1: max(cells[1], cells[8] / 8), 8: max(cells[1], cells[8])}


def _go_to(engine: Session, n_past: int, n_batch: int, slot: int) -> None:
    """Goes back to n_past tokens of a slot. A memory that cannot go back decodes as many tokens again."""
    try:
        engine.rewind(n_past, slot)
    except EagleError as e:
        if e.kind is not ErrorKind.UNSUPPORTED:
            raise
        fill_context(engine, n_past, n_batch, slot)


def _likely(measured: float, expected: float, noise: float) -> float:
    """The likeliest value. measured: with such noise. expected: this or half or twice as much."""
    measured = min(measured, 4 * expected)  # far more, and another program had the machine meanwhile
    return expected + (measured - expected) * expected**2 / (expected**2 + noise**2)
