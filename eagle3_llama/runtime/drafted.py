"""A draft, brought by a caller or made by the library, and who drafted each of its tokens."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

TARGET = "target"  # no source drafted the token: the target sampled it, or the caller drafted it
BOTH = "both"  # more than one source offered it
# reports always have these; a session's further sources join them
DRAFTERS = ("head", "text", "grammar", BOTH)


def drafter_labels(names: Sequence[str]) -> list[str]:
    """Who drafted a token, by the bits of eagle3_round_drafted: TARGET, the name of a source, or BOTH.

    names: of the session's sources; that of bit i is names[i].
    """
    offered = ([name for i, name in enumerate(names) if bits >> i & 1] for bits in range(1 << len(names)))
    return [TARGET if not of else of[0] if len(of) == 1 else BOTH for of in offered]


@dataclasses.dataclass(frozen=True)
class Draft:
    """Draft tokens, level by level: tokens[i] follows tokens[parents[i]], or the ask's own token where that
    is -1. parents: None for a chain. sources: of each token who drafted it (see drafter_labels); a caller
    gives none.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    sources: Sequence[str] = ()

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

    def counts(self) -> dict[str, int]:
        """The number of draft tokens by who drafted them."""
        return dict(collections.Counter(self.sources))

    def along(self, accepted: Sequence[int]) -> list[str]:
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


NO_DRAFT = Draft()
