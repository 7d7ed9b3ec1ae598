"""What the library drafted for an ask, and from which source each draft token comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# By the bits of eagle3_source: 1 the head offered it, 2 the slot's own text; 0 not drafted, or by the caller.
SOURCES = ("target", "head", "text", "both")
DRAFTERS = SOURCES[1:]


class Drafted(NamedTuple):
    """A draft, level by level: tokens [n], parents [n] (-1: the ask's own token), sources [n] (bits)."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    sources: Sequence[int] = ()

    @property
    def levels(self) -> int:
        """The number of levels: levels come in order, so it is the depth of the last token."""
        depth, node = 0, len(self.tokens) - 1
        while node >= 0:
            depth, node = depth + 1, self.parents[node]
        return depth

    def counts(self) -> list[int]:
        """The number of draft tokens of each source, by its bits."""
        return [self.sources.count(bits) for bits in range(len(SOURCES))]

    def along(self, accepted: Sequence[int]) -> list[int]:
        """The sources of accepted tokens, from child to child."""
        out, node = [], -1
        for token in accepted:
            node = next(
                j
                for j in range(node + 1, len(self.tokens))
                if self.tokens[j] == token and self.parents[j] == node
            )
            out.append(self.sources[node])
        return out
