"""The memory of a load."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes that a context and its drafter take at a moment, on the host and on devices together.

    The first three are what plain decoding takes, too, but for the graphs that are kept for drafts:
    target_compute grows with their number, to a bound that is a part of all three. It also grows when a batch
    first wants the logits of more than 64 rows: with logits_all, or for the log-probabilities of a prompt.
    """

    target_weights: int
    target_cache: int  # for the text in all slots
    target_compute: int
    head_weights: int = 0  # the drafter's: a head, or a small model in its place
    head_cache: int = 0
    head_compute: int = 0  # one buffer for all passes, and the graphs that are kept
    prompt_cache: int = 0  # texts that the slots of a Batcher gave up

    def __str__(self) -> str:
        mb = {f.name: f"{getattr(self, f.name) / 1e6:.1f} MB" for f in dataclasses.fields(self)}
        parts = [f"target {mb['target_weights']}, cache {mb['target_cache']}, compute {mb['target_compute']}"]
        if self.head_weights:
            own = (mb[f"head_{part}"] for part in ("weights", "cache", "compute"))
            parts.append("drafter {}, cache {}, compute {}".format(*own))
        if self.prompt_cache:
            parts.append(f"prompt cache {mb['prompt_cache']}")
        return "; ".join(parts)


def report(memory: MemoryUse, verbose: bool) -> None:
    """Says after a load, where llama.cpp says its part, what it takes."""
    if verbose:
        print(f"EagleLlama: {memory}", file=sys.stderr)
