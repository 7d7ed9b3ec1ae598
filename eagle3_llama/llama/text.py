"""A text: its token ids, how many of them there are, the rows of logits that are kept, and its images.

Text alone is what a reader has of a text that another thread decodes. ContextText is what a context holds: it
moves the position together with the engine, and nobody else does.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..common.limits import MAX_DRAFT
from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama, address, llama_cpp
from ..runtime.drafted import TARGET
from ..runtime.engine import Ask, Engine
from ..runtime.params import EagleParams
from ..runtime.round_tokens import RoundTokens
from ..runtime.text_memory import TextMemory
from .media import MediaRows
from .processors import GuardedProcessors, good_rows
from .scores import ScoreRows

MAX_RUN = 16  # rounds that run ahead of the reader of their tokens
_NOTHING = np.empty(0, np.intc)
CANNOT_REWIND = llama_cpp.llama_model_is_recurrent, llama_cpp.llama_model_is_hybrid
Logits = Callable[[int], np.ndarray]  # the row, float32 [n_vocab], that the i-th token was sampled from


def max_draft(max_tokens: int | None) -> int:
    """The longest draft that is of use where so many tokens are left; None if not known."""
    return MAX_DRAFT if max_tokens is None else min(max(max_tokens - 1, 0), MAX_DRAFT)


def has_window(ctx: Any, n: int) -> bool:
    """True if a context that is cut back to n tokens has what the next one reads, as session.rewind asks.

    A sliding window that was pruned (swa_full=False) has given the cells of old tokens to new ones.
    """
    model = llama_cpp.llama_get_model(ctx.ctx)
    window = int(llama_cpp.llama_model_n_swa(model))
    if n == 0 or window <= 0 or any(is_it(model) for is_it in CANNOT_REWIND):
        return True
    first = int(llama_cpp.llama_memory_seq_pos_min(ctx.memory, 0))
    return 0 <= first <= max(0, n + 1 - window)


class Text:
    """Token ids with the logits behind them.

    input_ids: int32 [n_ctx], of which the first n_tokens are the text. scores: float32 [n, n_vocab], the
    logits by position, written only if logits_all. rows: the rows that are kept otherwise, if any.
    stale: the last row of the last batch is not that of the last token. draft_position: of the token that
    follows, its position in an accepted draft, 0 if the target sampled it. draft_source: who drafted it:
    head, text or both; target if nobody did.
    """

    def __init__(
        self, input_ids: np.ndarray = _NOTHING, scores: np.ndarray = _NOTHING, logits_all: bool = False
    ) -> None:
        self.input_ids = input_ids
        self.scores = scores
        self.logits_all = logits_all
        self.n_tokens = self.draft_position = 0
        self.draft_source = TARGET
        self.rows: ScoreRows | None = None
        self.stale = True

    @property
    def ids(self) -> np.ndarray:
        """int32 [n_tokens]; a view."""
        return self.input_ids[: self.n_tokens]

    def begin(self, prompt: Sequence[int]) -> None:
        """The text is the prompt."""
        self.input_ids[: len(prompt)] = prompt
        self.n_tokens = len(prompt)

    def append(self, token: int) -> None:
        self.input_ids[self.n_tokens] = token
        self.n_tokens += 1

    def keep_row(self, position: int, logits: Logits | None, i: int) -> np.ndarray | None:
        """Copies logits(i), the row of a position, to where the scores are read from, and returns the copy.

        None if no row is kept.
        """
        if logits is None:
            return None
        if self.logits_all:
            kept: np.ndarray = self.scores[position]
            kept[:] = logits(i)
            return kept
        return self.rows.put(position, logits(i)) if self.rows is not None else None

    def kept(self) -> np.ndarray:
        """The logits of the text by position, float32 [n_tokens, n_vocab], or only the rows that are kept."""
        return self.scores[: self.n_tokens, :] if self.rows is None else self.rows.array()


class ContextText(Text):
    """The text in a context, which an engine decodes. Between two calls both hold the same positions.

    During a generation the engine may be ahead, by accepted tokens that were not yielded yet. Behind it the
    context may have an image, which another decoded. ctx: llama-cpp-python's object for the context.
    """

    def __init__(
        self,
        engine: Engine,
        ctx: Any,
        input_ids: np.ndarray,
        scores: np.ndarray,
        logits_all: bool,
        n_batch: int,
    ) -> None:
        super().__init__(input_ids, scores, logits_all)
        self.engine = engine
        self.ctx = ctx
        self.n_batch = n_batch
        model = llama_cpp.llama_get_model(ctx.ctx)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.memory: TextMemory | None = None  # has texts that have ended
        self._cannot_rewind = any(is_it(model) for is_it in CANNOT_REWIND)
        self._media = MediaRows()

    # -- positions ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Makes the engine hold exactly n_tokens positions, or none if it cannot go back to them.

        If the context has more of them than the engine decoded, an image is there. If it has none at all, its
        memory could not take back rows; hold() then decodes the text again.
        """
        n_past = self.engine.n_past()
        if self._is_lost():
            self.stale = True
        elif n_past > self.n_tokens:
            self.go_back(self.n_tokens)
            self.stale = True
        elif n_past < self.n_tokens:
            self.engine.state_reset(self.n_tokens)  # the head continues after them
            n_image = self.n_tokens - n_past
            self.input_ids[n_past : self.n_tokens] = self._media.ids(n_past, n_image, self.n_vocab)

    def hold(self) -> None:
        """Makes the engine hold exactly n_tokens positions: decodes a text again that its memory has lost."""
        self.settle()
        if not self._is_lost():
            return
        ids = self.ids.tolist()
        self._media.check(ids, 0)
        self.n_tokens = 0
        try:
            self.eval(ids)
        except BaseException:
            self.engine.rewind(0)
            self.n_tokens = len(ids)
            raise

    def _is_lost(self) -> bool:
        """True if nothing of the text is in the context's memory, though it was there."""
        if self.n_tokens == 0 or self.engine.n_past() > 0:
            return False
        return bool(llama_cpp.llama_memory_seq_pos_max(self.ctx.memory, 0) < 0)

    def go_back(self, n: int) -> bool:
        """Drops what follows the first n positions. False: the memory cannot, and is empty now."""
        try:
            self.engine.rewind(n)
        except EagleError:
            self.engine.rewind(0)
            return False
        return True

    def open_memory(self, n_bytes: int, prompts: bool, stack: contextlib.ExitStack) -> None:
        """Keeps texts that have ended, and drafts from them, until the stack closes. 0 bytes: keeps none."""
        if n_bytes and not self.engine.drafts_from_text:
            message = "text_memory has no effect: this target cannot take back drafts"
            warnings.warn(message, RuntimeWarning, stacklevel=5)
        elif n_bytes:
            self.memory = TextMemory(n_bytes, prompts)
            stack.callback(self.memory.close)
            self.engine.use_memory(self.memory)

    def remember(self, start: int, last: list[int]) -> None:
        """Keeps the text from position `start` on, and what was sampled behind it, as one that has ended."""
        if self.memory is not None and start <= self.n_tokens:
            self.memory.add([*self.ids[start:].tolist(), *last])

    def forget(self) -> None:
        """Empties the text, as Llama.reset() does."""
        self.n_tokens = 0
        self.stale = True
        if self._cannot_rewind:
            llama_cpp.llama_memory_clear(self.ctx.memory, True)

    def clear(self) -> None:
        """Empties text, context and engine, whatever is there."""
        self.n_tokens = 0
        self.stale = True
        llama_cpp.llama_memory_clear(self.ctx.memory, True)
        self.engine.state_reset(0)

    def reuse_prefix(self, prompt: list[int], whole: bool, verbose: bool) -> list[int]:
        """Keeps the prefix that context and prompt share, and returns the rest of the prompt.

        Returns [] if the logits of the prompt's last token are there already. whole: every row is wanted.
        """
        n = 0 if whole else Llama.longest_token_prefix(self.ids.tolist(), prompt)
        self.settle()
        if n == len(prompt) == self.n_tokens and not self.stale:
            return []
        n = min(n, max(len(prompt) - 1, 0))
        self._media.check(prompt, n)
        if not self.go_back(n):
            n = 0
            self._media.check(prompt, 0)
        if n == 0:
            self.forget()
            return prompt
        self.n_tokens = n
        if verbose:
            rest = len(prompt) - n
            print(
                f"Llama.generate: {n} prefix-match hit, remaining {rest} prompt tokens to eval",
                file=sys.stderr,
            )
        return prompt[n:]

    # -- decoding and sampling ----------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int], all_logits: bool = False) -> None:
        """Decodes tokens after the present text, in batches of n_batch. all_logits: keeps the row of each."""
        self.hold()
        all_logits = bool(all_logits or self.logits_all)
        for i in range(0, len(tokens), self.n_batch):
            batch = list(tokens[i : i + self.n_batch])
            self.engine.prefill(batch, all_logits=all_logits)
            for row in range(len(batch) if all_logits else 0):
                self.keep_row(self.n_tokens + row, self.logits, row)
            self.input_ids[self.n_tokens : self.n_tokens + len(batch)] = batch
            self.n_tokens += len(batch)
            self.stale = False

    def refresh(self) -> None:
        """Decodes the last token again if the last row is a rejected draft's, or of what was not read."""
        if self.n_tokens == 0:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, "there is nothing to sample from: call eval() first, or give a prompt"
            )
        self.settle()
        if self.stale:
            self.hold()
        if self.stale:  # the whole text was not decoded again
            self.n_tokens -= 1
            self.eval([int(self.input_ids[self.n_tokens])])

    def draw(self, sampler: Any, processors: GuardedProcessors | None, row: int = -1) -> int:
        """A token from a row of the last batch. Raises what a logits processor raised."""
        token = self.engine.sample(address(sampler.sampler), row)
        if processors is not None:
            processors.raise_error()
        return token

    def round(
        self,
        token: int,
        params: EagleParams,
        chain: int,
        processors: GuardedProcessors | None,
        most: int = MAX_DRAFT,
    ) -> list[RoundTokens | BaseException]:
        """One round after the text and `token`, which was sampled and is not decoded yet.

        chain: the address of the sampler chain. most: see Ask. The text stays as it is: it grows as the
        tokens are yielded. Returns the tokens, if there are any, and behind them what a sampler or a logits
        processor raised.
        """
        show = processors.begin_round if processors is not None else None
        ask = Ask(0, token, params, most, on_draft=show)
        self.stale = True  # after a failure, the last row follows a token that was taken back
        try:
            (out,) = self.engine.round([ask], [chain])
        finally:
            if processors is not None:
                processors.end_round()
        if isinstance(out, RoundTokens):
            self.stale = bool(out.drafted_from)  # then the last row may be a rejected draft's
        return [step for step in good_rows(out, processors) if step is not None]

    def run(
        self, token: int, params: EagleParams, chain: int, max_tokens: int | None
    ) -> list[RoundTokens | BaseException]:
        """Rounds as round() does one, ahead of the reader of their tokens: see Engine.run.

        max_tokens: that the text still gets; None if not known.
        """
        most = min(
            MAX_RUN, len(self.input_ids) - self.n_tokens, MAX_RUN if max_tokens is None else max_tokens
        )
        self.stale = True
        rounds = self.engine.run(Ask(0, token, params, max_draft(max_tokens)), chain, most, max_tokens)
        last = rounds[-1]
        self.stale = isinstance(last, EagleError) or bool(last.drafted_from)
        return [*rounds]

    def logits(self, row: int) -> np.ndarray:
        """A row of the last batch, float32 [n_vocab]; the next batch overwrites it."""
        pointer = llama_cpp.llama_get_logits_ith(self.ctx.ctx, row)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def round_logits(self, i: int) -> np.ndarray:
        """The row that the i-th token of the last round was sampled from.

        Its first row is not always the batch's: tokens that a memory has to decode again come before it.
        """
        return self.logits(self.engine.row(i))
