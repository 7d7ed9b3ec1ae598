"""The target with capture: logits and features of every row, for many sequences, from either backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens, is_end
from ..llama.eagle_llama import EagleLlama
from ..runtime.binding import address, llama_cpp
from ..runtime.capture import Capture

N_BATCH = 512


class Backend(Protocol):
    """Computes rows of the target.

    forward() takes at most N_BATCH rows, either all of one slot or one of each slot. It returns logits,
    float32 [n, n_vocab], valid until the next call, and features, float32 [n, layers + 1, n_embd].
    """

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def clear(self, slot: int) -> None: ...

    def close(self) -> None: ...


class LlamaBackend:
    """llama.cpp's own forward pass, with a context of n_slots sequences."""

    def __init__(
        self, model: object, layers: Sequence[int], n_slots: int, n_ctx: int, n_threads: int
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_slots * n_ctx, n_slots, False
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = n_threads
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        if not self.ctx:
            raise EagleError(ErrorKind.MEMORY, f"no memory for {n_slots} x {n_ctx} tokens: use fewer --slots")
        self.batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        n_layer = llama_cpp.llama_model_n_layer(model)
        self.capture = Capture(address(self.ctx), [*layers, n_layer], llama_cpp.llama_model_n_embd(model))

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        b, n = self.batch, len(tokens)
        b.n_tokens = n
        for i in range(n):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = tokens[i], positions[i], 1, 1
            b.seq_id[i][0] = slots[i]
        code = llama_cpp.llama_decode(self.ctx, b)
        if code != 0:
            raise EagleError(
                ErrorKind.DECODE,
                f"llama_decode of {n} tokens returned {code}: capture does not support this target",
            )
        logits = llama_cpp.llama_get_logits(self.ctx)
        return np.ctypeslib.as_array(logits, shape=(n, self.n_vocab)), self.capture.read(n)

    def clear(self, slot: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), slot, -1, -1)

    def close(self) -> None:
        self.capture.close()
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.ctx)


class TrainingTarget:
    """A GGUF with n_slots sequences of n_ctx tokens each.

    Its features are the inputs of `layers` and the output of the last layer. device: None computes with
    llama.cpp, a PyTorch device computes there from the dequantised weights. Raises EagleError BAD_FILE.
    """

    def __init__(
        self,
        path: str,
        layers: Sequence[int] | None,
        n_slots: int,
        n_ctx: int,
        n_threads: int,
        device: str | None = None,
    ) -> None:
        self.path, self.n_slots, self.n_ctx = path, n_slots, n_ctx
        try:
            self.llm = EagleLlama(path, n_ctx=32, n_batch=32, verbose=False)  # tokenizer, template, weights
        except ValueError as e:
            raise EagleError(ErrorKind.BAD_FILE, f"{path} cannot be loaded: {e}") from e
        model = self.llm._model.model
        self.n_layer = llama_cpp.llama_model_n_layer(model)
        self.n_embd, self.n_vocab = llama_cpp.llama_model_n_embd(model), self.llm.n_vocab()
        self.layers = list(layers) if layers is not None else default_layers(self.n_layer)
        if device is None:
            self.backend: Backend = LlamaBackend(model, self.layers, n_slots, n_ctx, n_threads)
        else:
            from .torch_backend import TorchBackend

            self.backend = TorchBackend(path, self.layers, n_slots, n_ctx, device)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits float32 [n, n_vocab], valid till the next call; features float16 [n, layers + 1, n_embd]."""
        rows, features = self.backend.forward(tokens, positions, slots)
        if not np.isfinite(features).all():
            raise EagleError(ErrorKind.BAD_VALUE, f"{self.path} has features that are not finite")
        return rows, np.clip(features, -65504, 65504).astype(np.float16)

    def prefill(self, tokens: Sequence[int], slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fills a slot from its start. Returns features, best next tokens, logits after the last token."""
        self.backend.clear(slot)
        features, best, last = [], [], np.empty(0, np.float32)
        for i in range(0, len(tokens), N_BATCH):
            part = tokens[i : i + N_BATCH]
            rows, f = self.decode(part, range(i, i + len(part)), [slot] * len(part))
            features.append(f)
            best.append(rows.argmax(1).astype(np.int32))
            last = rows[-1].copy()
        return np.concatenate(features), np.concatenate(best), last

    def chat(self, messages: list[dict[str, str]] | str) -> list[int]:
        return chat_tokens(self.llm, messages)

    def is_end(self, token: int) -> bool:
        return is_end(self.llm, token)

    def close(self) -> None:
        """Frees the backend and the model."""
        self.backend.close()
        self.llm.close()


def default_layers(n_layer: int) -> list[int]:
    """The layers 2, n/2 and n - 3, as in EAGLE-3. Fewer if the model has too few layers."""
    return sorted({min(2, n_layer - 1), n_layer // 2, max(n_layer - 3, 0)})
