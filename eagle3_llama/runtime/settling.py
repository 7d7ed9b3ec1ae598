"""How much longer a decode of one row takes soon after a draft, when the cache holds other weights."""

from __future__ import annotations

import statistics
from typing import Any

REPEATS = 6
ROUNDS, PASSES = 3, 3  # rounds with drafts before each sample, and passes of the head in each
LATE = 5  # decodes of one row since a draft, from which on they take no longer
FAR = 3.0  # median deviations from the median; a ratio that is further away was disturbed


def early(engine: Any, slot: int) -> float:
    """The second decode of one row after rounds with drafts, in units of one that came after several.

    At least 1. Decodes differ by some percent from one to the next, so only what is more than this counts.
    """
    ratios = []
    for _ in range(REPEATS):
        for _ in range(ROUNDS):
            _draft_round(engine, slot)
        took = [engine.measure_target(1, slot) for _ in range(LATE + 2)]
        ratios.append(took[1] / statistics.median(took[LATE - 1 :]))
    return 1.0 + beyond_noise([ratio - 1.0 for ratio in ratios])


def _draft_round(engine: Any, slot: int) -> None:
    """What a round with a draft reads: the head, the layers, and the output matrix, which it reads twice.

    Without the head or the second reading, the decodes that follow take no longer.
    """
    for _ in range(PASSES if engine.has_head else 0):
        engine.measure_head(1, slot)
    engine.measure_target(PASSES + 2, slot)
    for n in (2, 1):
        engine.measure_output(n)


def beyond_noise(samples: list[float]) -> float:
    """Their mean, less the part of it that their spread explains (James and Stein). At least 0."""
    middle = statistics.median(samples)
    spread = statistics.median(abs(x - middle) for x in samples)
    fair = [x for x in samples if abs(x - middle) <= FAR * spread]
    mean = statistics.fmean(fair)
    if mean <= 0.0:
        return 0.0
    error = statistics.variance(fair) / len(fair) if len(fair) > 1 else 0.0
    return max(mean - error / mean, 0.0)
