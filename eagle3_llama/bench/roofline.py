"""How near a decode comes to the time that reading its weights from memory takes.

One row must read every weight of the target once. A few rows read them once too, so their limit is the same
for as long as arithmetic keeps up with memory.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..common.model_reader import read_model, row_bytes

MOST_READ = 1 << 30  # bytes; more than any cache holds
PASSES = 5
LEAST_PASS = 0.02  # seconds; smaller sets are read several times in a pass


@dataclasses.dataclass(frozen=True)
class Roofline:
    """n_bytes: of the weights that one row reads. speed: bytes a second that the threads read in this run."""

    n_bytes: int
    speed: float

    @property
    def seconds(self) -> float:
        """The least that a decode can take."""
        return self.n_bytes / self.speed

    def report(self, one_row: float, eight_rows: float) -> dict[str, float]:
        """Its numbers by name, for JSON. one_row, eight_rows: seconds of a decode."""
        return {
            "bytes": self.n_bytes,
            "bytes_per_second": round(self.speed),
            "share_of_one_row": round(self.seconds / one_row, 3),
            "share_of_eight_rows": round(self.seconds / eight_rows, 3),
        }

    def line(self, one_row: float, eight_rows: float) -> str:
        """The same as sentences."""
        one, eight = (f"{s * 1000:.1f} ms ({self.seconds / s:.0%})" for s in (one_row, eight_rows))
        return (
            f"One row reads {self.n_bytes / 1e6:.0f} MB of weights. At the {self.speed / 1e9:.1f} GB/s that "
            f"these threads read now, this takes {self.seconds * 1000:.1f} ms. One row takes {one}, eight "
            f"rows {eight}; in brackets: the part of it that reading takes."
        )


def roofline(model: str, n_threads: int) -> Roofline:
    """Of this model, with the reading speed measured now, for a working set of that size."""
    n_bytes = row_bytes(read_model(model))
    return Roofline(n_bytes, reading_speed(n_bytes, n_threads))


def reading_speed(n_bytes: int, n_threads: int) -> float:
    """Bytes a second that n_threads read together from a set of so many bytes, at most MOST_READ."""
    words = np.ones(max(min(n_bytes, MOST_READ) // 8, 1 << 12), dtype=np.uint64)
    parts = np.array_split(words, n_threads)
    fastest = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(PASSES):
            begin, read = time.perf_counter(), 0
            while read == 0 or time.perf_counter() - begin < LEAST_PASS:
                list(pool.map(np.bitwise_or.reduce, parts))
                read += words.nbytes
            fastest = max(fastest, read / (time.perf_counter() - begin))
    return fastest
