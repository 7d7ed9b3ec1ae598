"""A Llama whose tokens come from a TokenSource: EagleLlama and a batcher's requests."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import EagleError
from ..runtime.binding import Llama, llama_cpp
from ..runtime.engine import Engine
from ..runtime.params import EagleParams
from ..runtime.stats import EagleStats
from . import guards, loop
from .answer_text import AnswerText, stop_strings
from .calls import Calls
from .completion_options import CompletionOptions
from .flash import FlashLlama
from .infill import Infill
from .loop import Output, Sent, TokenSource
from .ownership import Claim, Ownership
from .processors import GuardedProcessors
from .text import Text
from .token_bytes import BytesOf, TokenBytes, bytes_of
from .usage import TokenUsage

GENERATE_SIGNATURE = inspect.signature(Llama.generate)
SAMPLER_ARGS = set(inspect.signature(Llama._init_sampler).parameters) - {"self", "logits_processor"}
TEMPLATE_STOP = "Jinja2ChatFormatter.__call__.<locals>.stop_on_last_token"  # a function of llama-cpp-python
RANDOM = (1 << 32) - 1  # the low bits of a seed that llama.cpp takes for a random one
FIXED = 0x9E3779B9  # the seed in its place; 2^32 - 2, say, would give a request's next choice the same text
HOLDER = "another generation"  # what errors call a generation that holds the context


@dataclasses.dataclass
class GenerateCall:
    """One call of generate(). arguments: those of Llama.generate, with their defaults."""

    prompt: list[int]
    arguments: dict[str, Any]
    claim: Claim
    options: CompletionOptions

    @property
    def stopping(self) -> Any:
        return self.arguments["stopping_criteria"]


def reads_rows(stopping: Any) -> bool:
    """True if stopping criteria may read logits. That of llama-cpp-python's chat templates does not."""
    criteria = stopping if isinstance(stopping, list) else [stopping]
    return stopping is not None and any(getattr(f, "__qualname__", "") != TEMPLATE_STOP for f in criteria)


def text_property(name: str) -> Any:
    """An attribute that Llama has, and its text owns."""

    def set_it(llm: GeneratingLlama, value: Any) -> None:
        setattr(llm._text, name, value)

    return property(lambda llm: getattr(llm._text, name), set_it)


class GeneratingLlama(FlashLlama):
    """A Llama whose generate() takes its tokens from a TokenSource. Everything else makes text from these."""

    calls: Calls
    _owner: Ownership
    _params: EagleParams
    _text: Text
    _used: TokenUsage  # sums over all generations
    _sampler: Any
    _options: CompletionOptions | None = None  # a completion's, whose generation has not begun
    _answered: tuple[list[int], list[int]]  # the last generation's prompt, and its tokens so far

    n_tokens = text_property("n_tokens")
    input_ids = text_property("input_ids")
    scores = text_property("scores")
    draft_position = text_property("draft_position")  # the last token's
    draft_source = text_property("draft_source")
    _requires_eval = text_property("stale")

    @property
    def stats(self) -> EagleStats:
        """Counters of all generations since load or stats.reset()."""
        raise NotImplementedError

    @property
    def _scores(self) -> np.ndarray:
        return self._text.kept()

    @property
    def _delegates(self) -> bool:
        """True if llama-cpp-python itself generates."""
        return False

    def _tokens_from(self, call: GenerateCall) -> TokenSource:
        """Called in the generation's first step."""
        raise NotImplementedError

    @staticmethod
    def _closed_error() -> EagleError:
        """The error of a call after close()."""
        return guards.closed()

    def set_seed(self, seed: int) -> None:
        """Same as Llama.set_seed, and so is the seed of each call. A given seed is always fixed.

        Of its low 32 bits alone, as in Llama. It takes -1, 4294967295 and others with these bits for a random
        seed. So does the constructor here, whose default that is.
        """
        super().set_seed(FIXED if seed & RANDOM == RANDOM else seed)  # type: ignore[no-untyped-call]

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        """Same as Llama.tokenize. Other threads may generate meanwhile."""
        with self.calls:
            return super().tokenize(*args, **kwargs)

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Same as Llama.detokenize. Other threads may generate meanwhile."""
        with self.calls:
            if type(self.tokenizer_) is not llama_cpp.LlamaTokenizer:
                return super().detokenize(tokens, prev_tokens, special)
            return self._token_bytes(tokens, special)

    @functools.cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._bytes_of, self.token_bos())

    @functools.cached_property
    def _bytes_of(self) -> BytesOf:
        return bytes_of(self._model)

    # -- generation ---------------------------------------------------------------------------------------

    def generate(
        self, tokens: Sequence[int], *args: Any, max_tokens: int | None = None, **kwargs: Any
    ) -> Generator[int, Sent, None]:
        """Same as Llama.generate, with the same tokens for the same seed.

        max_tokens: how many of them the caller will take, if it knows: no draft goes beyond. It does not end
        the generation. The caller also says that it will take them all, up to one that ends generation: some
        may then be sampled before it has read those before them. A sampler that remembers, with a seed or
        penalties, is ahead of it then, where it sends tokens or calls sample().
        """
        claim = self._owner.claim(HOLDER, adopts=True)
        options, self._options = self._options or CompletionOptions(), None
        steps: Generator[Any, Any, None]
        if self._delegates:
            steps = super().generate(tokens, *args, **kwargs)
        else:
            if max_tokens is not None:
                options.max_tokens, options.ahead = max_tokens, True
            steps = self._steps(claim, options, tokens, *args, **kwargs)
            claim.adopts = False
        try:
            yield from self._owner.run(claim, steps, take=True)
        finally:
            claim.adopts = options.over = True  # the call that it is part of may make another

    def _steps(
        self, claim: Claim, options: CompletionOptions, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sent, None]:
        bound = GENERATE_SIGNATURE.bind(self, tokens, *args, **kwargs)
        bound.apply_defaults()
        self._mirostat_mu = ctypes.c_float(2.0 * bound.arguments["mirostat_tau"])
        call = GenerateCall(list(tokens), bound.arguments, claim, options)
        self._answered = call.prompt, []
        begin = functools.partial(self._tokens_from, call)
        return loop.generate(begin, self._text, call.stopping, self._count_token)

    def _count_token(self, output: Output, i: int) -> None:
        """Called before the i-th token of an output is yielded."""
        out = output.round
        if out.positions[i] > 0:
            self._used.count_accepted(out.sources[i])
        self._answered[1].append(out.tokens[i])
        self.stats.tokens += 1

    def _new_sampler(self, arguments: dict[str, Any], processors: GuardedProcessors | None) -> Any:
        """A sampler from the arguments of generate() or sample()."""
        guarded: Any = [processors] if processors is not None else None
        return self._init_sampler(**{k: arguments[k] for k in SAMPLER_ARGS}, logits_processor=guarded)

    def _params_for(self, processors: bool, engine: Engine) -> EagleParams:
        """Logits processors read the text before their row, which is contiguous only in a chain."""
        return self._params.chain() if processors and engine.trees(self._params) else self._params

    # -- completions --------------------------------------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Llama's, with logprobs that need no logits_all, and with the counts of draft tokens in `usage`."""
        if kwargs.get("suffix") is not None:
            infill = Infill(self, kwargs)
            yield from infill.items(GeneratingLlama._create_completion(self, *args, **infill.arguments))
            return
        claim = self._owner.claim(HOLDER, adopts=True)
        steps: Any = super()._create_completion(*args, **kwargs)
        if not self._delegates:
            logprobs, echo, limit = (kwargs.get(name) for name in ("logprobs", "echo", "max_tokens"))
            options, self._options = self._options or CompletionOptions(), None
            options.max_tokens = limit if limit is not None and limit > 0 else None
            options.record = "none" if logprobs is None else "prompt" if echo else "all"
            options.ends = True
            options.ahead = all(map(self._ends_generation, stop_strings(kwargs.get("stop"))))
            begin = [] if kwargs["prompt"] else [self.token_bos()]  # llama-cpp-python counts it to the answer
            whole = functools.partial(self._answer, begin)
            steps = self._complete(claim, options, steps, AnswerText(options, whole, kwargs))
        yield from self._owner.run(claim, steps)

    def _complete(
        self, claim: Claim, options: CompletionOptions, steps: Generator[Any, None, None], text: AnswerText
    ) -> Generator[Any, None, None]:
        before, self._options = self._used.copy(), options
        try:
            for item in steps:
                if "usage" in item:
                    item["usage"]["completion_tokens_details"] = (self._used - before).prediction()
                yield from text.mend(item)
        finally:
            steps.close()
            self._leave(options)
            self._owner.release(claim, self._forget_rows)

    def _leave(self, options: CompletionOptions) -> None:
        """Takes back what no generation has begun with."""
        if self._options is options:
            self._options = None

    def _ends_generation(self, stop: str) -> bool:
        """True if a stop string is the text of a token that ends generation, as a chat template's is."""
        tokens = self.tokenize(stop.encode(), add_bos=False, special=True)
        return len(tokens) == 1 and bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, tokens[0]))

    def _answer(self, begin: list[int]) -> bytes:
        """The text of the last generation after the tokens `begin`, without the token that ended it."""
        prompt, tokens = self._answered
        if tokens and llama_cpp.llama_vocab_is_eog(self._model.vocab, tokens[-1]):
            tokens = tokens[:-1]
        return self.detokenize(begin + tokens, prev_tokens=prompt) if tokens else b""

    def _forget_rows(self) -> None:
        self._text.rows = None
