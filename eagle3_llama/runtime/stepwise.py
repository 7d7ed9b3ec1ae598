"""The four steps of a round as calls of their own: for tests, measurements and analyses.

Generation takes them together, in Engine.round().
"""

from __future__ import annotations

from collections.abc import Sequence

from ..common.limits import MAX_DRAFT
from .asks import Ask, Asking, Buffers, Draft
from .library import checked
from .params import EagleParams


class Stepwise(Asking):
    """A round of one slot, step by step. What decode() has begun, commit() ends."""

    def draft(self, token: int, params: EagleParams, slot: int = 0) -> tuple[list[int], list[float]]:
        """What the head drafts after `token`: target ids and their probabilities, each given its parent."""
        self._draft([Ask(slot, token, params)], Buffers(self.ffi, 1))
        probs = self.ffi.new(f"float[{MAX_DRAFT}]")
        n = checked(
            self.lib.eagle3_round_drafted(self._session, 0, self._drafts, self.ffi.NULL, probs, self.ffi.NULL)
        )
        return list(self._drafts[0:n]), list(probs[0:n])

    def decode(
        self, token: int, drafts: Sequence[int], parents: Sequence[int] | None = None, slot: int = 0
    ) -> None:
        """One target batch [token, drafts], a chain or with parents a tree, with logits for every row."""
        self._draft([Ask(slot, token, EagleParams(0), given=Draft(drafts, parents))], Buffers(self.ffi, 1))
        checked(self.lib.eagle3_round_decode(self._session))

    def verify(self, sampler: int) -> list[int]:
        """Samples the rows of the last decode() until one disagrees with its draft."""
        b = Buffers(self.ffi, 1)
        b.samplers[0] = sampler
        checked(self.lib.eagle3_round_verify(self._session, b.sampler_pointers, b.sampled, b.counts))
        return list(b.sampled[0 : checked(b.counts[0])])

    def commit(self, n_keep: int) -> None:
        """Keeps the first n_keep rows of the last decode()."""
        checked(self.lib.eagle3_round_commit(self._session, self.ffi.new("int32_t[]", [n_keep])))
