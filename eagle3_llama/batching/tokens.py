"""Tokens of a generation in a slot of a Batcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..errors import EagleError, ErrorKind
from ..llama.text import Text
from ..llama.usage import TokenUsage
from ..runtime.stats import EagleStats
from .inbox import Inbox
from .job import BatchOutput, Job
from .logprobs import TopRow

AHEAD = 64  # tokens
ROWS_AHEAD = 8  # tokens, if a row of logits comes with each


class BatchTokens:
    """The token source of a RequestLlama: the batcher's thread, which runs ahead of the reader.

    before: where the top rows of the prompt go. on_wait: called before it waits, and once an interval, in
    seconds.
    """

    def __init__(
        self,
        inbox: Inbox,
        job: Job,
        text: Text,
        used: TokenUsage,
        stats: EagleStats,
        before: list[TopRow],
        on_wait: Callable[[], None],
        interval: float,
    ) -> None:
        self._inbox = inbox
        self._job = job
        self._text = text
        self._used = used
        self._stats = stats
        self._before = before
        self._on_wait = on_wait
        self._n_read = 0  # tokens
        self._interval = interval
        self._told = 0.0  # time.monotonic() of the last on_wait()

    def prompt(self) -> BatchOutput | None:
        """See TokenSource. Waits for a slot."""
        self._text.begin(self._job.prompt)
        self._inbox.submit(self._job)
        return self.round()

    def round(self) -> BatchOutput | None:
        """See TokenSource."""
        output = self._next_output()
        if isinstance(output, BaseException):
            try:
                raise output
            finally:
                del output  # its traceback refers to this frame: else they would form a cycle
        if output is None:
            return None
        self._n_read += len(output.round.tokens)
        self._used.count_draft(output.round.drafted_from)
        if not output.of_prompt:
            self._stats.count_round(output.round)
        self._before += output.before
        return output

    def go_on(self, tokens: Sequence[int]) -> NoReturn:
        """Raises EagleError UNSUPPORTED: the batcher's thread has continued without them."""
        raise EagleError(
            ErrorKind.UNSUPPORTED, "a batcher's request takes no sent tokens; use EagleLlama for them"
        )

    def end(self) -> None:
        """See TokenSource."""
        self._inbox.cancel(self._job, "cancelled")
        self._used.reused += self._job.cached

    def _next_output(self) -> BatchOutput | BaseException | None:
        """Waits for the next output.

        The batcher may run ahead of the reader, but not beyond max_tokens, where a completion usually ends.
        (One that would end within a character reads on.) Pieces gather for a while, because a thread that
        wakes up for each of them takes the cores that compute the next one.
        """
        job = self._job
        n_read = self._n_read
        most = job.max_tokens if n_read < job.max_tokens else n_read + 1
        ahead = ROWS_AHEAD if job.keep_logits else AHEAD
        if n_read + ahead // 2 >= job.read_ahead_to < most:
            self._inbox.want(job, min(n_read + ahead, most))
        empty = job.outputs.empty()
        if empty or time.monotonic() - self._told >= self._interval:  # however fast they come
            self._on_wait()
            if empty:
                job.ready.wait(self._interval)
            self._told = time.monotonic()
        return job.outputs.get()
