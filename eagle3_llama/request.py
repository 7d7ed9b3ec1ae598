"""One request of a Batcher: a Llama whose tokens come from the batcher's thread."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import queue
import secrets
import threading
import time
from typing import Any, Callable, Generator, Sequence

import numpy as np

from .errors import EagleError, ErrorKind
from .llama import _GENERATE, _SAMPLER_ARGS, EagleLlama
from .params import EagleParams, StaticTree
from .scores import ScoreRows
from .stats import EagleStats

AHEAD = 64  # tokens


class RequestCancelled(EagleError):
    """The request ended before its text did. reason: cancelled, deadline or shutdown."""

    def __init__(self, reason: str) -> None:
        super().__init__(ErrorKind.BAD_ARGUMENT, {"deadline": "the request's time is up", "shutdown": "the server is shutting down"}.get(
            reason, "the request was cancelled"))
        self.reason = reason


@dataclasses.dataclass
class Piece:
    """What one round brought a request: tokens, where each came from (0 the target, k an accepted draft's position k), and the
    logits they were sampled from, float32 [n_vocab] each, if the request keeps them. before: rows of the prompt."""

    tokens: list[int]
    sources: list[int]
    drafted: int = 0
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    before: list[np.ndarray] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Job:
    """A generation that waits for a slot or has one. The batcher's thread writes it, the request's thread reads `pieces`."""

    prompt: list[int]
    sampler: Any  # llama_cpp's LlamaSampler; kept alive here
    params: EagleParams
    wanted: int  # tokens to generate until the reader has come closer
    limit: int  # tokens that there is room for
    deadline: float | None  # of time.monotonic()
    record: str = "none"  # logits to keep: none, all (of generated tokens), prompt (and of the prompt)
    request_id: str = ""
    processors: "Processors | None" = None
    pieces: "queue.SimpleQueue[Piece | Exception | None]" = dataclasses.field(default_factory=queue.SimpleQueue)
    due: threading.Event = dataclasses.field(default_factory=threading.Event)  # no further pieces come until the reader has come closer
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
        except Exception as e:  # noqa: BLE001 - raised again in the request's thread
            self.error = e
        return scores


class RequestLlama(EagleLlama):
    """One request: every method of llama_cpp.Llama that makes text, run in the caller's thread.

    create_completion and create_chat_completion are llama-cpp-python's own; `generate` takes its tokens from the batcher. Get one
    from Batcher.request(), use it for one generation after the other, close it (or use it as a context manager).
    """

    def __init__(self, batcher: Any, params: EagleParams | None, deadline: float | None, request_id: str) -> None:
        self.__dict__.update(batcher.base.__dict__)  # model, context, templates: shared, owned by the base
        self._stack = contextlib.ExitStack()  # nothing of the base's is ours to free
        self._batcher, self._deadline, self._request_id = batcher, deadline, request_id
        params = params if params is not None else EagleParams()
        self._params = params.chain() if isinstance(params.tree, StaticTree) else params
        self._n_ctx, self._interval = batcher.n_ctx, batcher.settings.interval
        self.input_ids = np.zeros(batcher.n_ctx, np.intc)
        self.n_tokens = self.token_source = self._accepted_out = 0
        self._seed = secrets.randbits(31)  # requests that name no seed differ
        self._rows = self._job = self._limit = self._sampler = None
        self._stats = EagleStats()
        self._sources: list[int] = []
        self._cancelled: str | None = None
        self._told = 0.0  # time.monotonic() of the last on_wait()
        self.on_wait: Callable[[], None] = lambda: None  # called in the request's thread before it waits, and once an interval
        self._usage = dict.fromkeys(("prompt", "completion", "reused"), 0)

    def __enter__(self) -> "RequestLlama":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is under way and frees the slot; may be called twice."""
        self.cancel()
        super().close()

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

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        return self._batcher.base.detokenize_pieces(tokens, prev_tokens, special)

    def _unsupported(self, *_: object, **__: object) -> Any:
        raise EagleError(ErrorKind.UNSUPPORTED, "a batcher's request only generates; use EagleLlama for this")

    eval = sample = save_state = load_state = embed = create_embedding = __getstate__ = _unsupported

    # -- generation ---------------------------------------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        self._limit = kwargs.get("max_tokens")
        try:
            yield from super()._create_completion(*args, **kwargs)
        finally:
            self._limit = None

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, None, None]:
        """As Llama.generate, and the same tokens for the same seed. Waits for a slot."""
        bound = _GENERATE.bind(self, tokens, *args, **kwargs)
        bound.apply_defaults()
        a, prompt = bound.arguments, list(tokens)
        if not prompt or len(prompt) >= self._n_ctx:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"the prompt has {len(prompt)} tokens, expected 1..{self._n_ctx - 1}")
        if self._cancelled:
            raise RequestCancelled(self._cancelled)
        self._mirostat_mu = ctypes.c_float(2.0 * a["mirostat_tau"])
        processors = Processors(a["logits_processor"], prompt) if a["logits_processor"] else None
        sampler = self._init_sampler(**{name: a[name] for name in _SAMPLER_ARGS}, logits_processor=[processors] if processors else None)
        stopping = a["stopping_criteria"]
        record = self._record if self._record != "none" else "all" if stopping is not None else "none"
        row0, keep_all = len(prompt) - 1 if record != "prompt" else 0, self._record != "none"  # a criterion looks at one at a time
        self._rows = ScoreRows(self._n_vocab, row0, keep_all) if record != "none" else None
        room = self._n_ctx - len(prompt)
        job = Job(prompt, sampler, self._params.chain() if processors and self._engine.trees(self._params) else self._params,
                  1, room, self._deadline, record, self._request_id, processors)
        self.input_ids[: len(prompt)] = prompt
        self.n_tokens = len(prompt)
        self._usage["prompt"] += len(prompt)
        self._job = job
        if self._cancelled:  # between the first look and here; from now on cancel() sees the job
            raise RequestCancelled(self._cancelled)
        self._batcher._submit(job)
        try:
            yield from self._take(job, stopping)
        finally:
            self._batcher._cancel(job, "cancelled")
            self._usage["reused"] += job.reused

    def _take(self, job: Job, stopping: Any) -> Generator[int, None, None]:
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
            for row in piece.before:
                self._rows.add(row)
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
                yield token
                if self.n_tokens < self._n_ctx:
                    self.input_ids[self.n_tokens] = token

    def _next_piece(self, job: Job, n_read: int) -> Piece | Exception | None:
        """Lets the batcher run AHEAD tokens before the reader, and to max_tokens: where a completion usually ends, not
        always, for one that stops within a character reads on. Pieces gather for a while: who wakes at each of them takes the
        cores that compute the next."""
        usual = self._limit if self._limit and self._limit > 0 else job.limit
        most = usual if n_read < usual else n_read + 1
        if n_read + AHEAD // 2 >= job.wanted < most:
            self._batcher._want(job, min(n_read + AHEAD, most))
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
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": self._stats.drafted - accepted},
            "prompt_tokens_details": {"cached_tokens": self._usage["reused"]},
        }

    def timings(self) -> dict[str, float]:
        """Seconds of the last generation: queued, prompt (from slot to first token), generation; and its tokens."""
        job = self._job
        if job is None:
            return {"queued": 0.0, "prompt": 0.0, "generation": 0.0, "tokens": 0}
        now = job.ended_at or time.monotonic()
        started, first = job.started_at or now, job.first_at or now
        return {"queued": started - job.queued_at, "prompt": first - started, "generation": now - first, "tokens": job.n_tokens}
