"""How a prompt is cut into chunks, so that others get their tokens in between and its bits stay the same.

A single request decodes a prompt in batches of n_batch, of which llama.cpp makes micro-batches of n_ubatch.
In one of more than INVARIANT_ROWS tokens, a row's sums may depend on where it is: for K-quants, fours of rows
go through one kernel and the rest through another. So a chunk ends where a micro-batch ends, or it is a
multiple of `step`, and chunk and rest are on the same side of INVARIANT_ROWS as the whole micro-batch.
"""

from __future__ import annotations

from ..common.limits import MAX_ROWS

# up to this number of rows, the bits of a row do not depend on it; above it, sums have another order
INVARIANT_ROWS = MAX_ROWS


def least_chunk(tokens: float, step: int) -> int:
    """The smallest chunk of a micro-batch that has at least so many tokens."""
    return -(-max(int(tokens), INVARIANT_ROWS + 1) // step) * step


def next_chunk(done: int, n: int, n_batch: int, n_ubatch: int, least: int, step: int) -> int:
    """Tokens of the next chunk: from `least` to twice as many, or what its micro-batch has left.

    done: tokens that were decoded of a prompt's n tokens; none of them was found in a slot. least:
    least_chunk(). If it is a micro-batch or more, the chunk is several of them.
    """
    at = done % n_batch
    batch = min(n_batch, n - done + at)
    micro = at % n_ubatch
    if micro == 0 and least >= n_ubatch:
        return min(least - least % n_ubatch, batch - at)
    rest = min(n_ubatch, batch - at + micro) - micro
    chunks = max(rest // least, 1)
    return rest if chunks == 1 else rest // chunks // step * step
