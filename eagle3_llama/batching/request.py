"""One request of a Batcher: a Llama whose tokens come from the batcher's thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.generation import GeneratingLlama, Piece, prediction_details
from ..llama.ownership import Ownership
from ..runtime.params import EagleParams
from ..runtime.stats import EagleStats
from .job import Asked, BatchPiece, Job
from .logprobs import Logprobs
from .tokens import BatchTokens

# What a request reads of the batcher's model. The model owns it.
SHARED = frozenset(
    "_model _ctx _batch _candidates _n_vocab _token_nl _token_eos _logits_all _is_recurrent _is_hybrid"
    " _chat_handlers _flash_attn _context_params model_params model_path metadata tokenizer_ chat_format"
    " chat_handler cache draft_model verbose spm_infill last_n_tokens_size n_batch n_threads n_threads_batch"
    " scores lora_base lora_path lora_scale numa tensor_split kv_overrides".split()
)


class RequestLlama(GeneratingLlama):
    """One request. It has every method of llama_cpp.Llama that makes text, and runs in the caller's thread.

    create_completion and create_chat_completion are llama-cpp-python's own; `generate` takes its tokens from
    the batcher. Get one from Batcher.request(), use it for one generation after the other, and close it (or
    use it as a context manager).
    """

    def __init__(
        self, batcher: Any, params: EagleParams | None, deadline: float | None, request_id: str
    ) -> None:
        self._shared, self._owner = batcher.base, Ownership()
        self._batcher, self._deadline, self._request_id = batcher, deadline, request_id
        self._params = params if params is not None else EagleParams()
        self._n_ctx, self._interval = batcher.n_ctx, batcher.settings.interval
        self.input_ids = np.zeros(batcher.n_ctx, np.intc)
        self.n_tokens = self.token_source = self._drafted_out = self._accepted_out = 0
        self._seed = secrets.randbits(31)  # requests that name no seed differ
        self._rows = self._sampler = None
        self._job: Job | None = None  # of the last generation
        self._asked = Asked()  # of a completion whose generation begins with its next step
        self._writer: Logprobs | None = None  # of the running generation
        self._stats = EagleStats()
        self._sources: list[int] = []
        self._cancelled: str | None = None
        # called in the request's thread before it waits, and once an interval
        self.on_wait: Callable[[], None] = lambda: None
        self._usage = dict.fromkeys(("prompt", "completion", "reused"), 0)

    def __getattr__(self, name: str) -> Any:
        if name in SHARED:
            return getattr(self._shared, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> RequestLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends a running generation and frees the slot. May be called twice, and from any thread."""
        self.cancel()

    def cancel(self, reason: str = "cancelled") -> None:
        """Ends generation within a round, from any thread."""
        self._cancelled = self._cancelled or reason
        if (job := self._job) is not None:
            self._batcher._cancel(job, reason)

    @property
    def stats(self) -> EagleStats:
        """Counters of this request. The batcher keeps the times."""
        return self._stats

    @property
    def eagle_params(self) -> EagleParams:
        return self._params

    def n_ctx(self) -> int:
        """Tokens that one request may hold."""
        return self._n_ctx

    def reset(self) -> None:
        """Forgets the text. The slots' contents are the batcher's."""
        self.n_tokens = 0

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        return self._batcher.base.detokenize_pieces(tokens, prev_tokens, special)

    # -- what needs a context of its own ------------------------------------------------------------------

    def eval(self, *_: Any, **__: Any) -> None:
        raise _unsupported("eval()")

    def sample(self, *_: Any, **__: Any) -> int:
        raise _unsupported("sample()")

    def embed(self, *_: Any, **__: Any) -> Any:
        raise _unsupported("embed()")

    def create_embedding(self, *_: Any, **__: Any) -> Any:
        raise _unsupported("create_embedding()")

    def save_state(self) -> Any:
        raise _unsupported("save_state()")

    def load_state(self, *_: Any) -> None:
        raise _unsupported("load_state()")

    def __getstate__(self) -> Any:
        raise _unsupported("pickling")

    # -- generation ---------------------------------------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Llama's, except for logprobs and logit_bias, for which it is slow: it loops over each row."""
        prompt, logprobs, bias = (kwargs.pop(name, None) for name in ("prompt", "logprobs", "logit_bias"))
        echo, stream = bool(kwargs.get("echo")), bool(kwargs.get("stream"))
        writer = None
        if logprobs is not None:
            writer = Logprobs(self.detokenize, self.token_bos(), 0 if echo else len(prompt))
        whole = writer is not None and echo and not stream
        asked = Asked(kwargs.get("max_tokens"), bias or {}, logprobs, whole, writer)
        self._asked = asked
        try:
            for item in super()._create_completion(*args, prompt=prompt, **kwargs):
                if writer is not None:
                    self._add_logprobs(item["choices"][0], asked, writer, stream)
                yield item
        finally:
            if self._asked is asked:  # its generation did not begin
                self._asked = Asked()

    @staticmethod
    def _add_logprobs(choice: dict[str, Any], asked: Asked, writer: Logprobs, stream: bool) -> None:
        if stream:
            choice["logprobs"] = writer.chunk(choice["text"]) if choice["finish_reason"] is None else None
            return
        choice["logprobs"] = out = writer.whole(asked.before)
        if asked.echo and out["tokens"]:  # OpenAI gives null for the first token, even after a BOS
            out["token_logprobs"][0] = out["top_logprobs"][0] = None

    def _tokens_from(self) -> BatchTokens:
        asked, self._asked = self._asked, Asked()
        self._writer = asked.writer
        return BatchTokens(self, asked)

    def _count_token(self, piece: Piece, i: int) -> None:
        super()._count_token(piece, i)
        if not self._batcher.base.is_end(piece.tokens[i]):
            self._usage["completion"] += 1
            self._sources.append(piece.sources[i])
            if self._writer is not None and isinstance(piece, BatchPiece) and piece.tops:
                self._writer.rows.append(piece.tops[i])

    # -- what the request did -----------------------------------------------------------------------------

    def take_sources(self) -> list[int]:
        """token_source of each token since the last call."""
        out, self._sources = self._sources, []
        return out

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for all generations of this request."""
        prompt, completion = self._usage["prompt"], self._usage["completion"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": prediction_details(self._stats.drafted, self._accepted_out),
            "prompt_tokens_details": {"cached_tokens": self._usage["reused"]},
        }

    def waits(self) -> dict[str, float] | None:
        """Seconds of the last generation, whether or not it was completed; None before the first one.

        queued: until it had a slot. first: until its first token. If there was none, until it ended.
        """
        if self._job is None:
            return None
        t = self.timings()
        return {"queued": t["queued"], "first": t["queued"] + t["prompt"]}

    def timings(self) -> dict[str, float]:
        """Of the last generation: seconds queued, prompt (slot to first token), generation; and tokens."""
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


def _unsupported(what: str) -> EagleError:
    return EagleError(ErrorKind.UNSUPPORTED, f"a batcher's request only generates; use EagleLlama for {what}")
