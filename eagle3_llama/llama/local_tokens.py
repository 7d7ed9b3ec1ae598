"""Tokens of a generation in the model's own context."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.binding import address
from ..runtime.params import EagleParams
from ..runtime.round_tokens import RoundTokens
from .completion_options import CompletionOptions
from .loop import Output
from .processors import GuardedProcessors
from .scores import ScoreRows
from .text import ContextText, Logits, max_draft
from .usage import TokenUsage


class LocalTokens:
    """The token source of an EagleLlama: rounds over the text in its context.

    reset: False continues the text with the prompt. release: calls what it is given if the generation still
    holds the context. A full context ends the generation if the options say so; otherwise the round raises,
    as Llama's next step does.
    """

    def __init__(
        self,
        text: ContextText,
        prompt: list[int],
        params: EagleParams,
        sampler: Any,
        processors: GuardedProcessors | None,
        usage: TokenUsage,
        release: Callable[[Callable[[], None]], None],
        options: CompletionOptions,
        *,
        reset: bool = True,
        verbose: bool = False,
    ) -> None:
        self._text = text
        self._prompt = prompt
        self._params = params
        self._sampler = sampler
        self._processors = processors
        self._chain = address(sampler.sampler)  # once: it takes a while, for each round
        self._usage = usage
        self._release = release
        self._reset = reset
        self._record = options.record
        self._ends = options.ends
        self._verbose = verbose
        self._max_tokens = options.max_tokens  # that are left
        self._token = -1  # sampled, and not decoded yet
        self._ahead = (
            options.ahead and processors is None and options.record == "none" and not text.logits_all
        )
        self._rounds: list[RoundTokens | BaseException] = []  # that have run, and are not read yet
        self._new_at = -1  # where the text begins that is new to the memory of earlier texts
        self._before = text.engine.stats.copy() if verbose else None

    def prompt(self) -> Output:
        """See TokenSource."""
        text = self._text
        tokens = self._prompt
        started = time.perf_counter()
        whole = self._record == "prompt"
        if self._reset:
            tokens = text.reuse_prefix(tokens, whole, self._verbose)
        if not tokens:
            text.refresh()
        text.rows = None
        if self._record != "none" and not text.logits_all:
            row0 = text.n_tokens if whole else text.n_tokens + len(tokens) - 1
            text.rows = ScoreRows(text.n_vocab, row0, keep_all=self._record != "last")
        memory = text.memory
        reused = text.n_tokens
        text.eval(tokens, whole)
        self._new_at = reused if memory is not None and memory.prompts else text.n_tokens
        output = self._sample()
        text.engine.stats.prompt += time.perf_counter() - started
        return output

    def round(self) -> Output | None:
        """See TokenSource. The caller stops at an end-of-generation token; the context's end is another."""
        if self._ends and self._text.n_tokens >= len(self._text.input_ids):
            return None  # whatever failed behind the last row that there is room for
        out = self._next()
        self._token = out.tokens[-1]
        self._count(len(out.tokens))
        self._usage.count_draft(out.drafted_from)
        return Output(out, self._rows(len(out.tokens)))

    def _next(self) -> RoundTokens:
        text, max_tokens = self._text, self._max_tokens
        if not self._rounds and self._ahead:
            self._rounds = text.run(self._token, self._params, self._chain, max_tokens)
        elif not self._rounds:
            most = max_draft(max_tokens)
            self._rounds = text.round(self._token, self._params, self._chain, self._processors, most)
        out = self._rounds.pop(0)
        if isinstance(out, BaseException):
            raise out
        if self._ahead:
            text.engine.stats.count_round(out)
        return out

    def _rows(self, n: int) -> Logits | None:
        """Copies of the rows that n tokens of a round were sampled from, if they are kept.

        Now: a state may be saved between two of them, for which a memory decodes again what it lacks.
        """
        text = self._text
        if text.rows is None and not text.logits_all:
            return None
        return [text.round_logits(i).copy() for i in range(n)].__getitem__

    def go_on(self, tokens: Sequence[int]) -> Output:
        """See TokenSource."""
        self._rounds.clear()
        self._text.eval(tokens)
        return self._sample()

    def end(self) -> None:
        """See TokenSource."""
        self._release(self._settle)
        if self._before is not None and (counted := self._text.engine.stats.since(self._before)).tokens:
            print(f"EagleLlama: {counted}", file=sys.stderr)

    def _settle(self) -> None:
        if self._new_at >= 0:
            all_read = self._text.engine.n_past() == self._text.n_tokens
            self._text.remember(self._new_at, [self._token] if all_read else [])
        self._text.settle()
        self._text.engine.release_threads()  # the next call may come from another thread

    def _count(self, n: int) -> None:
        if self._max_tokens is not None:
            self._max_tokens -= n

    def _sample(self) -> Output:
        self._count(1)
        self._token = self._text.draw(self._sampler, self._processors)
        return Output(RoundTokens.first(self._token), lambda _: self._text.logits(-1))
