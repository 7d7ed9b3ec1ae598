"""Captures features, the inputs of some layers, of any target. It needs no head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .library import checked, load


class Capture:
    """Keeps the inputs of target layers from every llama_decode on a context until close().

    ctx: the address of a llama_context. extract_layers: ascending ids in 0..n_layer, numbered as llama.cpp's
    layer_inp and Hugging Face's hidden_states. Id n_layer is the output of the last layer; with it, every
    token of a batch must request logits. Raises EagleError BAD_ARGUMENT.
    """

    def __init__(self, ctx: int, extract_layers: Sequence[int], n_embd: int) -> None:
        self.ffi, self.lib = load()
        self._ctx = self.ffi.cast("void *", ctx)
        self._layers = self.ffi.new("int32_t[]", list(extract_layers) or 1)
        self.n_layers = len(extract_layers)
        self.n_embd = n_embd
        checked(self.lib.eagle3_capture_set(self._ctx, self._layers, self.n_layers))

    def read(self, n_tokens: int) -> np.ndarray:
        """Features of the last llama_decode, in batch order: float32 [n_tokens, n_layers, n_embd]."""
        out = np.empty((n_tokens, self.n_layers, self.n_embd), np.float32)
        checked(
            self.lib.eagle3_capture_get(
                self._ctx, self._layers, self.n_layers, n_tokens, self.ffi.from_buffer("float[]", out)
            )
        )
        return out

    def close(self) -> None:
        """Switches capture off. It then costs no time and no memory."""
        checked(self.lib.eagle3_capture_set(self._ctx, self.ffi.NULL, 0))

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
