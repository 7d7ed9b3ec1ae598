"""Features of any target, without a head: the inputs of some of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import EagleError, ErrorKind
from .library import load


class Capture:
    """Keeps the inputs of target layers from every llama_decode on a context, until closed.

    ctx is the address of a llama_context; extract_layers are ids 0..n_layer in ascending order, n_layer being
    after the last layer (then every token of a batch must ask for logits). Ids as in llama.cpp's layer_inp,
    which are Hugging Face's hidden_states[k].
    """

    def __init__(self, ctx: int, extract_layers: Sequence[int], n_embd: int) -> None:
        self.ffi, self.lib = load()
        self._ctx = self.ffi.cast("void *", ctx)
        self._layers = self.ffi.new("int32_t[]", list(extract_layers) or 1)
        self.n_layers, self.n_embd = len(extract_layers), n_embd
        self._check(self.lib.eagle3_capture_set(self._ctx, self._layers, self.n_layers))

    def _check(self, code: int) -> None:
        if code < 0:
            message = self.ffi.string(self.lib.eagle3_last_error()).decode("utf-8", "replace")
            raise EagleError(ErrorKind.BAD_ARGUMENT, message)

    def read(self, n_tokens: int) -> np.ndarray:
        """What the last llama_decode of n_tokens kept: float32 [n_tokens, n_layers, n_embd], batch order."""
        out = np.empty((n_tokens, self.n_layers, self.n_embd), np.float32)
        self._check(
            self.lib.eagle3_capture_get(
                self._ctx, self._layers, self.n_layers, n_tokens, self.ffi.from_buffer("float[]", out)
            )
        )
        return out

    def close(self) -> None:
        """Capture off: no cost, no memory."""
        self._check(self.lib.eagle3_capture_set(self._ctx, self.ffi.NULL, 0))

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
