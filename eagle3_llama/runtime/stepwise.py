"""The four steps of a round as calls of their own: for tests, measurements and analyses.

Generation takes them together, in Engine.round().
"""

from __future__ import annotations

from collections.abc import Sequence

from .asks import Ask, Buffers, Drafting
from .drafted import Draft
from .library import checked
from .params import EagleParams
from .session import Session


class Stepwise:
    """A round of one slot, step by step. What decode() has begun, commit() ends."""

    def __init__(self, session: Session, drafting: Drafting) -> None:
        self._session = session
        self._drafting = drafting

    def draft(self, token: int, params: EagleParams, slot: int = 0) -> tuple[list[int], list[float]]:
        """The head's drafts after `token`: target ids and their probabilities, each given its parent."""
        self._drafting.draft([Ask(slot, token, params)], Buffers(self._session.ffi, 1))
        return list(self._drafting.drafted().tokens), self._drafting.probabilities()

    def decode(
        self, token: int, drafts: Sequence[int], parents: Sequence[int] | None = None, slot: int = 0
    ) -> None:
        """One target batch [token, drafts], a chain or with parents a tree, with logits for every row."""
        ask = Ask(slot, token, EagleParams(0), given=Draft(drafts, parents))
        self._drafting.draft([ask], Buffers(self._session.ffi, 1))
        checked(self._session.lib.eagle3_round_decode(self._session.handle))

    def verify(self, sampler: int) -> list[int]:
        """Samples the rows of the last decode() until one disagrees with its draft."""
        b = Buffers(self._session.ffi, 1)
        b.samplers[0] = sampler
        verify = self._session.lib.eagle3_round_verify
        checked(verify(self._session.handle, b.sampler_pointers, b.sampled, b.counts))
        checked(self._session.lib.eagle3_round_failure(self._session.handle, 0))
        return list(b.sampled[0 : b.counts[0]])

    def commit(self, n_keep: int) -> None:
        """Keeps the first n_keep rows of the last decode()."""
        keep = self._session.ffi.new("int32_t[]", [n_keep])
        checked(self._session.lib.eagle3_round_commit(self._session.handle, keep))
