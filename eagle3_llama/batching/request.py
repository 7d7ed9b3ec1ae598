"""One request of a Batcher: a Llama whose tokens come from the batcher's thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from ..common.sampling_budget import SamplingBudget
from ..errors import EagleError, ErrorKind
from ..llama.completion_options import CompletionOptions
from ..llama.generation import GENERATE_SIGNATURE, GenerateCall, GeneratingLlama
from ..llama.infill import echoed_logprobs
from ..llama.loop import Output
from ..llama.ownership import Claim, Ownership
from ..llama.scores import ScoreRows
from ..llama.text import Text
from ..llama.usage import TokenUsage
from ..runtime.params import EagleParams, check_int
from ..runtime.stats import EagleStats
from .candidates import Candidates
from .inbox import Inbox
from .job import BatchOutput, Job, RequestCancelled, RequestProcessors
from .logprobs import Logprobs, TopRow
from .model import BatchModel
from .model_parts import ModelParts
from .samplers import LazyGrammar, with_bias, with_grammar
from .tokens import BatchTokens


class RequestLlama(ModelParts, GeneratingLlama):
    """One request. It has every method of llama_cpp.Llama that makes text, and runs in the caller's thread.

    create_completion and create_chat_completion are llama-cpp-python's own; `generate` and `complete` take
    their tokens from the batcher. Get one from Batcher.request(), use it for one generation after the other,
    and close it (or use it as a context manager).
    """

    def __init__(
        self,
        base: BatchModel,
        inbox: Inbox,
        params: EagleParams | None,
        deadline: float | None,
        request_id: str,
        client: str,
        slot: int | None = None,
    ) -> None:
        if slot is not None:
            check_int("slot", slot, 0, base.settings.n_parallel - 1)
        self._only_slot = slot
        self.base, self._inbox = base, inbox
        self._deadline = deadline
        self._request_id = request_id
        self._client = client
        self._owner = Ownership(base.calls)
        self._params = params if params is not None else EagleParams(text=base.settings.text)
        self._n_ctx = base.settings.n_ctx
        self._sampler = None
        self._bytes_of = base._bytes_of
        self._text = Text(np.zeros(base.settings.n_ctx, np.intc), base.scores)
        self._seed = secrets.randbits(31)  # requests that name no seed differ
        self._job: Job | None = None  # the last generation's
        self._writer: Logprobs | None = None  # the running generation's
        self._stats = EagleStats()
        self._used = TokenUsage()
        self._positions: list[int] = []
        self._sources: list[str] = []
        self._cancelled: str | None = None
        self.cuts_characters = False  # whether max_tokens does; llama-cpp-python awaits their ends
        # called in the request's thread before it waits, and once an interval
        self.on_wait: Callable[[], None] = lambda: None

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
            self._inbox.cancel(job, reason)

    def _raise_cancelled(self) -> None:
        if self._cancelled:
            raise RequestCancelled(self._cancelled)

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

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        """Same as Llama.tokenize. Waits while as many others tokenize as may do so at a time."""
        with self.base.tokenizing:
            self._raise_cancelled()
            return self.base.tokenize(*args, **kwargs)

    def show_tokens(self, names: Sequence[str]) -> None:
        """Writes these special tokens into the texts that follow; others are left out of them."""
        found = (self.tokenize(name.encode(), add_bos=False, special=True) for name in names)
        self._token_bytes.shown = frozenset(ids[0] for ids in found if len(ids) == 1)

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

    def complete(
        self, prompt: list[int], options: CompletionOptions, **sampling: Any
    ) -> Generator[int, None, None]:
        """The tokens of generate() with `sampling`, as the options ask for them."""
        self._options = options
        try:
            yield from self.generate(prompt, **sampling)
        finally:
            self._leave(options)

    def read(self, prompt: list[int], options: CompletionOptions) -> None:
        """Decodes the prompt, for the rows that the options keep of it. Generates nothing."""
        options.max_tokens = 1
        bound = GENERATE_SIGNATURE.bind(self, prompt, temp=0.0)
        bound.apply_defaults()
        source = self._tokens_from(
            GenerateCall(list(prompt), bound.arguments, Claim("a prompt", False), options)
        )
        try:
            output = source.prompt()
            while output is not None and not output.round.tokens:
                output = source.round()
        finally:
            source.end()

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Llama's, except for logprobs and logit_bias, for which it is slow: it loops over each row."""
        prompt, logprobs, bias = (kwargs.pop(name, None) for name in ("prompt", "logprobs", "logit_bias"))
        echo = bool(kwargs.get("echo"))
        stream = bool(kwargs.get("stream"))
        writer = None
        if logprobs is not None and echo and kwargs.get("suffix") is not None:
            raise echoed_logprobs()
        if logprobs is not None:
            writer = Logprobs(self.detokenize, self.token_bos(), 0 if echo else len(prompt))
        options = CompletionOptions(bias=bias or {}, n_top=logprobs, writer=writer)
        options.echo = writer is not None and echo
        self._options = options
        begun = not (echo and stream)
        try:
            for item in super()._create_completion(*args, prompt=prompt, **kwargs):
                if not begun:
                    begun = True
                    held = self.take_report()  # what is counted belongs to the item
                    yield _echo(item, prompt, options)
                    self.give_back_report(held)
                if writer is not None:
                    self._add_logprobs(item["choices"][0], options, writer, stream)
                yield item
        finally:
            self._leave(options)

    @staticmethod
    def _add_logprobs(
        choice: dict[str, Any], options: CompletionOptions, writer: Logprobs, stream: bool
    ) -> None:
        if stream:
            choice["logprobs"] = writer.chunk(choice["text"]) if choice["finish_reason"] is None else None
            return
        choice["logprobs"] = writer.whole(options.before, options.echo)

    def _tokens_from(self, call: GenerateCall) -> BatchTokens:
        options = call.options
        self._writer = options.writer
        if self._job is not None:  # it was left half way and cannot continue; it may have the only slot
            self._inbox.cancel(self._job, "cancelled")
        job = self._make_job(call)
        self._used.prompt += len(job.prompt)
        self._job = job
        self._raise_cancelled()  # since _make_job() looked; from now on cancel() sees the job
        return BatchTokens(
            self._inbox,
            job,
            self._text,
            self._used,
            self._stats,
            options.before,
            lambda: self.on_wait(),
            self.base.settings.interval,
        )

    def _make_job(self, call: GenerateCall) -> Job:
        prompt, options = call.prompt, call.options
        a = call.arguments
        if not prompt or len(prompt) >= self._n_ctx:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, f"the prompt has {len(prompt)} tokens, expected 1..{self._n_ctx - 1}"
            )
        self._raise_cancelled()
        processors = RequestProcessors(a["logits_processor"], prompt) if a["logits_processor"] else None
        lazy = a["grammar"] if isinstance(a["grammar"], LazyGrammar) else None
        sampler = self._new_sampler({**a, "grammar": None} if lazy else a, processors)
        if lazy is not None or options.thoughts is not None:
            sampler = with_grammar(sampler, self._model, lazy, options.thoughts)
        if options.bias:
            sampler = with_bias(sampler, options.bias, self._n_vocab)
        stopping = call.stopping is not None  # it reads one row at a time
        self._text.rows = ScoreRows(self._n_vocab, len(prompt) - 1, False) if stopping else None
        if options.echo:
            options.before.append(TopRow(prompt[0], 0.0, np.empty(0, np.int32), np.empty(0, np.float32)))
        room = self._n_ctx - len(prompt)
        limit = options.max_tokens if self.cuts_characters else None
        return Job(
            prompt,
            sampler,
            self._params_for(processors is not None, self.base.engine),
            read_ahead_to=1,
            room=min(room + 1, limit or room + 1),  # the last token needs no place
            max_tokens=options.max_tokens or room,
            deadline=self._deadline,
            keep_logits=stopping,
            n_top=options.n_top,
            candidates=Candidates(a, options.bias) if options.post_sampling else None,
            echo=options.echo,
            request_id=self._request_id,
            client=self._client,
            only_slot=self._only_slot,
            processors=processors,
            budget=SamplingBudget(self._n_vocab) if a["grammar"] and processors is None else None,
        )

    def _count_token(self, output: Output, i: int) -> None:
        super()._count_token(output, i)
        out = output.round
        if not self.base.is_end(out.tokens[i]):
            self._used.completion += 1
            self._positions.append(out.positions[i])
            self._sources.append(out.sources[i])
            if self._writer is not None and isinstance(output, BatchOutput) and output.tops:
                self._writer.rows.append(output.tops[i])

    # -- what the request did -----------------------------------------------------------------------------

    def take_report(self) -> tuple[list[int], list[str]]:
        """draft_position and draft_source of each token since the last call."""
        out, self._positions, self._sources = (self._positions, self._sources), [], []
        return out

    def give_back_report(self, report: tuple[list[int], list[str]]) -> None:
        """The next take_report() begins with this one."""
        self._positions[:0], self._sources[:0] = report

    def stopped_by(self, stops: Sequence[str]) -> str | None:
        """Which of its stop strings has ended the last completion; None if a token that ends texts has."""
        prompt, tokens = self._answered
        if not tokens or self.base.is_end(tokens[-1]):
            return None
        text = self.detokenize(tokens, prev_tokens=prompt)
        return next((s for s in stops if s.encode() in text), None)

    def used(self) -> TokenUsage:
        """Tokens of all generations of this request."""
        return self._used.copy()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for all generations of this request."""
        return self._used.body()

    @property
    def slot(self) -> int:
        """The slot of the last generation; -1 if it has had none."""
        return self._job.slot if self._job is not None else -1

    def waits(self) -> dict[str, float] | None:
        """Seconds of the last generation, whether or not it was completed; None before the first one.

        queued: until it had a slot. first: until its first token. If there was none, until it ended. alone:
        of the batcher's thread, for it alone.
        """
        if self._job is None:
            return None
        t = self.timings()
        return {"queued": t["queued"], "first": t["queued"] + t["prompt"], "alone": self._job.times.alone}

    def timings(self) -> dict[str, float]:
        """Of the last generation: seconds queued, prompt (slot to first token), generation; and tokens.

        prompt_tokens: those of the prompt. cached: those of them that were not decoded.
        """
        job = self._job
        if job is None:
            return dict.fromkeys(("queued", "prompt", "generation", "tokens", "prompt_tokens", "cached"), 0)
        counts = {"tokens": job.n_tokens, "prompt_tokens": len(job.prompt), "cached": job.cached}
        return {**job.times.spans(), **counts}


def _echo(item: dict[str, Any], prompt: str, options: CompletionOptions) -> dict[str, Any]:
    """A chunk with the prompt, which llama-cpp-python leaves out of streams. item: the stream's first."""
    logprobs = options.writer.echo(options.before) if options.writer is not None else None
    choice = {**item["choices"][0], "text": prompt, "logprobs": logprobs, "finish_reason": None}
    return {**item, "choices": [choice]}


def _unsupported(what: str) -> EagleError:
    return EagleError(ErrorKind.UNSUPPORTED, f"a batcher's request only generates; use EagleLlama for {what}")
