"""Tokens of a generation in a slot of a Batcher."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.generation import Generation, Sent
from ..llama.scores import ScoreRows
from .job import Asked, BatchPiece, Job, RequestCancelled, RequestProcessors
from .logprobs import TopRow
from .samplers import with_bias

if TYPE_CHECKING:
    from .request import RequestLlama

AHEAD = 64  # tokens
ROWS_AHEAD = 8  # tokens, if a row of logits comes with each


class BatchTokens:
    """The token source of a RequestLlama: the batcher's thread, which runs ahead of the reader."""

    def __init__(self, llm: RequestLlama, asked: Asked) -> None:
        self._llm, self._asked, self._batcher = llm, asked, llm._batcher
        self._told = 0.0  # time.monotonic() of the last on_wait()

    def pieces(self, generation: Generation) -> Generator[BatchPiece, Sent, None]:
        """See TokenSource.pieces. Waits for a slot. Raises EagleError UNSUPPORTED for sent tokens."""
        llm = self._llm
        if llm._job is not None:  # it was left half way and cannot continue; it may have the only slot
            self._batcher._cancel(llm._job, "cancelled")
        job = self._make_job(generation)
        llm.input_ids[: len(job.prompt)] = job.prompt
        llm.n_tokens = len(job.prompt)
        llm._usage["prompt"] += len(job.prompt)
        llm._job = job
        if llm._cancelled:  # since _make_job() looked; from now on cancel() sees the job
            raise RequestCancelled(llm._cancelled)
        self._batcher._submit(job)
        n_read = 0
        try:
            while (piece := self._next_piece(job, n_read)) is not None:
                if isinstance(piece, Exception):
                    try:
                        raise piece
                    finally:
                        del piece  # its traceback refers to this frame: else they would form a cycle
                n_read += len(piece.tokens)
                if piece.levels is not None:
                    n_accepted = sum(source > 0 for source in piece.sources)
                    llm.stats.count_round(piece.drafted, n_accepted, piece.levels)
                self._asked.before += piece.before
                if (yield piece):  # the batcher's thread has continued without them
                    raise EagleError(
                        ErrorKind.UNSUPPORTED,
                        "a batcher's request takes no sent tokens; use EagleLlama for them",
                    )
        finally:
            self._batcher._cancel(job, "cancelled")
            llm._usage["reused"] += job.reused

    def _make_job(self, generation: Generation) -> Job:
        llm, asked, prompt, a = self._llm, self._asked, generation.prompt, generation.arguments
        if not prompt or len(prompt) >= llm._n_ctx:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, f"the prompt has {len(prompt)} tokens, expected 1..{llm._n_ctx - 1}"
            )
        if llm._cancelled:
            raise RequestCancelled(llm._cancelled)
        processors = RequestProcessors(a["logits_processor"], prompt) if a["logits_processor"] else None
        sampler = llm._new_sampler(a, processors)
        if asked.bias:
            sampler = with_bias(sampler, asked.bias, llm._n_vocab)
        stopping = generation.stopping is not None  # it reads one row at a time
        llm._rows = ScoreRows(llm._n_vocab, len(prompt) - 1, False) if stopping else None
        if asked.echo and prompt[0] != llm.token_bos():
            asked.before.append(TopRow(prompt[0], 0.0, np.empty(0, np.int32), np.empty(0, np.float32)))
        room = llm._n_ctx - len(prompt)
        return Job(
            prompt,
            sampler,
            llm._params_for(processors is not None, self._batcher._engine),
            wanted=1,
            limit=room,
            deadline=llm._deadline,
            rows=stopping,
            top=asked.top,
            echo=asked.echo,
            request_id=llm._request_id,
            processors=processors,
            usual=asked.limit if asked.limit and asked.limit > 0 else room,
        )

    def _next_piece(self, job: Job, n_read: int) -> BatchPiece | Exception | None:
        """Waits for the next piece. n_read: number of tokens that were read.

        The batcher may run ahead of the reader, but not beyond max_tokens, where a completion usually ends.
        (One that would end within a character reads on.) Pieces gather for a while, because a thread that
        wakes up for each of them takes the cores that compute the next one.
        """
        most = job.usual if n_read < job.usual else n_read + 1
        ahead = ROWS_AHEAD if job.rows else AHEAD
        if n_read + ahead // 2 >= job.wanted < most:
            self._batcher._want(job, min(n_read + ahead, most))
        interval, empty = self._llm._interval, job.pieces.empty()
        if empty or time.monotonic() - self._told >= interval:  # however fast they come
            self._llm.on_wait()
            if empty:
                job.due.wait(interval)
            self._told = time.monotonic()
        return job.pieces.get()
