"""The hot loop: one round of draft, decode, verify, commit, for one slot or many. Each step is a native call.

Of a lone slot, rounds without a draft may follow each other in one call.

Source: EAGLE-3 (arXiv 2503.01840). The acceptance rule is verify in native/src/session/round.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter as now

from ..errors import EagleError, ErrorKind
from .asks import Ask, Buffers, Drafting
from .drafted import NO_DRAFT, Draft
from .head_alone import HeadAlone
from .library import checked, error_of
from .planning import Planner
from .round_tokens import RoundTokens
from .session import Session
from .stats import EagleStats
from .stepwise import Stepwise

__all__ = ["Ask", "Draft", "Engine"]

MOST_SECONDS = 0.04  # that rounds run ahead: their tokens come together, and no reader sees that


class Engine(Session):
    """A session that runs rounds; see Session for its arguments.

    planner: chooses the drafts by their cost. drafting: makes them. head: the head without its target.
    steps: a round step by step. stats: counters of all rounds. in_round: whether a round is between its
    decode and its commit.
    """

    def __init__(
        self,
        ctx: int,
        model: int,
        drafter_path: str | None = None,
        n_slots: int = 1,
        extract_layers: Sequence[int] | None = None,
        n_gpu_layers: int = -1,
    ) -> None:
        super().__init__(ctx, model, drafter_path, n_slots, extract_layers, n_gpu_layers)
        self.planner = Planner(self)
        self.drafting = Drafting(self, self.planner)
        self.head = HeadAlone(self)
        self.steps = Stepwise(self, self.drafting)
        self.stats = EagleStats()
        self.stats.add_sources(self.source_names())
        self.in_round = False
        self._buffers: dict[int, Buffers] = {}  # by number of asks

    def round(self, asks: Sequence[Ask], samplers: Sequence[int]) -> list[RoundTokens | EagleError]:
        """One round of several slots: of each its tokens, or the error of its first row or its commit.

        What fails in a later row leaves the tokens before it, and is their `failure`.

        samplers are addresses of llama_sampler chains. An error of the round itself is raised; the slots are
        then as they were. The caller counts stats.tokens, because it knows which of the tokens are of use.
        """
        b = self._buffers_for(samplers)
        started = now()
        self.drafting.draft(asks, b)
        self.stats.draft += now() - started
        rounds = self._go_on(asks, b)
        for out in rounds:
            if isinstance(out, RoundTokens):
                self.stats.count_round(out)
        return rounds

    def run(
        self, ask: Ask, sampler: int, most: int, max_tokens: int | None = None
    ) -> list[RoundTokens | EagleError]:
        """Rounds of a lone slot: up to `most` of them while nothing is drafted, or a first one with a draft.

        max_tokens: that the slot's text still gets, None if not known: no draft goes beyond.

        Returns the tokens of those without a draft, then those of the round with one, as far as there are
        any, and in place of what failed its error. The caller counts the rounds that it takes.
        """
        b = self._buffers_for([sampler])
        started = now()
        run, stats = b.run, self.stats
        run.n, run.max_tokens, run.seconds = most, max_tokens or 0, MOST_SECONDS
        if self.planner.on_match is not None:
            self.drafting.measure_for([ask], b)
            run.n = 1
            stats.draft += now() - started
            started = now()
        unread = self.drafting.fill(b.asks[0], ask, 1, b.sampler_pointers[0])
        code = self.lib.eagle3_plain_rounds(self.handle, b.asks, b.sampler_pointers[0], run)
        del unread
        stats.draft += run.draft_s
        stats.target += run.target_s
        stats.verify += run.verify_s
        rounds: list[RoundTokens | EagleError] = []
        if run.n_tokens:
            rounds.append(RoundTokens.plain(self.ffi.unpack(run.tokens, run.n_tokens)))
        if code < 0:
            rounds.append(error_of(code))
        stats.other += now() - started - run.draft_s - run.target_s - run.verify_s
        if code >= 0 and run.drafted:
            b.drafted[0] = run.drafted
            if run.n_tokens:
                b.asks[0].token = run.tokens[run.n_tokens - 1]
            try:
                (out,) = self._go_on([ask], b)
                rounds.append(out)
                if isinstance(out, RoundTokens) and out.failure is not None:
                    rounds.append(out.failure)
            except EagleError as e:
                rounds.append(e)
        return rounds

    def _buffers_for(self, samplers: Sequence[int]) -> Buffers:
        n = len(samplers)
        b = self._buffers.get(n) or self._buffers.setdefault(n, Buffers(self.ffi, n))
        b.samplers[0:n] = samplers
        return b

    def _go_on(self, asks: Sequence[Ask], b: Buffers) -> list[RoundTokens | EagleError]:
        """The rest of a round that is drafted."""
        n = len(asks)
        stats = self.stats
        held = [self.n_past(ask.slot) for ask in asks] if n > 1 else None
        errors: dict[int, EagleError] = {}  # by ask, of the commit
        t1 = now()
        code = self.lib.eagle3_round_decode(self.handle)
        if code < 0:
            self._decode_without_drafts(b, n, error_of(code))
        t2 = now()
        b.keep[0:n] = b.zeros
        self.in_round = True
        try:
            drafts = [self.drafting.drafted(i) if b.drafted[i] else NO_DRAFT for i in range(n)]
            for ask, draft in zip(asks, drafts):
                if ask.on_draft is not None:
                    ask.on_draft([ask.token, *draft.tokens])
            counts, failed = self._verify_rows(b, n)
            t3 = now()
        finally:  # whatever happened, nothing unverified stays
            code = self.lib.eagle3_round_commit(self.handle, b.keep)
            self.in_round = False
            if code < 0:
                self._share_failure(error_of(code), asks, b, held, errors)
        rounds: list[RoundTokens | EagleError] = []
        for i, count in enumerate(counts):
            tokens = self.ffi.unpack(b.of_ask[i], count)
            error = errors.get(i) or (failed.get(i) if count == 0 else None)
            rounds.append(error or RoundTokens.sampled(tokens, drafts[i], failed.get(i)))
        stats.target += t2 - t1
        stats.verify += t3 - t2
        stats.other += now() - t3
        return rounds

    def _decode_without_drafts(self, b: Buffers, n: int, failure: EagleError) -> None:
        """Decodes a round without draft tokens after the KV cache had no room for them.

        An image may fill more cells than positions (M-RoPE), and drafts are cut by positions. Raises a
        failure that is not of the drafts.
        """
        if failure.kind is not ErrorKind.DECODE or not any(b.drafted):
            raise failure
        for a in b.asks:
            a.kind = self.lib.EAGLE3_PLAIN
        checked(self.lib.eagle3_round_draft(self.handle, b.asks, n, b.drafted))
        checked(self.lib.eagle3_round_decode(self.handle))

    def _verify_rows(self, b: Buffers, n: int) -> tuple[list[int], dict[int, EagleError]]:
        """Samples the rows of n asks in order, up to the first token that was not drafted.

        Returns how many of each were sampled, and by ask what failed in the row behind them. keep is what of
        each ask is to stay: the rows that were sampled from. Raises what failed before anything was sampled.
        """
        code = self.lib.eagle3_round_verify(self.handle, b.sampler_pointers, b.sampled, b.counts)
        counts = [max(count, 0) for count in self.ffi.unpack(b.counts, n)]
        if (
            code < 0
        ):  # a decode failed, for all asks. What the samplers took before it stays, and the rest can wait
            error = error_of(code)
            if not any(counts):
                raise error
            failed = {i: error for i, count in enumerate(counts) if count == 0}
        else:
            codes = [self.lib.eagle3_round_failure(self.handle, i) for i in range(n)]
            failed = {i: error_of(code) for i, code in enumerate(codes) if code < 0}
        b.keep[0:n] = counts
        return counts, failed

    def _share_failure(
        self,
        failure: EagleError,
        asks: Sequence[Ask],
        b: Buffers,
        held: list[int] | None,
        errors: dict[int, EagleError],
    ) -> None:
        """A failure of the commit is that of the slots that do not hold the kept rows.

        held: of each slot its positions before the round; None for a lone slot, whose failure it is.
        """
        for i, ask in enumerate(asks):
            if held is None or self.n_past(ask.slot) != held[i] + b.keep[i]:
                errors[i] = failure
