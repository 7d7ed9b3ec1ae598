"""The model that a Batcher's requests share."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, Callable

from .chat import is_end
from .errors import EagleError, ErrorKind
from .llama import EagleLlama
from .params import _check_int

MAX_SLOTS = 32
MAX_INTERVAL = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """What a Batcher is made of. n_ctx: tokens of one slot; the cache holds n_parallel times as many. interval: seconds that a
    request lets tokens gather for before it goes on reading; 0 takes those of each round at once."""

    model: str
    eagle: str | None = None
    n_parallel: int = 4
    n_ctx: int = 4096
    n_threads: int | None = None
    n_gpu_layers: int = 0
    flash_attn: bool = True
    chat_format: str | None = None
    extract_layers: tuple[int, ...] | None = None
    n_batch: int = 512
    interval: float = 0.0

    def __post_init__(self) -> None:
        _check_int("n_parallel", self.n_parallel, 1, MAX_SLOTS)
        _check_int("n_ctx", self.n_ctx, 64, 1 << 22)
        _check_int("n_batch", self.n_batch, 64, 1 << 14)
        if not 0.0 <= self.interval <= MAX_INTERVAL:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"interval is {self.interval!r}, expected seconds 0..{MAX_INTERVAL:g}")
        if self.n_threads is not None:
            _check_int("n_threads", self.n_threads, 1, 1024)


class BatchModel(EagleLlama):
    """A model with a context of several sequences, each in a stream of its own cache. Tokenises; never generates."""

    def __init__(self, s: BatchSettings) -> None:
        self._n_slots = s.n_parallel
        n = s.n_threads or os.cpu_count() or 1
        super().__init__(s.model, eagle_path=s.eagle, extract_layers=s.extract_layers, n_ctx=s.n_ctx * s.n_parallel, n_batch=s.n_batch,
                         n_threads=n, n_threads_batch=n, n_gpu_layers=s.n_gpu_layers, flash_attn=s.flash_attn, chat_format=s.chat_format, verbose=False)

    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.n_seq_max = self._n_slots  # Llama has no argument for it
        self._context_params = params

    def is_end(self, token: int) -> bool:
        """Whether a token ends generation."""
        return bool(is_end(self, token))

    def detokenize_pieces(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As Llama.detokenize, which completions ask for the whole text at every token: pieces are kept."""
        if type(self.tokenizer_).__name__ != "LlamaTokenizer":
            return self.detokenize(tokens, prev_tokens, special)
        out = b"".join([self._piece(token, special) for token in tokens])
        return out[1:] if tokens and tokens[0] == self.token_bos() and out[:1] == b" " else out

    @functools.cached_property
    def _piece(self) -> Callable[[int, bool], bytes]:
        model = self._model
        return functools.lru_cache(maxsize=1 << 16)(lambda token, special: model.detokenize([token], special=special))
