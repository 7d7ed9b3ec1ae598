"""Layer inputs as the target's graph computes them, read by llama.cpp's evaluation callback (cb_eval).

They are the ground truth for captured features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EagleError, ErrorKind
from ...runtime.binding import address, llama_cpp
from ...runtime.library import find_lib_dir

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class GraphLayers:
    """A target, and a context whose evaluation callback keeps the input of every layer.

    The input of a layer is `l_out` of the layer before it, or the embeddings. model and ctx are addresses,
    for Engine and Capture. Raises EagleError BAD_FILE.
    """

    def __init__(
        self,
        path: str | Path,
        n_ctx: int = 512,
        n_batch: int = 128,
        n_ubatch: int = 128,
        n_seq: int = 1,
        n_threads: int = 2,
    ) -> None:
        self._base = _ggml()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise EagleError(ErrorKind.BAD_FILE, f"{path} cannot be loaded as a target")
        self.n_layer: int = llama_cpp.llama_model_n_layer(self._model)
        self.n_embd: int = llama_cpp.llama_model_n_embd(self._model)
        outputs = {f"l_out-{i}".encode(): i + 1 for i in range(self.n_layer)}
        self._names = {b"embd": 0, b"inp_embd": 0, **outputs}
        self._seen: dict[int, list[np.ndarray]] = {}
        self._callback = _CALLBACK(self._saw)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_seq_max, params.kv_unified = n_seq, True
        params.n_threads = params.n_threads_batch = n_threads
        typed = params.cb_eval is not None
        params.cb_eval = ctypes.cast(self._callback, type(params.cb_eval)) if typed else self._callback
        self._ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not self._ctx:
            llama_cpp.llama_model_free(self._model)
            raise EagleError(ErrorKind.BAD_FILE, f"cannot create a context for {path}")
        self.ctx, self.model = address(self._ctx), address(self._model)

    def _saw(self, tensor: int, ask: bool, _: Any) -> bool:
        k = self._names.get(self._base.ggml_get_name(tensor))
        if k is not None and not ask:
            data = np.empty(self._base.ggml_nbytes(tensor) // 4, np.float32)
            self._base.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
            self._seen.setdefault(k, []).append(data.reshape(-1, self.n_embd))
        return k is not None if ask else True

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        logits: Sequence[bool] | None = None,
    ) -> int:
        """Decodes one batch and returns llama_decode's code. Without `logits`, all tokens ask for logits."""
        self._seen.clear()
        n = len(tokens)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        rows = zip(tokens, positions, sequences or [0] * n, logits or [True] * n)
        for i, (t, p, s, out) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = t, p, 1, out
            batch.seq_id[i][0] = s
        code = llama_cpp.llama_decode(self._ctx, batch)
        llama_cpp.llama_batch_free(batch)
        return code

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)

    def truth(self, k: int) -> np.ndarray:
        """The input of layer k in the last decode, [n_tokens, n_embd]; for k = n_layer, the last output."""
        return np.concatenate(self._seen[k])

    def close(self) -> None:
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)


def _ggml() -> Any:
    lib_dir = find_lib_dir()
    assert lib_dir is not None  # importing runtime.binding has loaded the libraries
    base = ctypes.CDLL(str(next(p for p in lib_dir.iterdir() if p.stem.removeprefix("lib") == "ggml-base")))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [pointer]
    base.ggml_nbytes.restype, base.ggml_nbytes.argtypes = size, [pointer]
    base.ggml_backend_tensor_get.argtypes = [pointer, pointer, size, size]
    return base
