"""The asks of a round, and how they are told to the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..common.limits import MAX_DRAFT
from .drafted import Draft, drafter_labels
from .library import checked
from .params import EagleParams, StaticTree, Tree
from .planning import Planner
from .session import Session

PLANNED_NODES = 24  # draft tokens that the planner may grow with the head: more have never paid
PLANNED_WIDTH = 4  # the same, of a level of a tree
MATCH, FORCED = 4, 2  # tokens of a match, or forced ones, that make it worth to measure what drafts cost


class Ask(NamedTuple):
    """A slot's ask of a round. `token` was sampled and is not decoded yet.

    max_draft: the longest path of draft tokens that is of use: what is left of the text, less the token that
    the target samples after them. given: a draft instead of the head's. on_draft: called with [token,
    *drafts] before the sampler reads their rows. ends_prompt: the token was not sampled, but ends a prompt
    whose other tokens the slot holds; nothing is drafted.
    """

    slot: int
    token: int
    params: EagleParams
    max_draft: int = MAX_DRAFT
    given: Draft | None = None
    on_draft: Callable[[list[int]], None] | None = None
    ends_prompt: bool = False


class Buffers:
    """Buffers that n asks pass to the library, allocated once. samplers: addresses, 0 for none."""

    def __init__(self, ffi: Any, n: int) -> None:
        self.asks = ffi.new("struct eagle3_ask[]", n)
        self.drafted, self.counts, self.keep = (ffi.new("int32_t[]", n) for _ in range(3))
        self.sampled = ffi.new("int32_t[]", n * (MAX_DRAFT + 1))
        self.of_ask = [self.sampled + i * (MAX_DRAFT + 1) for i in range(n)]
        self.samplers = ffi.new("uintptr_t[]", n)
        self.sampler_pointers = ffi.cast("struct llama_sampler **", self.samplers)
        self.zeros = [0] * n
        self.run = ffi.new("struct eagle3_run *")


class Drafting:
    """Drafts for the asks of a round: by the head, from the text, or what a caller brings."""

    def __init__(self, session: Session, planner: Planner) -> None:
        self._session = session
        self._planner = planner
        self.lib = session.lib
        self.ffi = session.ffi
        self._tokens, self._parents, self._sources = (self.ffi.new(f"int32_t[{MAX_DRAFT}]") for _ in range(3))
        self._labels = drafter_labels(session.source_names())  # by the bits of eagle3_round_drafted
        self._shapes: dict[StaticTree, tuple[Any, Any]] = {}  # parents and ranks

    def draft(self, asks: Sequence[Ask], b: Buffers) -> None:
        """Begins a round with the drafts of its asks. Their numbers of tokens are in b.drafted afterwards.

        What the grammars in b.samplers force is drafted, too.
        """
        if self._planner.on_match is not None:
            self.measure_for(asks, b)
        n, samplers = len(asks), b.sampler_pointers
        arrays = [self.fill(b.asks[i], ask, n, samplers[i]) for i, ask in enumerate(asks)]
        checked(self.lib.eagle3_round_draft(self._session.handle, b.asks, n, b.drafted))
        del arrays  # read until here

    def fill(self, a: Any, ask: Ask, n: int, sampler: Any) -> object:
        """The native form of an ask of a round of n. sampler: its chain, or NULL.

        Returns what must live until the call has read it.
        """
        lib = self.lib
        p = ask.params
        a.slot = ask.slot
        a.token = ask.token
        if ask.given is not None:
            return self._fill_given(a, ask.given)
        if ask.ends_prompt:
            a.kind = lib.EAGLE3_PROMPT
        elif not self._can_draft(p):
            a.kind = lib.EAGLE3_PLAIN
        elif p.planned:
            text = p.text and self._session.drafts_from_text
            a.kind = lib.EAGLE3_PLANNED
            a.text = int(text)
            a.sampler = sampler if text else self.ffi.NULL
            a.n_max = MAX_DRAFT if text else min(PLANNED_NODES * n, MAX_DRAFT)
            a.n_max = a.n_max if ask.max_draft else 0
            a.width = PLANNED_WIDTH if self._session.trees(p) else 1
            a.depth = ask.max_draft
        elif isinstance(p.tree, Tree):
            a.kind = lib.EAGLE3_TREE
            a.n_max = min(p.tree.nodes, ask.max_draft)
            a.p_min = p.p_min
            a.depth = p.tree.depth
            a.width = p.tree.width
        elif isinstance(p.tree, StaticTree):
            a.kind = lib.EAGLE3_CHOICES
            a.n = min(len(p.tree.parents), ask.max_draft)
            a.parents, a.ranks = self._shapes.get(p.tree) or self._shapes.setdefault(
                p.tree, (self._ints(p.tree.parents), self._ints(p.tree.ranks))
            )
        else:
            a.kind = lib.EAGLE3_CHAIN
            a.n_max = min(p.n_max or 0, ask.max_draft)
            a.n_min = p.n_min
            a.p_min = p.p_min
        return None

    def _can_draft(self, p: EagleParams) -> bool:
        """True if there is something to draft with these parameters, and known what it costs."""
        if p.n_max == 0 or (p.planned and self._planner.costs is None):
            return False
        return self._session.drafter is not None or (p.from_text and self._session.drafts_from_text)

    def measure_for(self, asks: Sequence[Ask], b: Buffers) -> None:
        """Measures what rows cost before the first round with a match, or forced tokens, worth it."""
        session = self._session
        for i, ask in enumerate(asks):
            if (
                ask.params.from_text
                and not ask.ends_prompt
                and (
                    session.text_match(ask.token, ask.slot) >= MATCH
                    or session.forced(b.sampler_pointers[i]) >= FORCED
                )
            ):
                measure, self._planner.on_match = self._planner.on_match, None
                if measure is not None:
                    measure(ask.slot)
                return

    def _fill_given(self, a: Any, given: Draft) -> object:
        tokens = self._ints(given.tokens)
        parents = self.ffi.NULL if given.parents is None else self._ints(given.parents)
        a.kind = self.lib.EAGLE3_GIVEN
        a.n = len(given.tokens)
        a.tokens = tokens
        a.parents = parents
        return tokens, parents

    def _ints(self, values: Sequence[int]) -> Any:
        return self.ffi.new("int32_t[]", list(values) or 1)

    def drafted(self, i: int = 0) -> Draft:
        """The draft of the i-th ask of the round under way."""
        call = self.lib.eagle3_round_drafted
        n = checked(call(self._session.handle, i, self._tokens, self._parents, self.ffi.NULL, self._sources))
        unpack = self.ffi.unpack
        sources = [self._labels[bits] for bits in unpack(self._sources, n)]
        return Draft(unpack(self._tokens, n), unpack(self._parents, n), sources)

    def probabilities(self, i: int = 0) -> list[float]:
        """The probability of each of these draft tokens, given its parent."""
        probs = self.ffi.new(f"float[{MAX_DRAFT}]")
        null = self.ffi.NULL
        n = checked(self.lib.eagle3_round_drafted(self._session.handle, i, self._tokens, null, probs, null))
        return list(probs[0:n])
