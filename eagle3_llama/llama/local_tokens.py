"""Tokens of a generation in the model's own context."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EagleError
from ..runtime.binding import Llama, address
from ..runtime.engine import Engine, Round
from ..runtime.params import EagleParams
from .generation import Generation, Piece, Sent
from .scores import ScoreRows

if TYPE_CHECKING:
    from .eagle_llama import EagleLlama


class LocalTokens:
    """The token source of an EagleLlama: the engine over its context."""

    def __init__(self, llm: EagleLlama, engine: Engine) -> None:
        self._llm, self._engine = llm, engine
        self._row: int | None = None  # number of tokens before the next row of the round that is verified

    def pieces(self, generation: Generation) -> Generator[Piece, Sent, None]:
        """See TokenSource.pieces."""
        llm, a, claim = self._llm, generation.arguments, generation.claim
        llm._guard = llm._guarded(a["logits_processor"], self._text)
        last, llm._sampler = llm._sampler, llm._new_sampler(a, llm._guard)
        if last is not None:
            last.close()  # it refers to itself: else only the collector of cycles would free it
        params = llm._params_for(bool(a["logits_processor"]), self._engine)
        started = time.perf_counter()
        whole = claim.record == "prompt"
        tokens = self._reuse_prefix(generation.prompt, whole) if a["reset"] else generation.prompt
        if not tokens:
            llm._refresh()
        llm._rows = None
        if not llm._logits_all and (claim.record != "none" or generation.stopping is not None):
            row0 = llm.n_tokens if whole else llm.n_tokens + len(tokens) - 1
            llm._rows = ScoreRows(llm._n_vocab, row0, claim.record != "none")
        try:
            llm._eval(tokens, whole)
            token = llm._draw(llm._sampler)
            self._engine.stats.prompt += time.perf_counter() - started
            sent = yield Piece([token], [0], logits=self._last_logits)
            rounds = self._rounds(token, params)
            while True:
                if sent:
                    llm._eval(sent, all_logits=False)
                    token = llm._draw(llm._sampler)
                    rounds = self._rounds(token, params)
                    sent = yield Piece([token], [0], logits=self._last_logits)
                    continue
                sampled = self._round(rounds)
                llm._raise_processors()
                sources = [*range(1, len(sampled)), 0]
                sent = yield Piece(sampled, sources, sampled.drafted, self._logits)
        finally:
            llm._owner.release(claim, self._end)

    def _end(self) -> None:
        """After a generation, wherever it stopped."""
        self._llm._settle()
        self._engine.release_threads()  # the next call may come from another thread

    def _text(self) -> np.ndarray:
        """The text before the row that is sampled. In a round, rows follow each other."""
        if self._row is not None:
            self._llm.n_tokens = self._row
            self._row += 1
        return self._llm._input_ids

    def _round(self, rounds: Iterator[Round]) -> Round:
        """The next round. If it fails, the text is as it was before, whatever processors were shown of it."""
        llm, n = self._llm, self._llm.n_tokens
        try:
            return next(rounds)
        except BaseException:
            llm._requires_eval = True  # the last row of the batch follows a token that was taken back
            raise
        finally:
            self._row, llm.n_tokens = None, n

    def _rounds(self, token: int, params: EagleParams) -> Iterator[Round]:
        return self._engine.rounds(0, token, params, address(self._llm._sampler.sampler), self._on_draft)

    def _on_draft(self, token: int, drafts: list[int]) -> None:
        llm, base = self._llm, self._llm.n_tokens
        llm.input_ids[base] = token
        llm.input_ids[base + 1 : base + 1 + len(drafts)] = drafts
        self._row = base + 1
        llm._requires_eval = len(drafts) > 0  # then the last row of the batch may be a rejected one

    def _last_logits(self, _: int) -> np.ndarray:
        return self._llm._logits(-1)

    def _logits(self, i: int) -> np.ndarray:
        return self._llm._logits(self._engine.row(i) if i > 0 else i)

    def _reuse_prefix(self, tokens: list[int], whole: bool) -> list[int]:
        """Keeps the prefix that cache and prompt share, and returns the rest of the prompt.

        Returns [] if the logits of the prompt's last token are there already. whole: every row is wanted.
        """
        llm = self._llm
        n = 0 if whole else Llama.longest_token_prefix(llm._input_ids.tolist(), tokens)
        llm._settle()
        if n == len(tokens) == llm.n_tokens and not llm._requires_eval:
            return []
        n = min(n, max(len(tokens) - 1, 0))
        llm._media.check(tokens, n)
        try:
            self._engine.rewind(n)
        except EagleError:  # a memory that cannot drop a part of a sequence is cleared
            n = 0
            self._engine.rewind(0)
        if n == 0:
            llm._forget_text()
            return tokens
        if llm.verbose:
            rest = len(tokens) - n
            print(
                f"Llama.generate: {n} prefix-match hit, remaining {rest} prompt tokens to eval",
                file=sys.stderr,
            )
        llm.n_tokens = n
        return tokens[n:]
