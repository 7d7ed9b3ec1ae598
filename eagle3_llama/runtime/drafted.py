"""A draft, brought by a caller or made by the library, and who drafted each of its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# By the bits of eagle3_source: 1 the head offered it, 2 the slot's own text; 0 not drafted, or by the caller.
SOURCES = ("target", "head", "text", "both")
DRAFTERS = SOURCES[1:]


@dataclasses.dataclass(frozen=True)
class Draft:
    """Draft tokens, level by level: tokens[i] follows tokens[parents[i]], or the ask's own token where that
    is -1. parents: None for a chain. sources: of each token the bits of who drafted it; a caller gives none.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    sources: Sequence[int] = ()

    @property
    def levels(self) -> int:
        """The number of levels: levels come in order, so it is the depth of the last token."""
        if self.parents is None:
            return len(self.tokens)
        depth = 0
        node = len(self.tokens) - 1
        while node >= 0:
            depth += 1
            node = self.parents[node]
        return depth

    def counts(self) -> list[int]:
        """The number of draft tokens of each source, by its bits."""
        return [self.sources.count(bits) for bits in range(len(SOURCES))]

    def along(self, accepted: Sequence[int]) -> list[int]:
        """The sources of accepted tokens, from child to child."""
        parents = self.parents if self.parents is not None else range(-1, len(self.tokens) - 1)
        out = []
        node = -1
        for token in accepted:
            node = next(
                j for j in range(node + 1, len(self.tokens)) if self.tokens[j] == token and parents[j] == node
            )
            out.append(self.sources[node])
        return out
