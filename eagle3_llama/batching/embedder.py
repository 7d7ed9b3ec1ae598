"""Embeddings of texts, in a context of its own, whose decodes come between the rounds of a Batcher."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.limits import MAX_ROWS
from ..errors import EagleError, ErrorKind
from ..llama.metadata import number
from ..runtime.binding import llama_cpp

from llama_cpp._internals import LlamaBatch, LlamaModel
from llama_cpp._utils import suppress_stdout_stderr

if TYPE_CHECKING:
    from .batcher import Batcher

POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # LLAMA_POOLING_TYPE_...
_NONE, _RANK = 0, 4


class Embedder:
    """One vector for a text: the hidden states of its tokens, pooled as the model says, or their mean.

    A model that reads from left to right gets MAX_ROWS tokens of a text between two rounds. One that reads
    in both directions, as BERT does, gets a whole text, of at most n_batch tokens.

    most: tokens of a text. n_embd: numbers of a vector. pooling: mean, cls or last.
    """

    def __init__(self, batcher: Batcher, model: str) -> None:
        """model: a GGUF file, or `target`. Raises EagleError BAD_FILE, UNSUPPORTED or MEMORY."""
        self._batcher, self._lock, self._owns = batcher, threading.Lock(), model != "target"
        self._model = _load(model, batcher.settings.n_gpu_layers) if self._owns else batcher.base._model
        self._ctx: Any = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        model, metadata = self._model.model, self._model.metadata()
        if llama_cpp.llama_model_has_encoder(model) and llama_cpp.llama_model_has_decoder(model):
            raise EagleError(
                ErrorKind.UNSUPPORTED, "a model with an encoder and a decoder makes no embeddings"
            )
        kind = number(metadata, "pooling_type") or 1
        if kind not in POOLINGS:
            what = "a reranker, which makes no embeddings" if kind == _RANK else f"of pooling type {kind}"
            raise EagleError(ErrorKind.UNSUPPORTED, f"the model for embeddings is {what}")
        self.pooling = POOLINGS[kind]
        self.n_embd = int(llama_cpp.llama_model_n_embd_out(model))
        self._n_vocab = int(self._model.n_vocab())
        self.most, self._step, self._pooled = (
            min(self._model.n_ctx_train(), self._batcher.n_ctx),
            MAX_ROWS,
            False,
        )
        self._ctx = self._context(_NONE)
        causal = metadata.get(f"{metadata.get('general.architecture')}.attention.causal") != "false"
        if not causal or not llama_cpp.llama_get_memory(self._ctx):
            # llama.cpp pools then: it needs all tokens of a text in one micro-batch
            llama_cpp.llama_free(self._ctx)
            self._ctx, self._pooled = None, True
            self.most = self._step = min(self.most, self._batcher.settings.n_batch)
            self._ctx = self._context(kind)
        self._batch = LlamaBatch(n_tokens=self._step, embd=0, n_seq_max=1, verbose=False)

    def _context(self, pooling: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.most, self._step, self._step
        params.n_threads = params.n_threads_batch = self._batcher.base.n_threads
        params.embeddings, params.pooling_type = True, pooling
        with suppress_stdout_stderr(disable=False):  # it warns of what is meant so
            ctx = llama_cpp.llama_init_from_model(self._model.model, params)
        if not ctx:
            raise EagleError(ErrorKind.MEMORY, "there is no room for the context of the embeddings")
        return ctx

    def close(self) -> None:
        """Frees the context, and the model if it is not the batcher's. May be called twice."""
        with self._lock:
            if self._ctx is not None:
                llama_cpp.llama_free(self._ctx)
                self._ctx = None
            if self._owns:
                self._model.close()

    def n_vocab(self) -> int:
        """Number of tokens that the model knows."""
        return self._n_vocab

    def tokenize(self, text: str) -> list[int]:
        """With the tokens that the model wants around a text. At the same time as others tokenize."""
        with self._batcher.base.tokenizing:
            return list(self._model.tokenize(text.encode(), True, True))

    def detokenize(self, tokens: list[int], special: bool = False) -> bytes:
        """The bytes of tokens."""
        return self._model.detokenize(tokens, special)

    def embed(self, tokens: list[int]) -> np.ndarray:
        """float32 [n_embd], of length 1. In any thread; one text at a time.

        Raises EagleError BAD_ARGUMENT for no tokens, too many or unknown ones, as Batcher.request() does, and
        NATIVE if the context fails.
        """
        if not 0 < len(tokens) <= self.most or not all(0 <= t < self._n_vocab for t in tokens):
            message = f"expected 1..{self.most} tokens, with ids 0..{self._n_vocab - 1}"
            raise EagleError(ErrorKind.BAD_ARGUMENT, message)
        with self._lock:
            decode = lambda at: self._decode(tokens[at : at + self._step], at)
            starts = range(0, len(tokens), self._step)
            rows = [self._batcher.inbox.run(functools.partial(decode, at)) for at in starts]
        if self._pooled or self.pooling == "last":
            vector = rows[-1][-1]
        else:
            vector = rows[0][0] if self.pooling == "cls" else np.concatenate(rows).mean(axis=0)
        size = np.linalg.norm(vector)
        if not np.isfinite(size):
            raise EagleError(ErrorKind.NATIVE, "the embedding is not finite")
        unit: np.ndarray = (vector / (size or 1.0)).astype(np.float32)
        return unit

    def _decode(self, chunk: list[int], at: int) -> np.ndarray:
        """The states of the chunk's tokens, float64 [n, n_embd]; pooled, [1, n_embd]. at: their position."""
        if self._ctx is None:
            raise EagleError(ErrorKind.NATIVE, "the embeddings' context is closed")
        memory = llama_cpp.llama_get_memory(self._ctx)
        if memory and at == 0:
            llama_cpp.llama_memory_clear(memory, True)
        self._batch.set_batch(chunk, at, True)
        run = llama_cpp.llama_decode if memory else llama_cpp.llama_encode
        if (code := run(self._ctx, self._batch.batch)) != 0:
            raise EagleError(ErrorKind.NATIVE, f"the embeddings' context failed with code {code}")
        if self._pooled:
            found = llama_cpp.llama_get_embeddings_seq(self._ctx, 0)
            return np.ctypeslib.as_array(found, (1, self.n_embd)).astype(np.float64)
        found = llama_cpp.llama_get_embeddings(self._ctx)
        return np.ctypeslib.as_array(found, (len(chunk), self.n_embd)).astype(np.float64)


def _load(path: str, n_gpu_layers: int) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0x7FFFFFFF if n_gpu_layers == -1 else n_gpu_layers
    try:
        return LlamaModel(path_model=path, params=params, verbose=False)
    except ValueError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"cannot load {path}: {e}") from e
