"""One request of a Batcher: a Llama whose tokens come from the batcher's thread."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.eagle_llama import _GENERATE, _SAMPLER_ARGS, EagleLlama
from ..llama.ownership import Claim, Ownership
from ..llama.scores import ScoreRows
from ..runtime.params import EagleParams
from ..runtime.stats import EagleStats
from .logprobs import Logprobs, TopRow
from .samplers import with_bias

AHEAD = 64  # tokens
ROWS_AHEAD = 8  # tokens, where a row of logits comes with each


class RequestCancelled(EagleError):
    """The request ended before its text did. reason: cancelled, deadline or shutdown."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            ErrorKind.BAD_ARGUMENT,
            {"deadline": "the request's time is up", "shutdown": "the server is shutting down"}.get(
                reason, "the request was cancelled"
            ),
        )
        self.reason = reason


@dataclasses.dataclass
class Piece:
    """What one round brought a request: tokens, and where each came from (0 the target, k an accepted draft's position k). rows:
    the logits they were sampled from, float32 [n_vocab] each, for a request that looks at them. tops: these rows' likeliest tokens,
    before: those of the prompt's rows, for one that asks for logprobs."""

    tokens: list[int]
    sources: list[int]
    drafted: int = 0
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    tops: list[TopRow] = dataclasses.field(default_factory=list)
    before: list[TopRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Asked:
    """What a completion asks of its generation, beside a generation's own arguments. before, writer: what it brings for logprobs."""

    limit: int | None = None  # max_tokens
    bias: dict[int, float] = dataclasses.field(default_factory=dict)
    top: int | None = None
    echo: bool = False
    writer: Logprobs | None = None
    before: list[TopRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Job:
    """A generation that waits for a slot or has one. The batcher's thread writes it, the request's thread reads `pieces`."""

    prompt: list[int]
    sampler: Any  # llama_cpp's LlamaSampler; kept alive here
    params: EagleParams
    wanted: int  # tokens to generate until the reader has come closer
    limit: int  # tokens that there is room for
    deadline: float | None  # of time.monotonic()
    rows: bool = False  # whether the reader looks at the logits
    top: int | None = None  # likeliest tokens of each row to keep, for logprobs
    echo: bool = False  # of the prompt's rows, too
    request_id: str = ""
    processors: Processors | None = None
    usual: int = 0  # tokens at which a completion usually ends
    pieces: queue.SimpleQueue[Piece | Exception | None] = dataclasses.field(default_factory=queue.SimpleQueue)
    due: threading.Event = dataclasses.field(
        default_factory=threading.Event
    )  # no further pieces come until the reader has come closer
    cancelled: str | None = None  # a reason
    prompt_at: int = 0  # prompt tokens that the slot holds
    reused: int = 0
    token: int = -1  # sampled last
    n_tokens: int = 0
    queued_at: float = dataclasses.field(default_factory=time.monotonic)
    started_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None

    def wants_more(self) -> bool:
        return self.prompt_at < len(self.prompt) or self.n_tokens < self.wanted


class Processors:
    """Logits processors as the batcher's thread runs them: they see the text before their row, and their errors are kept."""

    def __init__(self, processors: Sequence[Any], prompt: Sequence[int]) -> None:
        self.processors, self.ids, self.error = processors, list(prompt), None
        self._tokens: list[int] = []
        self._row = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """The next rows follow ids and the first of tokens, then the second too, and so on."""
        self._tokens, self._row = list(tokens), 1

    def __call__(self, _: Any, scores: Any) -> Any:
        if self.error is not None:
            return scores
        ids = np.array([*self.ids, *self._tokens[: self._row]], np.intc)
        self._row += 1
        try:
            for processor in self.processors:
                scores[:] = processor(ids, scores)
        except Exception as e:
            self.error = e
        return scores


class RequestLlama(EagleLlama):
    """One request: every method of llama_cpp.Llama that makes text, run in the caller's thread.

    create_completion and create_chat_completion are llama-cpp-python's own; `generate` takes its tokens from the batcher. Get one
    from Batcher.request(), use it for one generation after the other, close it (or use it as a context manager).
    """

    def __init__(
        self, batcher: Any, params: EagleParams | None, deadline: float | None, request_id: str
    ) -> None:
        self.__dict__.update(batcher.base.__dict__)  # model, context, templates: shared, owned by the base
        self._stack, self._owner = (
            contextlib.ExitStack(),
            Ownership(),
        )  # nothing of the base's is ours to free
        self._batcher, self._deadline, self._request_id = batcher, deadline, request_id
        self._params = params if params is not None else EagleParams()
        self._n_ctx, self._interval = batcher.n_ctx, batcher.settings.interval
        self.input_ids = np.zeros(batcher.n_ctx, np.intc)
        self.n_tokens = self.token_source = self._drafted_out = self._accepted_out = 0
        self._seed = secrets.randbits(31)  # requests that name no seed differ
        self._rows = self._job = self._sampler = None
        self._asked = Asked()  # of a completion whose generation begins with its next step
        self._stats = EagleStats()
        self._sources: list[int] = []
        self._cancelled: str | None = None
        self._told = 0.0  # time.monotonic() of the last on_wait()
        self.on_wait: Callable[[], None] = lambda: (
            None
        )  # called in the request's thread before it waits, and once an interval
        self._usage = dict.fromkeys(("prompt", "completion", "reused"), 0)

    def __enter__(self) -> RequestLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is under way and frees the slot; may be called twice, and from any thread."""
        self.cancel()
        self._stack.close()

    def cancel(self, reason: str = "cancelled") -> None:
        """Ends generation within a round, from any thread."""
        self._cancelled = self._cancelled or reason
        if (job := self._job) is not None:
            self._batcher._cancel(job, reason)

    # -- what EagleLlama asks itself ----------------------------------------------------------------------

    @property
    def stats(self) -> EagleStats:
        """This request's; times are the batcher's to keep."""
        return self._stats

    @property
    def eagle_params(self) -> EagleParams:
        return self._params

    def n_ctx(self) -> int:
        """Tokens that one request may hold."""
        return self._n_ctx

    def reset(self) -> None:
        """Forgets the text; what the slots hold is the batcher's."""
        self.n_tokens = 0

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        return self._batcher.base.detokenize_pieces(tokens, prev_tokens, special)

    def _unsupported(self, *_: object, **__: object) -> Any:
        raise EagleError(ErrorKind.UNSUPPORTED, "a batcher's request only generates; use EagleLlama for this")

    eval = sample = save_state = load_state = embed = create_embedding = __getstate__ = _unsupported

    # -- generation ---------------------------------------------------------------------------------------

    def _create_completion(
        self, prompt: Any, logprobs: int | None = None, logit_bias: Any = None, **kwargs: Any
    ) -> Any:
        """Llama's but for logprobs and logit_bias, for which it would go through the vocabulary in Python at each row."""
        echo, stream = bool(kwargs.get("echo")), bool(kwargs.get("stream"))
        writer = (
            Logprobs(self.detokenize, self.token_bos(), 0 if echo else len(prompt))
            if logprobs is not None
            else None
        )
        asked = Asked(
            kwargs.get("max_tokens"),
            logit_bias or {},
            logprobs,
            logprobs is not None and echo and not stream,
            writer,
        )
        self._asked = asked
        try:
            for item in super()._create_completion(prompt=prompt, **kwargs):
                if writer is not None:
                    self._add_logprobs(item["choices"][0], asked, stream)
                yield item
        finally:
            if self._asked is asked:  # its generation did not begin
                self._asked = Asked()

    @staticmethod
    def _add_logprobs(choice: dict[str, Any], asked: Asked, stream: bool) -> None:
        if stream:
            choice["logprobs"] = (
                asked.writer.chunk(choice["text"]) if choice["finish_reason"] is None else None
            )
            return
        choice["logprobs"] = out = asked.writer.whole(asked.before)
        if (
            asked.echo and out["tokens"]
        ):  # nothing comes before the first, and OpenAI says null even behind a beginning-of-text
            out["token_logprobs"][0] = out["top_logprobs"][0] = None

    def _generate(
        self, claim: Claim, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, None, None]:
        """What generate() does with its claim. Waits for a slot."""
        asked, self._asked = self._asked, Asked()
        if self._job is not None:
            self._batcher._cancel(
                self._job, "cancelled"
            )  # one that was left half way cannot go on, and may have the only slot
        bound = _GENERATE.bind(self, tokens, *args, **kwargs)
        bound.apply_defaults()
        a, prompt = bound.arguments, list(tokens)
        if not prompt or len(prompt) >= self._n_ctx:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, f"the prompt has {len(prompt)} tokens, expected 1..{self._n_ctx - 1}"
            )
        if self._cancelled:
            raise RequestCancelled(self._cancelled)
        self._mirostat_mu = ctypes.c_float(2.0 * a["mirostat_tau"])
        processors = Processors(a["logits_processor"], prompt) if a["logits_processor"] else None
        sampler = self._init_sampler(
            **{name: a[name] for name in _SAMPLER_ARGS}, logits_processor=[processors] if processors else None
        )
        stopping = a["stopping_criteria"]
        if asked.bias:
            sampler = with_bias(sampler, asked.bias, self._n_vocab)
        self._rows = (
            ScoreRows(self._n_vocab, len(prompt) - 1, False) if stopping is not None else None
        )  # it looks at one at a time
        if asked.echo and prompt[0] != self.token_bos():
            asked.before.append(TopRow(prompt[0], 0.0, np.empty(0, np.int32), np.empty(0, np.float32)))
        room = self._n_ctx - len(prompt)
        job = Job(
            prompt,
            sampler,
            self._params.chain() if processors and self._engine.trees(self._params) else self._params,
            1,
            room,
            self._deadline,
            stopping is not None,
            asked.top,
            asked.echo,
            self._request_id,
            processors,
            usual=asked.limit if asked.limit and asked.limit > 0 else room,
        )
        self.input_ids[: len(prompt)] = prompt
        self.n_tokens = len(prompt)
        self._usage["prompt"] += len(prompt)
        self._job = job
        if self._cancelled:  # between the first look and here; from now on cancel() sees the job
            raise RequestCancelled(self._cancelled)
        self._batcher._submit(job)
        try:
            yield from self._take(job, asked, stopping)
        finally:
            self._batcher._cancel(job, "cancelled")
            self._usage["reused"] += job.reused

    def _take(self, job: Job, asked: Asked, stopping: Any) -> Generator[int, None, None]:
        """Tokens of the pieces as they come; n_tokens always counts what precedes the token yielded."""
        first, n_read = True, 0
        while (piece := self._next_piece(job, n_read)) is not None:
            if isinstance(piece, Exception):
                try:
                    raise piece
                finally:
                    del piece  # its traceback holds this frame, which would hold it
            n_read += len(piece.tokens)
            self._stats.count_round(piece.drafted, len(piece.tokens))
            self._drafted_out += piece.drafted
            asked.before += piece.before
            for i, (token, source) in enumerate(zip(piece.tokens, piece.sources)):
                if not first:
                    self.n_tokens += 1
                first = False
                scores = self._rows.add(piece.rows[i]) if self._rows is not None else None
                if stopping is not None and stopping(self._input_ids, scores):
                    return
                self.token_source = source
                self._accepted_out += source > 0
                self._stats.tokens += 1
                if not self._batcher.base.is_end(token):
                    self._usage["completion"] += 1
                    self._sources.append(source)
                    if piece.tops and asked.writer is not None:
                        asked.writer.rows.append(piece.tops[i])
                yield token
                if self.n_tokens < self._n_ctx:
                    self.input_ids[self.n_tokens] = token

    def _next_piece(self, job: Job, n_read: int) -> Piece | Exception | None:
        """Lets the batcher run ahead of the reader by so many tokens, and to max_tokens: where a completion usually ends, not
        always, for one that stops within a character reads on. Pieces gather for a while: who wakes at each of them takes the
        cores that compute the next."""
        most = job.usual if n_read < job.usual else n_read + 1
        ahead = ROWS_AHEAD if job.rows else AHEAD
        if n_read + ahead // 2 >= job.wanted < most:
            self._batcher._want(job, min(n_read + ahead, most))
        empty = job.pieces.empty()
        if empty or time.monotonic() - self._told >= self._interval:  # however fast they come
            self.on_wait()
            if empty:
                job.due.wait(self._interval)
            self._told = time.monotonic()
        return job.pieces.get()

    # -- what the request did -----------------------------------------------------------------------------

    def take_sources(self) -> list[int]:
        """token_source of each token since the last call."""
        out, self._sources = self._sources, []
        return out

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, of all generations of this request."""
        prompt, completion, accepted = self._usage["prompt"], self._usage["completion"], self._accepted_out
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self._stats.drafted - accepted,
            },
            "prompt_tokens_details": {"cached_tokens": self._usage["reused"]},
        }

    def waits(self) -> dict[str, float] | None:
        """Seconds of the last generation, whether or not it came to its end: queued until it had a slot, first until its first
        token; where these never came, until it ended. None before it began."""
        if self._job is None:
            return None
        t = self.timings()
        return {"queued": t["queued"], "first": t["queued"] + t["prompt"]}

    def timings(self) -> dict[str, float]:
        """Seconds of the last generation: queued, prompt (from slot to first token), generation; and its tokens."""
        job = self._job
        if job is None:
            return {"queued": 0.0, "prompt": 0.0, "generation": 0.0, "tokens": 0}
        now = job.ended_at or time.monotonic()
        started, first = job.started_at or now, job.first_at or now
        return {
            "queued": started - job.queued_at,
            "prompt": first - started,
            "generation": now - first,
            "tokens": job.n_tokens,
        }
