"""The generation loop of EagleLlama and of a batcher's requests. Their token sources differ."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import EagleError, ErrorKind
from ..runtime.binding import Llama
from ..runtime.engine import Engine
from ..runtime.params import EagleParams
from ..runtime.stats import EagleStats
from .flash import FlashLlama
from .ownership import Claim, Ownership
from .scores import ScoreRows

GENERATE = inspect.signature(Llama.generate)
SAMPLER_ARGS = set(inspect.signature(Llama._init_sampler).parameters) - {"self", "logits_processor"}
GENERATION = "another generation"

Sent = Sequence[int] | None


@dataclasses.dataclass
class Piece:
    """The tokens of one round.

    sources: for each token its position in the accepted draft, 0 if the target sampled it. drafted: number
    of draft tokens. logits: returns the row, float32 [n_vocab], that the i-th token was sampled from.
    """

    tokens: list[int]
    sources: list[int]
    drafted: int = 0
    logits: Callable[[int], np.ndarray] | None = None


@dataclasses.dataclass
class Generation:
    """One call of generate(). arguments: those of Llama.generate, with their defaults."""

    prompt: list[int]
    arguments: dict[str, Any]
    claim: Claim

    @property
    def stopping(self) -> Any:
        return self.arguments["stopping_criteria"]


class TokenSource(Protocol):
    """Where the tokens of a generation come from."""

    def pieces(self, generation: Generation) -> Generator[Piece, Sent, None]:
        """Prepares the prompt and yields the tokens.

        The model's n_tokens is the length of the prompt when the first piece is yielded. A caller of
        generate() may send tokens; then the source receives the last token yielded, followed by these.
        """


class GuardedProcessors:
    """Logits processors whose errors are kept, because llama-cpp-python loses exceptions raised in a sampler.

    text: returns the token ids before the row, int32 [n].
    """

    catches: type[BaseException] = BaseException

    def __init__(self, processors: Sequence[Any], text: Callable[[], np.ndarray]) -> None:
        self.processors, self.text = processors, text
        self.error: BaseException | None = None

    def __call__(self, _: Any, scores: Any) -> Any:
        if self.error is not None:
            return scores
        ids = self.text()
        try:
            for processor in self.processors:
                scores[:] = processor(ids, scores)
        except self.catches as e:
            self.error = e
        return scores

    def raise_error(self) -> None:
        """Raises the error once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class GeneratingLlama(FlashLlama):
    """A Llama whose generate() takes its tokens from a TokenSource. Everything else makes text from these."""

    _owner: Ownership
    _params: EagleParams
    _rows: ScoreRows | None
    _sampler: Any
    _drafted_out: int  # draft tokens of all generations
    _accepted_out: int  # accepted draft tokens that reached the caller
    token_source: int  # of the last token: its position in an accepted draft, 0 if the target sampled it

    @property
    def stats(self) -> EagleStats:
        """Counters of all generations since load or stats.reset()."""
        raise NotImplementedError

    @property
    def _delegates(self) -> bool:
        """Whether llama-cpp-python itself generates."""
        return False

    def _tokens_from(self) -> TokenSource:
        raise NotImplementedError

    # -- generation ---------------------------------------------------------------------------------------

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sent, None]:
        """Same as Llama.generate, with the same tokens for the same seed."""
        claim = self._owner.claim(GENERATION, adopts=True)
        steps: Generator[Any, Any, None]
        if self._delegates:
            steps = super().generate(tokens, *args, **kwargs)
        else:
            steps, claim.adopts = self._generate(claim, tokens, *args, **kwargs), False
        try:
            yield from self._owner.run(claim, steps, take=True)
        finally:
            claim.adopts = True  # the call that it is part of may make another

    def _generate(
        self, claim: Claim, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sent, None]:
        bound = GENERATE.bind(self, tokens, *args, **kwargs)
        bound.apply_defaults()
        self._mirostat_mu = ctypes.c_float(2.0 * bound.arguments["mirostat_tau"])
        generation = Generation(list(tokens), bound.arguments, claim)
        with contextlib.closing(self._tokens_from().pieces(generation)) as pieces:
            yield from self._yield_tokens(pieces, generation.stopping)

    def _yield_tokens(
        self, pieces: Generator[Piece, Sent, None], stopping: Any
    ) -> Generator[int, Sent, None]:
        """Yields the tokens of all pieces. n_tokens always counts what precedes the token yielded."""
        sent: Sent = None
        last: int | None = None  # the token before the next one, if input_ids does not have it yet
        n = self.n_tokens
        while True:
            try:
                piece = pieces.send(sent)
            except StopIteration:
                return
            if last is None:
                n = self.n_tokens
            self._drafted_out += piece.drafted
            sent = None
            for i, token in enumerate(piece.tokens):
                if last is not None:
                    self.input_ids[n] = last
                    n += 1
                self.n_tokens = n  # logits processors may have moved it
                self.token_source = piece.sources[i]
                scores = self._keep_row(n - 1, piece.logits, i)
                if stopping is not None and stopping(self._input_ids, scores):
                    return
                self._count_token(piece, i)
                last = token
                more = yield token
                if self.n_tokens != n:
                    raise EagleError(
                        ErrorKind.CONTEXT_TAKEN,
                        f"this generation cannot continue: n_tokens was {n} at its last token and is"
                        f" {self.n_tokens} now",
                    )
                if more:  # the caller continues with tokens of its own
                    sent, last = [token, *more], None
                    break

    def _keep_row(
        self, position: int, logits: Callable[[int], np.ndarray] | None, i: int
    ) -> np.ndarray | None:
        """Copies logits(i), the row of position, to where the scores are read from, and returns the copy."""
        return self._rows.put(position, logits(i)) if self._rows is not None and logits is not None else None

    def _count_token(self, piece: Piece, i: int) -> None:
        """Called before the i-th token of a piece is yielded."""
        self._accepted_out += piece.sources[i] > 0
        self.stats.tokens += 1

    def _new_sampler(self, arguments: dict[str, Any], processors: GuardedProcessors | None) -> Any:
        """A sampler from the arguments of generate() or sample()."""
        guarded: Any = [processors] if processors is not None else None
        return self._init_sampler(**{k: arguments[k] for k in SAMPLER_ARGS}, logits_processor=guarded)

    def _params_for(self, processors: bool, engine: Engine) -> EagleParams:
        """Logits processors read the text before their row, which is contiguous only in a chain."""
        return self._params.chain() if processors and engine.trees(self._params) else self._params

    @property
    def _scores(self) -> np.ndarray:
        return super()._scores if self._rows is None else self._rows.array()

    # -- completions --------------------------------------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Llama's, with logprobs that need no logits_all, and with the counts of draft tokens in `usage`."""
        claim = self._owner.claim(GENERATION, adopts=True)
        steps: Any = super()._create_completion(*args, **kwargs)
        if not self._delegates:
            logprobs, echo = kwargs.get("logprobs"), kwargs.get("echo")
            claim.record = "none" if logprobs is None else "prompt" if echo else "all"
            steps = self._complete(claim, steps)
        yield from self._owner.run(claim, steps)

    def _complete(self, claim: Claim, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        drafted, accepted = self._drafted_out, self._accepted_out
        try:
            for item in steps:
                if "usage" in item:
                    item["usage"]["completion_tokens_details"] = prediction_details(
                        self._drafted_out - drafted, self._accepted_out - accepted
                    )
                yield item
        finally:
            steps.close()
            self._owner.release(claim, self._forget_rows)

    def _forget_rows(self) -> None:
        self._rows = None


def prediction_details(drafted: int, accepted: int) -> dict[str, int]:
    """OpenAI's completion_tokens_details."""
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
