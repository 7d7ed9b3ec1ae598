"""The plan of a load's measurements of costs: for models whose decode is quick or slow."""

from __future__ import annotations

import dataclasses

# Numbers of rows to measure in one round, the most important first. Costs in between are interpolated.
SIZES = (1, 4, 2, 1, 8, 3, 1, 6, 5, 1, 12)
# The same, once: only long matches of the text make such drafts. Products take up to 16 rows at a time.
LARGE = (1, 16, 17, 64)
# The same on a device. Its kernels change with the number of rows, mostly at 2, 5, 9, 17 and 33: costs are
# interpolated between those numbers only.
DEVICE_SIZES = (1, 4, 2, 8, 5, 16, 9, 64, 17, 32, 33, 24)
CONTEXTS = (8, 256)  # tokens in the KV cache before the rows, for the near and the far measurement


@dataclasses.dataclass(frozen=True)
class MeasuringPlan:
    """The plan of a load's measurements. Times are seconds after its start."""

    each_once: bool  # each size is measured once; else as often as SIZES has it
    first_until: float  # the first round begins no further size afterwards
    later_until: float  # the same for later rounds
    least_rounds: int
    most_rounds: int
    large_until: float  # no further large size begins afterwards; 0 is none
    fill_until: float  # filling the far context ends; 0 measures without tokens in the KV cache
    fill_least: float  # seconds that filling it takes at least
    fill_batch: int  # tokens per batch of filling it
    warm_up: float  # seconds of decodes that do not count
    row_counts: tuple[int, ...] = SIZES
    settling: int = 0  # decodes and passes of each size that do not count, just before the one that does

    def sizes(self, most: int) -> list[int]:
        """Those of a round, up to `most` rows."""
        found = [n for n in self.row_counts if n <= most]
        return list(dict.fromkeys(found)) if self.each_once else found

    def known(self, one: float) -> float | None:
        """The time of an earlier decode of one row, where a round does not measure it again."""
        return one if self.each_once and not self.settling else None

    def until(self, n_rounds: int) -> float:
        """When the round behind n_rounds others begins no further size."""
        return self.later_until if n_rounds else self.first_until

    def goes_on(self, n_rounds: int, elapsed: float, budget: float) -> bool:
        """True if another round begins behind n_rounds."""
        return n_rounds < self.least_rounds or (n_rounds < self.most_rounds and elapsed < budget)


QUICK = MeasuringPlan(
    each_once=False,
    first_until=1.35,
    later_until=1.25,
    least_rounds=2,
    most_rounds=9,
    large_until=1.8,
    fill_until=0.45,
    fill_least=0.1,
    fill_batch=32,
    warm_up=0.2,
)
SLOW = MeasuringPlan(
    each_once=True,
    first_until=2.5,
    later_until=0.0,
    least_rounds=1,
    most_rounds=1,
    large_until=0.0,
    fill_until=0.0,
    fill_least=0.0,
    fill_batch=32,
    warm_up=0.0,
)
BUDGET = 1.0  # seconds after which no further round than least_rounds begins
# Seconds of a decode of one row. A model that takes longer than SLOW_ROW is slow. In one that takes less than
# FAST_ROW, the first SETTLING decodes of one row after one of another size take longer.
SLOW_ROW, FAST_ROW, SETTLING = 0.08, 0.01, 3


# CUDA runs the graph of a new size once, captures it in the second decode, and replays it from the third on.
QUICK_ON_DEVICE = dataclasses.replace(
    QUICK,
    each_once=True,
    first_until=3.0,
    least_rounds=1,
    warm_up=0.0,
    large_until=0.0,
    row_counts=DEVICE_SIZES,
    settling=3,
)
SLOW_ON_DEVICE = dataclasses.replace(SLOW, row_counts=DEVICE_SIZES)


def plan_for(one: float, on_device: bool = False) -> MeasuringPlan:
    """one: seconds of a decode of one row. on_device: layers of the model are."""
    if on_device:
        return SLOW_ON_DEVICE if one > SLOW_ROW else QUICK_ON_DEVICE
    return SLOW if one > SLOW_ROW else QUICK
