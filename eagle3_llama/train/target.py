"""The target under llama.cpp with capture on: many sequences in one context, every row's logits and features."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ..capture import Capture
from ..chat import chat_tokens, is_end
from ..errors import EagleError, ErrorKind
from ..llama import EagleLlama, _address

import llama_cpp  # after ..llama: it brings the library


class Target:
    """A GGUF with n_slots sequences of n_ctx tokens each; features are the inputs of `layers` and the last layer's output."""

    def __init__(self, path: str, layers: Sequence[int] | None, n_slots: int, n_ctx: int, n_threads: int) -> None:
        self.path, self.n_slots, self.n_ctx, self.n_batch = path, n_slots, n_ctx, 512
        try:
            self.llm = EagleLlama(path, n_ctx=32, n_batch=32, verbose=False)  # tokenizer, template, metadata
        except ValueError as e:
            raise EagleError(ErrorKind.BAD_FILE, f"{path} cannot be loaded: {e}") from e
        model = self.llm._model.model
        self.n_layer, self.n_embd = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_embd(model)
        self.n_vocab = self.llm.n_vocab()
        self.layers = list(layers) if layers is not None else default_layers(self.n_layer)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_slots * n_ctx, n_slots, False
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_threads = params.n_threads_batch = n_threads
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        if not self.ctx:
            raise EagleError(ErrorKind.MEMORY, f"no context of {n_slots} x {n_ctx} tokens for {path}: use fewer --slots")
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self.capture = Capture(_address(self.ctx), [*self.layers, self.n_layer], self.n_embd)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """At most n_batch rows: logits float32 [n, n_vocab], valid until the next call, and features float16 [n, layers + 1, n_embd]."""
        b, n = self.batch, len(tokens)
        b.n_tokens = n
        for i in range(n):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = tokens[i], positions[i], 1, 1
            b.seq_id[i][0] = slots[i]
        code = llama_cpp.llama_decode(self.ctx, b)
        if code != 0:
            raise EagleError(ErrorKind.DECODE, f"llama_decode of {n} tokens returned {code}: this target cannot be captured")
        features = self.capture.read(n)
        if not np.isfinite(features).all():
            raise EagleError(ErrorKind.BAD_VALUE, f"{self.path} gives features that are not finite")
        rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.ctx), shape=(n, self.n_vocab))
        return rows, np.clip(features, -65504, 65504).astype(np.float16)

    def prefill(self, tokens: Sequence[int], slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A slot from its start: features of all tokens, the target's best token after each, logits after the last."""
        self.clear(slot)
        features, best, last = [], [], None
        for i in range(0, len(tokens), self.n_batch):
            part = tokens[i : i + self.n_batch]
            rows, f = self.decode(part, range(i, i + len(part)), [slot] * len(part))
            features.append(f)
            best.append(rows.argmax(1).astype(np.int32))
            last = rows[-1].copy()
        return np.concatenate(features), np.concatenate(best), last

    def clear(self, slot: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)

    def chat(self, messages: list[dict[str, str]] | str) -> list[int]:
        return chat_tokens(self.llm, messages)

    def is_end(self, token: int) -> bool:
        return is_end(self.llm, token)

    def close(self) -> None:
        """Frees the context and the model."""
        self.capture.close()
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.ctx)
        self.llm.close()


def default_layers(n_layer: int) -> list[int]:
    """Inputs of layers 2, n/2 and n - 3, as EAGLE-3 captures; fewer where the model has not so many."""
    return sorted({min(2, n_layer - 1), n_layer // 2, max(n_layer - 3, 0)})
